"""Authentication, access control and quotas of a broker.

principals.py names a connection; sasl.py, scram.py and tokens.py authenticate it.
acls.py decides which operations are allowed; guards.py checks each request with it.
stored.py stores users, access control lists and quotas.
"""
