"""Recordings of a broker's traffic: their file, their writer, and the removal of secrets."""
