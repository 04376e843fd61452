"""Looks at the files of logs, healthy or damaged, without opening them for writing."""
