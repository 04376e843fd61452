"""From bytes to values and back, without a disk: numbers, codecs, columns, the old
formats, the records of groups.
"""
