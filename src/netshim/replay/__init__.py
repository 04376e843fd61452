"""Replay of a recording: sends its requests again and compares the responses."""
