"""Encoders and decoders of numbers, compressed bodies, columns, old message formats, and
the records of groups and transactions. They do not access the disk.
"""
