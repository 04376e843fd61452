"""Authentication, access control and quotas of a broker.

principals.py names a connection; sasl.py, scram.py and tokens.py authenticate it.
acls.py decides about operations; guards.py asks it before each request. stored.py keeps
users, access control lists and quotas.
"""
