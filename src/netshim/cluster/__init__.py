"""A broker in a cluster: its membership, its replicas, and the controller.

    registry_nodes      paths and values of the registry nodes of a cluster
    view                the cluster as one broker has read it: brokers, topics, states
    controller          elects leaders and finishes what administrators requested
    member              this broker in the registry: its session, and its view
    broker_connections  connections to other brokers, with a login
    peer_requests       requests to other brokers, sent together
    peer_views          newer leaders, as other brokers report them
    directory           topics of the cluster, with the interface of a log directory
    fetcher             copies partitions from one leader
    replicas            the roles of this broker, high watermarks, changes of the ISR
    shards              the group coordinators of the partitions that this broker leads
    transaction_shards  the same for transactions
    topology            brokers and replicas, as clients see them
    node                builds these parts for a server

The decisions are those of logcore.replication. A broker without a cluster does not import
this package.
"""
