"""Group membership and progress, and open transactions: Kafka's coordinators, without
I/O.

Rules:
- A transition changes one group, or one transactional id, and returns effects: replies,
  records to store, timers, events. It does not carry them out.
- The caller passes the time and the source of random ids (`new_id`). It identifies a
  request by a `waiter`.
- A broker, a process without a broker and a simulation with a virtual clock therefore
  run the same code.

    effects        effects of a transition, and outcomes of requests
    group          a group and its members: facts, decisions, small changes
    membership     joining, syncing, heartbeats, leaving, timeouts
    consumergroup  a group of the consumer protocol (KIP-848): facts, decisions
    heartbeats     its members: joining, revoking and getting partitions, leaving,
    timeouts
    classicmembers classic members of such a group, and changes of protocol
    targets        its assignors, which compute the target of each member
    offsets        commits, their deletion and their expiry
    coordinator    all groups of one broker: finds the group of a request
    timers         deadline queue without a clock
    remembered     memory limit for all client state
    packing        a group as the text of a registry node
    transactions   all transactional ids of one broker, and their transitions
    transactioneffects  effects of transactions, and outcomes of requests

This package does not know the protocol's messages, error codes by version, the log that
stores the records, or which topics exist.
"""
