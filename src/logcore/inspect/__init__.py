"""Reads, checks and copies the files of logs, intact or damaged, without changing them."""
