"""The program `logcore`: its commands, their input and their output."""
