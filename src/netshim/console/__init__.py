"""The console: web pages that show a log directory as it is."""
