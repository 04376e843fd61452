"""The HTTP server of a broker: metrics, health and test control.

It needs the extra `http`, so it is imported only if it is used.
"""
