"""Internals of logcore.logdir: topics, open logs, maintenance and identity of a log
directory.
"""
