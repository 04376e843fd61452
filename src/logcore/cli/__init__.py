"""The program `logcore`: its commands, what they read and what they print."""
