"""A schema registry that stores its schemas in the topic `_schemas` of a broker.

It needs the extras `http` and `schemas`, so it is imported only if it is used.
"""
