"""The console: web pages that show the current state of a log directory."""
