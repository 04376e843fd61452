"""Replication of partitions: the decisions of leaders, followers and the controller.

The modules are pure: they have no I/O, no clock and no registry. A caller passes a
value, an event and the time, and gets the next value and the effects.

    state      the state of a partition in the registry, and the role of a broker in it
    leading    a leader's state: ends of followers, high watermark, changes of the ISR
    following  a follower's state: the next fetch, and the handling of its answer
    electing   the controller's decisions: members of the ISR, leaders, reassignments
    identity   topics of the same name: which replicas belong to which
    placing    the placement of new partitions on brokers

netshim.cluster carries the decisions out; see docs/replication.md.
"""
