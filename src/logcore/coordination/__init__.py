"""Who is in a consumer group and how far the group has come; which transactions are open: Kafka's coordinators, pure.

Rules:
- A transition changes one group, or one transactional id, and returns effects: replies, records to store, timers,
  events. It carries out none.
- Time comes with each call, chance as `new_id`, and requests are told apart by a `waiter` that only the caller knows.
- So a broker, a process without one and a simulation with a virtual clock drive the same code.

    effects        what a transition asks for, and how requests end
    group          a group and its members: facts, decisions, small changes
    membership     joining, syncing, heartbeats, leaving, timeouts
    consumergroup  a group of the consumer protocol (KIP-848): facts, decisions
    heartbeats     its members: joining, giving up and getting partitions, leaving, timeouts
    targets        its assignors: which member is to have what
    offsets        commits, their deletion and their expiry
    coordinator    all groups of one broker: which group a request means
    timers         what is due at which time
    transactions   all transactional ids of one broker, and what each request makes of them
    transactioneffects  the same as effects, of transactions

Not here: the shapes of requests, error codes by version, the log that stores the records, which topics exist. A group
that has members does not change its protocol.
"""
