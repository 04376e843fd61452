"""Kafka's group coordinator and transaction coordinator, without I/O.

Rules:
- A transition changes one group, or one transactional id, and returns effects: replies,
  records to store, timers, events. It does not execute them.
- The caller passes the time and the source of random ids (`new_id`). It identifies a
  request by a `waiter`.
- A broker, a process without a broker and a simulation with a virtual clock therefore
  run the same code.

    coordinator           all groups of one broker: finds the group of a request
    group_requests        requests to a group, their results and errors, and limits
    effects               effects of a transition of a group
    classic_group         a group and its members: state and decisions
    classic_transitions   joining, syncing, heartbeats, leaving, timeouts
    consumer_group        a group of the consumer protocol (KIP-848): state and decisions
    consumer_transitions  heartbeats of its members: joining, getting and revoking
                          partitions, leaving, timeouts
    consumer_assignors    Kafka's assignors, which compute the target of each member
    migration             classic members of such a group, and changes of protocol
    offsets               commits, their deletion and their expiry
    transactions          all transactional ids of one broker, and their transitions
    transaction_effects   effects of a transition of a transaction, and its requests
    memory_budget         memory limit for the state of all clients

This package contains no messages and no error codes of the protocol. It neither reads nor
writes a log, and gets the existing topics from its caller.
"""
