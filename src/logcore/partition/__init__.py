"""The internals of one partition, above segments and below `log` and `reader`."""
