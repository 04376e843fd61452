"""The inside of a directory of topics, below logdir, which users meet."""
