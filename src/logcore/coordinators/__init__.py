"""Runs the group and transaction coordinators of a log directory without a broker.

The transitions are in `logcore.coordination`; this package stores their records.
"""
