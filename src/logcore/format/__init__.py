"""Encoders and decoders, which do not use the disk: numbers, codecs, columns, the old
formats, and the records of groups and transactions.
"""
