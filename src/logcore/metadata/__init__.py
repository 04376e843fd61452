"""Small files of a log directory, the names of its files, and the right to write to it."""
