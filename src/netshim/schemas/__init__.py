"""A schema registry over the topic `_schemas` of a broker. Loaded only if used.

Needs the extras `http` and `schemas`.
"""
