"""The inside of one partition: what a log and its readers are made of, above segments and below `log` and `reader`."""
