"""Faults for tests of clients: rules that change how a broker answers requests."""
