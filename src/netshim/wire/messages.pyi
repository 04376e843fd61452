"""The types of all messages: written by tools/wire_stubs.py from wire/table/. Do not edit.

A field has the type it holds in any served version; what a version lacks holds its default.
"""

from collections.abc import Sequence

from netshim.wire.compiler import Buffer

class ProduceRequest:
    class Topic:
        class Partition:
            index: int
            records: Buffer | None
            def __init__(
                self,
                *,
                index: int = ...,
                records: Buffer | None = ...,
            ) -> None: ...

        name: str
        topic_id: bytes
        partition_data: list[ProduceRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            topic_id: bytes = ...,
            partition_data: list[ProduceRequest.Topic.Partition] = ...,
        ) -> None: ...

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topic_data: list[ProduceRequest.Topic]
    def __init__(
        self,
        *,
        transactional_id: str | None = ...,
        acks: int = ...,
        timeout_ms: int = ...,
        topic_data: list[ProduceRequest.Topic] = ...,
    ) -> None: ...

class ProduceResponse:
    class Topic:
        class Partition:
            class RecordError:
                batch_index: int
                batch_index_error_message: str | None
                def __init__(
                    self,
                    *,
                    batch_index: int = ...,
                    batch_index_error_message: str | None = ...,
                ) -> None: ...

            class CurrentLeader:
                leader_id: int
                leader_epoch: int
                def __init__(
                    self,
                    *,
                    leader_id: int = ...,
                    leader_epoch: int = ...,
                ) -> None: ...

            index: int
            error_code: int
            base_offset: int
            log_append_time_ms: int
            log_start_offset: int
            record_errors: list[ProduceResponse.Topic.Partition.RecordError]
            error_message: str | None
            current_leader: ProduceResponse.Topic.Partition.CurrentLeader
            def __init__(
                self,
                *,
                index: int = ...,
                error_code: int = ...,
                base_offset: int = ...,
                log_append_time_ms: int = ...,
                log_start_offset: int = ...,
                record_errors: list[ProduceResponse.Topic.Partition.RecordError] = ...,
                error_message: str | None = ...,
                current_leader: ProduceResponse.Topic.Partition.CurrentLeader = ...,
            ) -> None: ...

        name: str
        topic_id: bytes
        partition_responses: list[ProduceResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            topic_id: bytes = ...,
            partition_responses: list[ProduceResponse.Topic.Partition] = ...,
        ) -> None: ...

    class NodeEndpoint:
        node_id: int
        host: str
        port: int
        rack: str | None
        def __init__(
            self,
            *,
            node_id: int = ...,
            host: str = ...,
            port: int = ...,
            rack: str | None = ...,
        ) -> None: ...

    responses: list[ProduceResponse.Topic]
    throttle_time_ms: int
    node_endpoints: list[ProduceResponse.NodeEndpoint]
    def __init__(
        self,
        *,
        responses: list[ProduceResponse.Topic] = ...,
        throttle_time_ms: int = ...,
        node_endpoints: list[ProduceResponse.NodeEndpoint] = ...,
    ) -> None: ...

class FetchRequest:
    class ReplicaState:
        replica_id: int
        replica_epoch: int
        def __init__(
            self,
            *,
            replica_id: int = ...,
            replica_epoch: int = ...,
        ) -> None: ...

    class Topic:
        class Partition:
            partition: int
            current_leader_epoch: int
            fetch_offset: int
            last_fetched_epoch: int
            log_start_offset: int
            partition_max_bytes: int
            replica_directory_id: bytes
            high_watermark: int
            def __init__(
                self,
                *,
                partition: int = ...,
                current_leader_epoch: int = ...,
                fetch_offset: int = ...,
                last_fetched_epoch: int = ...,
                log_start_offset: int = ...,
                partition_max_bytes: int = ...,
                replica_directory_id: bytes = ...,
                high_watermark: int = ...,
            ) -> None: ...

        topic: str
        topic_id: bytes
        partitions: list[FetchRequest.Topic.Partition]
        def __init__(
            self,
            *,
            topic: str = ...,
            topic_id: bytes = ...,
            partitions: list[FetchRequest.Topic.Partition] = ...,
        ) -> None: ...

    class ForgottenTopic:
        topic: str
        topic_id: bytes
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            topic_id: bytes = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    cluster_id: str | None
    replica_id: int
    replica_state: FetchRequest.ReplicaState
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchRequest.Topic]
    forgotten_topics_data: list[FetchRequest.ForgottenTopic]
    rack_id: str
    def __init__(
        self,
        *,
        cluster_id: str | None = ...,
        replica_id: int = ...,
        replica_state: FetchRequest.ReplicaState = ...,
        max_wait_ms: int = ...,
        min_bytes: int = ...,
        max_bytes: int = ...,
        isolation_level: int = ...,
        session_id: int = ...,
        session_epoch: int = ...,
        topics: list[FetchRequest.Topic] = ...,
        forgotten_topics_data: list[FetchRequest.ForgottenTopic] = ...,
        rack_id: str = ...,
    ) -> None: ...

class FetchResponse:
    class Topic:
        class Partition:
            class DivergingEpoch:
                epoch: int
                end_offset: int
                def __init__(
                    self,
                    *,
                    epoch: int = ...,
                    end_offset: int = ...,
                ) -> None: ...

            class CurrentLeader:
                leader_id: int
                leader_epoch: int
                def __init__(
                    self,
                    *,
                    leader_id: int = ...,
                    leader_epoch: int = ...,
                ) -> None: ...

            class SnapshotId:
                end_offset: int
                epoch: int
                def __init__(
                    self,
                    *,
                    end_offset: int = ...,
                    epoch: int = ...,
                ) -> None: ...

            class AbortedTransaction:
                producer_id: int
                first_offset: int
                def __init__(
                    self,
                    *,
                    producer_id: int = ...,
                    first_offset: int = ...,
                ) -> None: ...

            partition_index: int
            error_code: int
            high_watermark: int
            last_stable_offset: int
            log_start_offset: int
            diverging_epoch: FetchResponse.Topic.Partition.DivergingEpoch
            current_leader: FetchResponse.Topic.Partition.CurrentLeader
            snapshot_id: FetchResponse.Topic.Partition.SnapshotId
            aborted_transactions: list[FetchResponse.Topic.Partition.AbortedTransaction] | None
            preferred_read_replica: int
            records: Buffer | Sequence[Buffer] | None
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
                high_watermark: int = ...,
                last_stable_offset: int = ...,
                log_start_offset: int = ...,
                diverging_epoch: FetchResponse.Topic.Partition.DivergingEpoch = ...,
                current_leader: FetchResponse.Topic.Partition.CurrentLeader = ...,
                snapshot_id: FetchResponse.Topic.Partition.SnapshotId = ...,
                aborted_transactions: list[FetchResponse.Topic.Partition.AbortedTransaction] | None = ...,
                preferred_read_replica: int = ...,
                records: Buffer | Sequence[Buffer] | None = ...,
            ) -> None: ...

        topic: str
        topic_id: bytes
        partitions: list[FetchResponse.Topic.Partition]
        def __init__(
            self,
            *,
            topic: str = ...,
            topic_id: bytes = ...,
            partitions: list[FetchResponse.Topic.Partition] = ...,
        ) -> None: ...

    class NodeEndpoint:
        node_id: int
        host: str
        port: int
        rack: str | None
        def __init__(
            self,
            *,
            node_id: int = ...,
            host: str = ...,
            port: int = ...,
            rack: str | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    session_id: int
    responses: list[FetchResponse.Topic]
    node_endpoints: list[FetchResponse.NodeEndpoint]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        session_id: int = ...,
        responses: list[FetchResponse.Topic] = ...,
        node_endpoints: list[FetchResponse.NodeEndpoint] = ...,
    ) -> None: ...

class ListOffsetsRequest:
    class Topic:
        class Partition:
            partition_index: int
            current_leader_epoch: int
            timestamp: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                current_leader_epoch: int = ...,
                timestamp: int = ...,
            ) -> None: ...

        name: str
        partitions: list[ListOffsetsRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[ListOffsetsRequest.Topic.Partition] = ...,
        ) -> None: ...

    replica_id: int
    isolation_level: int
    topics: list[ListOffsetsRequest.Topic]
    timeout_ms: int
    def __init__(
        self,
        *,
        replica_id: int = ...,
        isolation_level: int = ...,
        topics: list[ListOffsetsRequest.Topic] = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class ListOffsetsResponse:
    class Topic:
        class Partition:
            partition_index: int
            error_code: int
            timestamp: int
            offset: int
            leader_epoch: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
                timestamp: int = ...,
                offset: int = ...,
                leader_epoch: int = ...,
            ) -> None: ...

        name: str
        partitions: list[ListOffsetsResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[ListOffsetsResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[ListOffsetsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[ListOffsetsResponse.Topic] = ...,
    ) -> None: ...

class MetadataRequest:
    class Topic:
        topic_id: bytes
        name: str | None
        def __init__(
            self,
            *,
            topic_id: bytes = ...,
            name: str | None = ...,
        ) -> None: ...

    topics: list[MetadataRequest.Topic] | None
    allow_auto_topic_creation: bool
    include_cluster_authorized_operations: bool
    include_topic_authorized_operations: bool
    def __init__(
        self,
        *,
        topics: list[MetadataRequest.Topic] | None = ...,
        allow_auto_topic_creation: bool = ...,
        include_cluster_authorized_operations: bool = ...,
        include_topic_authorized_operations: bool = ...,
    ) -> None: ...

class MetadataResponse:
    class Broker:
        node_id: int
        host: str
        port: int
        rack: str | None
        def __init__(
            self,
            *,
            node_id: int = ...,
            host: str = ...,
            port: int = ...,
            rack: str | None = ...,
        ) -> None: ...

    class Topic:
        class Partition:
            error_code: int
            partition_index: int
            leader_id: int
            leader_epoch: int
            replica_nodes: list[int]
            isr_nodes: list[int]
            offline_replicas: list[int]
            def __init__(
                self,
                *,
                error_code: int = ...,
                partition_index: int = ...,
                leader_id: int = ...,
                leader_epoch: int = ...,
                replica_nodes: list[int] = ...,
                isr_nodes: list[int] = ...,
                offline_replicas: list[int] = ...,
            ) -> None: ...

        error_code: int
        name: str | None
        topic_id: bytes
        is_internal: bool
        partitions: list[MetadataResponse.Topic.Partition]
        topic_authorized_operations: int
        def __init__(
            self,
            *,
            error_code: int = ...,
            name: str | None = ...,
            topic_id: bytes = ...,
            is_internal: bool = ...,
            partitions: list[MetadataResponse.Topic.Partition] = ...,
            topic_authorized_operations: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    brokers: list[MetadataResponse.Broker]
    cluster_id: str | None
    controller_id: int
    topics: list[MetadataResponse.Topic]
    cluster_authorized_operations: int
    error_code: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        brokers: list[MetadataResponse.Broker] = ...,
        cluster_id: str | None = ...,
        controller_id: int = ...,
        topics: list[MetadataResponse.Topic] = ...,
        cluster_authorized_operations: int = ...,
        error_code: int = ...,
    ) -> None: ...

class OffsetCommitRequest:
    class Topic:
        class Partition:
            partition_index: int
            committed_offset: int
            committed_leader_epoch: int
            committed_metadata: str | None
            def __init__(
                self,
                *,
                partition_index: int = ...,
                committed_offset: int = ...,
                committed_leader_epoch: int = ...,
                committed_metadata: str | None = ...,
            ) -> None: ...

        name: str
        partitions: list[OffsetCommitRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[OffsetCommitRequest.Topic.Partition] = ...,
        ) -> None: ...

    group_id: str
    generation_id_or_member_epoch: int
    member_id: str
    group_instance_id: str | None
    retention_time_ms: int
    topics: list[OffsetCommitRequest.Topic]
    def __init__(
        self,
        *,
        group_id: str = ...,
        generation_id_or_member_epoch: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        retention_time_ms: int = ...,
        topics: list[OffsetCommitRequest.Topic] = ...,
    ) -> None: ...

class OffsetCommitResponse:
    class Topic:
        class Partition:
            partition_index: int
            error_code: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
            ) -> None: ...

        name: str
        partitions: list[OffsetCommitResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[OffsetCommitResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[OffsetCommitResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[OffsetCommitResponse.Topic] = ...,
    ) -> None: ...

class OffsetFetchRequest:
    class Topic:
        name: str
        partition_indexes: list[int]
        def __init__(
            self,
            *,
            name: str = ...,
            partition_indexes: list[int] = ...,
        ) -> None: ...

    class Group:
        class Topic:
            name: str
            partition_indexes: list[int]
            def __init__(
                self,
                *,
                name: str = ...,
                partition_indexes: list[int] = ...,
            ) -> None: ...

        group_id: str
        member_id: str | None
        member_epoch: int
        topics: list[OffsetFetchRequest.Group.Topic] | None
        def __init__(
            self,
            *,
            group_id: str = ...,
            member_id: str | None = ...,
            member_epoch: int = ...,
            topics: list[OffsetFetchRequest.Group.Topic] | None = ...,
        ) -> None: ...

    group_id: str
    topics: list[OffsetFetchRequest.Topic] | None
    groups: list[OffsetFetchRequest.Group]
    require_stable: bool
    def __init__(
        self,
        *,
        group_id: str = ...,
        topics: list[OffsetFetchRequest.Topic] | None = ...,
        groups: list[OffsetFetchRequest.Group] = ...,
        require_stable: bool = ...,
    ) -> None: ...

class OffsetFetchResponse:
    class Topic:
        class Partition:
            partition_index: int
            committed_offset: int
            committed_leader_epoch: int
            metadata: str | None
            error_code: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                committed_offset: int = ...,
                committed_leader_epoch: int = ...,
                metadata: str | None = ...,
                error_code: int = ...,
            ) -> None: ...

        name: str
        partitions: list[OffsetFetchResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[OffsetFetchResponse.Topic.Partition] = ...,
        ) -> None: ...

    class Group:
        class Topic:
            class Partition:
                partition_index: int
                committed_offset: int
                committed_leader_epoch: int
                metadata: str | None
                error_code: int
                def __init__(
                    self,
                    *,
                    partition_index: int = ...,
                    committed_offset: int = ...,
                    committed_leader_epoch: int = ...,
                    metadata: str | None = ...,
                    error_code: int = ...,
                ) -> None: ...

            name: str
            partitions: list[OffsetFetchResponse.Group.Topic.Partition]
            def __init__(
                self,
                *,
                name: str = ...,
                partitions: list[OffsetFetchResponse.Group.Topic.Partition] = ...,
            ) -> None: ...

        group_id: str
        topics: list[OffsetFetchResponse.Group.Topic]
        error_code: int
        def __init__(
            self,
            *,
            group_id: str = ...,
            topics: list[OffsetFetchResponse.Group.Topic] = ...,
            error_code: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[OffsetFetchResponse.Topic]
    error_code: int
    groups: list[OffsetFetchResponse.Group]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[OffsetFetchResponse.Topic] = ...,
        error_code: int = ...,
        groups: list[OffsetFetchResponse.Group] = ...,
    ) -> None: ...

class FindCoordinatorRequest:
    key: str
    key_type: int
    coordinator_keys: list[str]
    def __init__(
        self,
        *,
        key: str = ...,
        key_type: int = ...,
        coordinator_keys: list[str] = ...,
    ) -> None: ...

class FindCoordinatorResponse:
    class Coordinator:
        key: str
        node_id: int
        host: str
        port: int
        error_code: int
        error_message: str | None
        def __init__(
            self,
            *,
            key: str = ...,
            node_id: int = ...,
            host: str = ...,
            port: int = ...,
            error_code: int = ...,
            error_message: str | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    node_id: int
    host: str
    port: int
    coordinators: list[FindCoordinatorResponse.Coordinator]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        node_id: int = ...,
        host: str = ...,
        port: int = ...,
        coordinators: list[FindCoordinatorResponse.Coordinator] = ...,
    ) -> None: ...

class JoinGroupRequest:
    class Protocol:
        name: str
        metadata: bytes
        def __init__(
            self,
            *,
            name: str = ...,
            metadata: bytes = ...,
        ) -> None: ...

    group_id: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    member_id: str
    group_instance_id: str | None
    protocol_type: str
    protocols: list[JoinGroupRequest.Protocol]
    reason: str | None
    def __init__(
        self,
        *,
        group_id: str = ...,
        session_timeout_ms: int = ...,
        rebalance_timeout_ms: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        protocol_type: str = ...,
        protocols: list[JoinGroupRequest.Protocol] = ...,
        reason: str | None = ...,
    ) -> None: ...

class JoinGroupResponse:
    class Member:
        member_id: str
        group_instance_id: str | None
        metadata: bytes
        def __init__(
            self,
            *,
            member_id: str = ...,
            group_instance_id: str | None = ...,
            metadata: bytes = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    generation_id: int
    protocol_type: str | None
    protocol_name: str | None
    leader: str
    skip_assignment: bool
    member_id: str
    members: list[JoinGroupResponse.Member]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        generation_id: int = ...,
        protocol_type: str | None = ...,
        protocol_name: str | None = ...,
        leader: str = ...,
        skip_assignment: bool = ...,
        member_id: str = ...,
        members: list[JoinGroupResponse.Member] = ...,
    ) -> None: ...

class HeartbeatRequest:
    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    def __init__(
        self,
        *,
        group_id: str = ...,
        generation_id: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
    ) -> None: ...

class HeartbeatResponse:
    throttle_time_ms: int
    error_code: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
    ) -> None: ...

class LeaveGroupRequest:
    class Member:
        member_id: str
        group_instance_id: str | None
        reason: str | None
        def __init__(
            self,
            *,
            member_id: str = ...,
            group_instance_id: str | None = ...,
            reason: str | None = ...,
        ) -> None: ...

    group_id: str
    member_id: str
    members: list[LeaveGroupRequest.Member]
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str = ...,
        members: list[LeaveGroupRequest.Member] = ...,
    ) -> None: ...

class LeaveGroupResponse:
    class Member:
        member_id: str
        group_instance_id: str | None
        error_code: int
        def __init__(
            self,
            *,
            member_id: str = ...,
            group_instance_id: str | None = ...,
            error_code: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    members: list[LeaveGroupResponse.Member]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        members: list[LeaveGroupResponse.Member] = ...,
    ) -> None: ...

class SyncGroupRequest:
    class Assignment:
        member_id: str
        assignment: bytes
        def __init__(
            self,
            *,
            member_id: str = ...,
            assignment: bytes = ...,
        ) -> None: ...

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    protocol_type: str | None
    protocol_name: str | None
    assignments: list[SyncGroupRequest.Assignment]
    def __init__(
        self,
        *,
        group_id: str = ...,
        generation_id: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        protocol_type: str | None = ...,
        protocol_name: str | None = ...,
        assignments: list[SyncGroupRequest.Assignment] = ...,
    ) -> None: ...

class SyncGroupResponse:
    throttle_time_ms: int
    error_code: int
    protocol_type: str | None
    protocol_name: str | None
    assignment: bytes
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        protocol_type: str | None = ...,
        protocol_name: str | None = ...,
        assignment: bytes = ...,
    ) -> None: ...

class DescribeGroupsRequest:
    groups: list[str]
    include_authorized_operations: bool
    def __init__(
        self,
        *,
        groups: list[str] = ...,
        include_authorized_operations: bool = ...,
    ) -> None: ...

class DescribeGroupsResponse:
    class Group:
        class Member:
            member_id: str
            group_instance_id: str | None
            client_id: str
            client_host: str
            member_metadata: bytes
            member_assignment: bytes
            def __init__(
                self,
                *,
                member_id: str = ...,
                group_instance_id: str | None = ...,
                client_id: str = ...,
                client_host: str = ...,
                member_metadata: bytes = ...,
                member_assignment: bytes = ...,
            ) -> None: ...

        error_code: int
        error_message: str | None
        group_id: str
        group_state: str
        protocol_type: str
        protocol_data: str
        members: list[DescribeGroupsResponse.Group.Member]
        authorized_operations: int
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            group_id: str = ...,
            group_state: str = ...,
            protocol_type: str = ...,
            protocol_data: str = ...,
            members: list[DescribeGroupsResponse.Group.Member] = ...,
            authorized_operations: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    groups: list[DescribeGroupsResponse.Group]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        groups: list[DescribeGroupsResponse.Group] = ...,
    ) -> None: ...

class ListConfigResourcesRequest:
    resource_types: list[int]
    def __init__(
        self,
        *,
        resource_types: list[int] = ...,
    ) -> None: ...

class ListConfigResourcesResponse:
    class Resource:
        resource_name: str
        resource_type: int
        def __init__(
            self,
            *,
            resource_name: str = ...,
            resource_type: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    config_resources: list[ListConfigResourcesResponse.Resource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        config_resources: list[ListConfigResourcesResponse.Resource] = ...,
    ) -> None: ...

class ListGroupsRequest:
    states_filter: list[str]
    types_filter: list[str]
    def __init__(
        self,
        *,
        states_filter: list[str] = ...,
        types_filter: list[str] = ...,
    ) -> None: ...

class ListGroupsResponse:
    class Group:
        group_id: str
        protocol_type: str
        group_state: str
        group_type: str
        def __init__(
            self,
            *,
            group_id: str = ...,
            protocol_type: str = ...,
            group_state: str = ...,
            group_type: str = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    groups: list[ListGroupsResponse.Group]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        groups: list[ListGroupsResponse.Group] = ...,
    ) -> None: ...

class SaslHandshakeRequest:
    mechanism: str
    def __init__(
        self,
        *,
        mechanism: str = ...,
    ) -> None: ...

class SaslHandshakeResponse:
    error_code: int
    mechanisms: list[str]
    def __init__(
        self,
        *,
        error_code: int = ...,
        mechanisms: list[str] = ...,
    ) -> None: ...

class ApiVersionsRequest:
    client_software_name: str
    client_software_version: str
    def __init__(
        self,
        *,
        client_software_name: str = ...,
        client_software_version: str = ...,
    ) -> None: ...

class ApiVersionsResponse:
    class ApiKey:
        api_key: int
        min_version: int
        max_version: int
        def __init__(
            self,
            *,
            api_key: int = ...,
            min_version: int = ...,
            max_version: int = ...,
        ) -> None: ...

    class SupportedFeature:
        name: str
        min_version: int
        max_version: int
        def __init__(
            self,
            *,
            name: str = ...,
            min_version: int = ...,
            max_version: int = ...,
        ) -> None: ...

    class FinalizedFeature:
        name: str
        max_version_level: int
        min_version_level: int
        def __init__(
            self,
            *,
            name: str = ...,
            max_version_level: int = ...,
            min_version_level: int = ...,
        ) -> None: ...

    error_code: int
    api_keys: list[ApiVersionsResponse.ApiKey]
    throttle_time_ms: int
    supported_features: list[ApiVersionsResponse.SupportedFeature]
    finalized_features_epoch: int
    finalized_features: list[ApiVersionsResponse.FinalizedFeature]
    zk_migration_ready: bool
    def __init__(
        self,
        *,
        error_code: int = ...,
        api_keys: list[ApiVersionsResponse.ApiKey] = ...,
        throttle_time_ms: int = ...,
        supported_features: list[ApiVersionsResponse.SupportedFeature] = ...,
        finalized_features_epoch: int = ...,
        finalized_features: list[ApiVersionsResponse.FinalizedFeature] = ...,
        zk_migration_ready: bool = ...,
    ) -> None: ...

class CreateTopicsRequest:
    class Topic:
        class Assignment:
            partition_index: int
            broker_ids: list[int]
            def __init__(
                self,
                *,
                partition_index: int = ...,
                broker_ids: list[int] = ...,
            ) -> None: ...

        class Config:
            name: str
            value: str | None
            def __init__(
                self,
                *,
                name: str = ...,
                value: str | None = ...,
            ) -> None: ...

        name: str
        num_partitions: int
        replication_factor: int
        assignments: list[CreateTopicsRequest.Topic.Assignment]
        configs: list[CreateTopicsRequest.Topic.Config]
        def __init__(
            self,
            *,
            name: str = ...,
            num_partitions: int = ...,
            replication_factor: int = ...,
            assignments: list[CreateTopicsRequest.Topic.Assignment] = ...,
            configs: list[CreateTopicsRequest.Topic.Config] = ...,
        ) -> None: ...

    topics: list[CreateTopicsRequest.Topic]
    timeout_ms: int
    validate_only: bool
    def __init__(
        self,
        *,
        topics: list[CreateTopicsRequest.Topic] = ...,
        timeout_ms: int = ...,
        validate_only: bool = ...,
    ) -> None: ...

class CreateTopicsResponse:
    class Topic:
        class Config:
            name: str
            value: str | None
            read_only: bool
            config_source: int
            is_sensitive: bool
            def __init__(
                self,
                *,
                name: str = ...,
                value: str | None = ...,
                read_only: bool = ...,
                config_source: int = ...,
                is_sensitive: bool = ...,
            ) -> None: ...

        name: str
        topic_id: bytes
        error_code: int
        error_message: str | None
        topic_config_error_code: int
        num_partitions: int
        replication_factor: int
        configs: list[CreateTopicsResponse.Topic.Config] | None
        def __init__(
            self,
            *,
            name: str = ...,
            topic_id: bytes = ...,
            error_code: int = ...,
            error_message: str | None = ...,
            topic_config_error_code: int = ...,
            num_partitions: int = ...,
            replication_factor: int = ...,
            configs: list[CreateTopicsResponse.Topic.Config] | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[CreateTopicsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[CreateTopicsResponse.Topic] = ...,
    ) -> None: ...

class DeleteTopicsRequest:
    class Topic:
        name: str | None
        topic_id: bytes
        def __init__(
            self,
            *,
            name: str | None = ...,
            topic_id: bytes = ...,
        ) -> None: ...

    topics: list[DeleteTopicsRequest.Topic]
    topic_names: list[str]
    timeout_ms: int
    def __init__(
        self,
        *,
        topics: list[DeleteTopicsRequest.Topic] = ...,
        topic_names: list[str] = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class DeleteTopicsResponse:
    class Topic:
        name: str | None
        topic_id: bytes
        error_code: int
        error_message: str | None
        def __init__(
            self,
            *,
            name: str | None = ...,
            topic_id: bytes = ...,
            error_code: int = ...,
            error_message: str | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    responses: list[DeleteTopicsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        responses: list[DeleteTopicsResponse.Topic] = ...,
    ) -> None: ...

class DeleteRecordsRequest:
    class Topic:
        class Partition:
            partition_index: int
            offset: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                offset: int = ...,
            ) -> None: ...

        name: str
        partitions: list[DeleteRecordsRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[DeleteRecordsRequest.Topic.Partition] = ...,
        ) -> None: ...

    topics: list[DeleteRecordsRequest.Topic]
    timeout_ms: int
    def __init__(
        self,
        *,
        topics: list[DeleteRecordsRequest.Topic] = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class DeleteRecordsResponse:
    class Topic:
        class Partition:
            partition_index: int
            low_watermark: int
            error_code: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                low_watermark: int = ...,
                error_code: int = ...,
            ) -> None: ...

        name: str
        partitions: list[DeleteRecordsResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[DeleteRecordsResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[DeleteRecordsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[DeleteRecordsResponse.Topic] = ...,
    ) -> None: ...

class InitProducerIdRequest:
    transactional_id: str | None
    transaction_timeout_ms: int
    producer_id: int
    producer_epoch: int
    def __init__(
        self,
        *,
        transactional_id: str | None = ...,
        transaction_timeout_ms: int = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
    ) -> None: ...

class InitProducerIdResponse:
    throttle_time_ms: int
    error_code: int
    producer_id: int
    producer_epoch: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
    ) -> None: ...

class OffsetForLeaderEpochRequest:
    class Topic:
        class Partition:
            partition: int
            current_leader_epoch: int
            leader_epoch: int
            def __init__(
                self,
                *,
                partition: int = ...,
                current_leader_epoch: int = ...,
                leader_epoch: int = ...,
            ) -> None: ...

        topic: str
        partitions: list[OffsetForLeaderEpochRequest.Topic.Partition]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[OffsetForLeaderEpochRequest.Topic.Partition] = ...,
        ) -> None: ...

    replica_id: int
    topics: list[OffsetForLeaderEpochRequest.Topic]
    def __init__(
        self,
        *,
        replica_id: int = ...,
        topics: list[OffsetForLeaderEpochRequest.Topic] = ...,
    ) -> None: ...

class OffsetForLeaderEpochResponse:
    class Topic:
        class Partition:
            error_code: int
            partition: int
            leader_epoch: int
            end_offset: int
            def __init__(
                self,
                *,
                error_code: int = ...,
                partition: int = ...,
                leader_epoch: int = ...,
                end_offset: int = ...,
            ) -> None: ...

        topic: str
        partitions: list[OffsetForLeaderEpochResponse.Topic.Partition]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[OffsetForLeaderEpochResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[OffsetForLeaderEpochResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[OffsetForLeaderEpochResponse.Topic] = ...,
    ) -> None: ...

class AddPartitionsToTxnRequest:
    class Transaction:
        class Topic:
            name: str
            partitions: list[int]
            def __init__(
                self,
                *,
                name: str = ...,
                partitions: list[int] = ...,
            ) -> None: ...

        transactional_id: str
        producer_id: int
        producer_epoch: int
        verify_only: bool
        topics: list[AddPartitionsToTxnRequest.Transaction.Topic]
        def __init__(
            self,
            *,
            transactional_id: str = ...,
            producer_id: int = ...,
            producer_epoch: int = ...,
            verify_only: bool = ...,
            topics: list[AddPartitionsToTxnRequest.Transaction.Topic] = ...,
        ) -> None: ...

    class Topic:
        name: str
        partitions: list[int]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    transactions: list[AddPartitionsToTxnRequest.Transaction]
    v3_and_below_transactional_id: str
    v3_and_below_producer_id: int
    v3_and_below_producer_epoch: int
    v3_and_below_topics: list[AddPartitionsToTxnRequest.Topic]
    def __init__(
        self,
        *,
        transactions: list[AddPartitionsToTxnRequest.Transaction] = ...,
        v3_and_below_transactional_id: str = ...,
        v3_and_below_producer_id: int = ...,
        v3_and_below_producer_epoch: int = ...,
        v3_and_below_topics: list[AddPartitionsToTxnRequest.Topic] = ...,
    ) -> None: ...

class AddPartitionsToTxnResponse:
    class Transaction:
        class Topic:
            class Partition:
                partition_index: int
                partition_error_code: int
                def __init__(
                    self,
                    *,
                    partition_index: int = ...,
                    partition_error_code: int = ...,
                ) -> None: ...

            name: str
            results_by_partition: list[AddPartitionsToTxnResponse.Transaction.Topic.Partition]
            def __init__(
                self,
                *,
                name: str = ...,
                results_by_partition: list[AddPartitionsToTxnResponse.Transaction.Topic.Partition] = ...,
            ) -> None: ...

        transactional_id: str
        topic_results: list[AddPartitionsToTxnResponse.Transaction.Topic]
        def __init__(
            self,
            *,
            transactional_id: str = ...,
            topic_results: list[AddPartitionsToTxnResponse.Transaction.Topic] = ...,
        ) -> None: ...

    class Topic:
        class Partition:
            partition_index: int
            partition_error_code: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                partition_error_code: int = ...,
            ) -> None: ...

        name: str
        results_by_partition: list[AddPartitionsToTxnResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            results_by_partition: list[AddPartitionsToTxnResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    results_by_transaction: list[AddPartitionsToTxnResponse.Transaction]
    results_by_topic_v3_and_below: list[AddPartitionsToTxnResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        results_by_transaction: list[AddPartitionsToTxnResponse.Transaction] = ...,
        results_by_topic_v3_and_below: list[AddPartitionsToTxnResponse.Topic] = ...,
    ) -> None: ...

class AddOffsetsToTxnRequest:
    transactional_id: str
    producer_id: int
    producer_epoch: int
    group_id: str
    def __init__(
        self,
        *,
        transactional_id: str = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
        group_id: str = ...,
    ) -> None: ...

class AddOffsetsToTxnResponse:
    throttle_time_ms: int
    error_code: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
    ) -> None: ...

class EndTxnRequest:
    transactional_id: str
    producer_id: int
    producer_epoch: int
    committed: bool
    def __init__(
        self,
        *,
        transactional_id: str = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
        committed: bool = ...,
    ) -> None: ...

class EndTxnResponse:
    throttle_time_ms: int
    error_code: int
    producer_id: int
    producer_epoch: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
    ) -> None: ...

class WriteTxnMarkersRequest:
    class Marker:
        class Topic:
            name: str
            partition_indexes: list[int]
            def __init__(
                self,
                *,
                name: str = ...,
                partition_indexes: list[int] = ...,
            ) -> None: ...

        producer_id: int
        producer_epoch: int
        transaction_result: bool
        topics: list[WriteTxnMarkersRequest.Marker.Topic]
        coordinator_epoch: int
        def __init__(
            self,
            *,
            producer_id: int = ...,
            producer_epoch: int = ...,
            transaction_result: bool = ...,
            topics: list[WriteTxnMarkersRequest.Marker.Topic] = ...,
            coordinator_epoch: int = ...,
        ) -> None: ...

    markers: list[WriteTxnMarkersRequest.Marker]
    def __init__(
        self,
        *,
        markers: list[WriteTxnMarkersRequest.Marker] = ...,
    ) -> None: ...

class WriteTxnMarkersResponse:
    class Marker:
        class Topic:
            class Partition:
                partition_index: int
                error_code: int
                def __init__(
                    self,
                    *,
                    partition_index: int = ...,
                    error_code: int = ...,
                ) -> None: ...

            name: str
            partitions: list[WriteTxnMarkersResponse.Marker.Topic.Partition]
            def __init__(
                self,
                *,
                name: str = ...,
                partitions: list[WriteTxnMarkersResponse.Marker.Topic.Partition] = ...,
            ) -> None: ...

        producer_id: int
        topics: list[WriteTxnMarkersResponse.Marker.Topic]
        def __init__(
            self,
            *,
            producer_id: int = ...,
            topics: list[WriteTxnMarkersResponse.Marker.Topic] = ...,
        ) -> None: ...

    markers: list[WriteTxnMarkersResponse.Marker]
    def __init__(
        self,
        *,
        markers: list[WriteTxnMarkersResponse.Marker] = ...,
    ) -> None: ...

class TxnOffsetCommitRequest:
    class Topic:
        class Partition:
            partition_index: int
            committed_offset: int
            committed_leader_epoch: int
            committed_metadata: str | None
            def __init__(
                self,
                *,
                partition_index: int = ...,
                committed_offset: int = ...,
                committed_leader_epoch: int = ...,
                committed_metadata: str | None = ...,
            ) -> None: ...

        name: str
        partitions: list[TxnOffsetCommitRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[TxnOffsetCommitRequest.Topic.Partition] = ...,
        ) -> None: ...

    transactional_id: str
    group_id: str
    producer_id: int
    producer_epoch: int
    generation_id: int
    member_id: str
    group_instance_id: str | None
    topics: list[TxnOffsetCommitRequest.Topic]
    def __init__(
        self,
        *,
        transactional_id: str = ...,
        group_id: str = ...,
        producer_id: int = ...,
        producer_epoch: int = ...,
        generation_id: int = ...,
        member_id: str = ...,
        group_instance_id: str | None = ...,
        topics: list[TxnOffsetCommitRequest.Topic] = ...,
    ) -> None: ...

class TxnOffsetCommitResponse:
    class Topic:
        class Partition:
            partition_index: int
            error_code: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
            ) -> None: ...

        name: str
        partitions: list[TxnOffsetCommitResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[TxnOffsetCommitResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[TxnOffsetCommitResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[TxnOffsetCommitResponse.Topic] = ...,
    ) -> None: ...

class DescribeAclsRequest:
    resource_type_filter: int
    resource_name_filter: str | None
    pattern_type_filter: int
    principal_filter: str | None
    host_filter: str | None
    operation: int
    permission_type: int
    def __init__(
        self,
        *,
        resource_type_filter: int = ...,
        resource_name_filter: str | None = ...,
        pattern_type_filter: int = ...,
        principal_filter: str | None = ...,
        host_filter: str | None = ...,
        operation: int = ...,
        permission_type: int = ...,
    ) -> None: ...

class DescribeAclsResponse:
    class Resource:
        class Acl:
            principal: str
            host: str
            operation: int
            permission_type: int
            def __init__(
                self,
                *,
                principal: str = ...,
                host: str = ...,
                operation: int = ...,
                permission_type: int = ...,
            ) -> None: ...

        resource_type: int
        resource_name: str
        pattern_type: int
        acls: list[DescribeAclsResponse.Resource.Acl]
        def __init__(
            self,
            *,
            resource_type: int = ...,
            resource_name: str = ...,
            pattern_type: int = ...,
            acls: list[DescribeAclsResponse.Resource.Acl] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    resources: list[DescribeAclsResponse.Resource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        resources: list[DescribeAclsResponse.Resource] = ...,
    ) -> None: ...

class CreateAclsRequest:
    class Creation:
        resource_type: int
        resource_name: str
        resource_pattern_type: int
        principal: str
        host: str
        operation: int
        permission_type: int
        def __init__(
            self,
            *,
            resource_type: int = ...,
            resource_name: str = ...,
            resource_pattern_type: int = ...,
            principal: str = ...,
            host: str = ...,
            operation: int = ...,
            permission_type: int = ...,
        ) -> None: ...

    creations: list[CreateAclsRequest.Creation]
    def __init__(
        self,
        *,
        creations: list[CreateAclsRequest.Creation] = ...,
    ) -> None: ...

class CreateAclsResponse:
    class Result:
        error_code: int
        error_message: str | None
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    results: list[CreateAclsResponse.Result]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[CreateAclsResponse.Result] = ...,
    ) -> None: ...

class DeleteAclsRequest:
    class Filter:
        resource_type_filter: int
        resource_name_filter: str | None
        pattern_type_filter: int
        principal_filter: str | None
        host_filter: str | None
        operation: int
        permission_type: int
        def __init__(
            self,
            *,
            resource_type_filter: int = ...,
            resource_name_filter: str | None = ...,
            pattern_type_filter: int = ...,
            principal_filter: str | None = ...,
            host_filter: str | None = ...,
            operation: int = ...,
            permission_type: int = ...,
        ) -> None: ...

    filters: list[DeleteAclsRequest.Filter]
    def __init__(
        self,
        *,
        filters: list[DeleteAclsRequest.Filter] = ...,
    ) -> None: ...

class DeleteAclsResponse:
    class FilterResult:
        class MatchingAcl:
            error_code: int
            error_message: str | None
            resource_type: int
            resource_name: str
            pattern_type: int
            principal: str
            host: str
            operation: int
            permission_type: int
            def __init__(
                self,
                *,
                error_code: int = ...,
                error_message: str | None = ...,
                resource_type: int = ...,
                resource_name: str = ...,
                pattern_type: int = ...,
                principal: str = ...,
                host: str = ...,
                operation: int = ...,
                permission_type: int = ...,
            ) -> None: ...

        error_code: int
        error_message: str | None
        matching_acls: list[DeleteAclsResponse.FilterResult.MatchingAcl]
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            matching_acls: list[DeleteAclsResponse.FilterResult.MatchingAcl] = ...,
        ) -> None: ...

    throttle_time_ms: int
    filter_results: list[DeleteAclsResponse.FilterResult]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        filter_results: list[DeleteAclsResponse.FilterResult] = ...,
    ) -> None: ...

class DescribeConfigsRequest:
    class Resource:
        resource_type: int
        resource_name: str
        configuration_keys: list[str] | None
        def __init__(
            self,
            *,
            resource_type: int = ...,
            resource_name: str = ...,
            configuration_keys: list[str] | None = ...,
        ) -> None: ...

    resources: list[DescribeConfigsRequest.Resource]
    include_synonyms: bool
    include_documentation: bool
    def __init__(
        self,
        *,
        resources: list[DescribeConfigsRequest.Resource] = ...,
        include_synonyms: bool = ...,
        include_documentation: bool = ...,
    ) -> None: ...

class DescribeConfigsResponse:
    class Resource:
        class Config:
            class Synonym:
                name: str
                value: str | None
                source: int
                def __init__(
                    self,
                    *,
                    name: str = ...,
                    value: str | None = ...,
                    source: int = ...,
                ) -> None: ...

            name: str
            value: str | None
            read_only: bool
            config_source: int
            is_sensitive: bool
            synonyms: list[DescribeConfigsResponse.Resource.Config.Synonym]
            config_type: int
            documentation: str | None
            def __init__(
                self,
                *,
                name: str = ...,
                value: str | None = ...,
                read_only: bool = ...,
                config_source: int = ...,
                is_sensitive: bool = ...,
                synonyms: list[DescribeConfigsResponse.Resource.Config.Synonym] = ...,
                config_type: int = ...,
                documentation: str | None = ...,
            ) -> None: ...

        error_code: int
        error_message: str | None
        resource_type: int
        resource_name: str
        configs: list[DescribeConfigsResponse.Resource.Config]
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            resource_type: int = ...,
            resource_name: str = ...,
            configs: list[DescribeConfigsResponse.Resource.Config] = ...,
        ) -> None: ...

    throttle_time_ms: int
    results: list[DescribeConfigsResponse.Resource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[DescribeConfigsResponse.Resource] = ...,
    ) -> None: ...

class AlterConfigsRequest:
    class Resource:
        class Config:
            name: str
            value: str | None
            def __init__(
                self,
                *,
                name: str = ...,
                value: str | None = ...,
            ) -> None: ...

        resource_type: int
        resource_name: str
        configs: list[AlterConfigsRequest.Resource.Config]
        def __init__(
            self,
            *,
            resource_type: int = ...,
            resource_name: str = ...,
            configs: list[AlterConfigsRequest.Resource.Config] = ...,
        ) -> None: ...

    resources: list[AlterConfigsRequest.Resource]
    validate_only: bool
    def __init__(
        self,
        *,
        resources: list[AlterConfigsRequest.Resource] = ...,
        validate_only: bool = ...,
    ) -> None: ...

class AlterConfigsResponse:
    class Resource:
        error_code: int
        error_message: str | None
        resource_type: int
        resource_name: str
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            resource_type: int = ...,
            resource_name: str = ...,
        ) -> None: ...

    throttle_time_ms: int
    responses: list[AlterConfigsResponse.Resource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        responses: list[AlterConfigsResponse.Resource] = ...,
    ) -> None: ...

class DescribeLogDirsRequest:
    class Topic:
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    topics: list[DescribeLogDirsRequest.Topic] | None
    def __init__(
        self,
        *,
        topics: list[DescribeLogDirsRequest.Topic] | None = ...,
    ) -> None: ...

class DescribeLogDirsResponse:
    class LogDir:
        class Topic:
            class Partition:
                partition_index: int
                partition_size: int
                offset_lag: int
                is_future_key: bool
                def __init__(
                    self,
                    *,
                    partition_index: int = ...,
                    partition_size: int = ...,
                    offset_lag: int = ...,
                    is_future_key: bool = ...,
                ) -> None: ...

            name: str
            partitions: list[DescribeLogDirsResponse.LogDir.Topic.Partition]
            def __init__(
                self,
                *,
                name: str = ...,
                partitions: list[DescribeLogDirsResponse.LogDir.Topic.Partition] = ...,
            ) -> None: ...

        error_code: int
        log_dir: str
        topics: list[DescribeLogDirsResponse.LogDir.Topic]
        total_bytes: int
        usable_bytes: int
        def __init__(
            self,
            *,
            error_code: int = ...,
            log_dir: str = ...,
            topics: list[DescribeLogDirsResponse.LogDir.Topic] = ...,
            total_bytes: int = ...,
            usable_bytes: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    results: list[DescribeLogDirsResponse.LogDir]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        results: list[DescribeLogDirsResponse.LogDir] = ...,
    ) -> None: ...

class SaslAuthenticateRequest:
    auth_bytes: bytes
    def __init__(
        self,
        *,
        auth_bytes: bytes = ...,
    ) -> None: ...

class SaslAuthenticateResponse:
    error_code: int
    error_message: str | None
    auth_bytes: bytes
    session_lifetime_ms: int
    def __init__(
        self,
        *,
        error_code: int = ...,
        error_message: str | None = ...,
        auth_bytes: bytes = ...,
        session_lifetime_ms: int = ...,
    ) -> None: ...

class CreatePartitionsRequest:
    class Topic:
        class Assignment:
            broker_ids: list[int]
            def __init__(
                self,
                *,
                broker_ids: list[int] = ...,
            ) -> None: ...

        name: str
        count: int
        assignments: list[CreatePartitionsRequest.Topic.Assignment] | None
        def __init__(
            self,
            *,
            name: str = ...,
            count: int = ...,
            assignments: list[CreatePartitionsRequest.Topic.Assignment] | None = ...,
        ) -> None: ...

    topics: list[CreatePartitionsRequest.Topic]
    timeout_ms: int
    validate_only: bool
    def __init__(
        self,
        *,
        topics: list[CreatePartitionsRequest.Topic] = ...,
        timeout_ms: int = ...,
        validate_only: bool = ...,
    ) -> None: ...

class CreatePartitionsResponse:
    class Topic:
        name: str
        error_code: int
        error_message: str | None
        def __init__(
            self,
            *,
            name: str = ...,
            error_code: int = ...,
            error_message: str | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    results: list[CreatePartitionsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[CreatePartitionsResponse.Topic] = ...,
    ) -> None: ...

class DeleteGroupsRequest:
    groups_names: list[str]
    def __init__(
        self,
        *,
        groups_names: list[str] = ...,
    ) -> None: ...

class DeleteGroupsResponse:
    class Group:
        group_id: str
        error_code: int
        def __init__(
            self,
            *,
            group_id: str = ...,
            error_code: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    results: list[DeleteGroupsResponse.Group]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[DeleteGroupsResponse.Group] = ...,
    ) -> None: ...

class ElectLeadersRequest:
    class Topic:
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    election_type: int
    topic_partitions: list[ElectLeadersRequest.Topic] | None
    timeout_ms: int
    def __init__(
        self,
        *,
        election_type: int = ...,
        topic_partitions: list[ElectLeadersRequest.Topic] | None = ...,
        timeout_ms: int = ...,
    ) -> None: ...

class ElectLeadersResponse:
    class Topic:
        class Partition:
            partition_id: int
            error_code: int
            error_message: str | None
            def __init__(
                self,
                *,
                partition_id: int = ...,
                error_code: int = ...,
                error_message: str | None = ...,
            ) -> None: ...

        topic: str
        partition_result: list[ElectLeadersResponse.Topic.Partition]
        def __init__(
            self,
            *,
            topic: str = ...,
            partition_result: list[ElectLeadersResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    replica_election_results: list[ElectLeadersResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        replica_election_results: list[ElectLeadersResponse.Topic] = ...,
    ) -> None: ...

class IncrementalAlterConfigsRequest:
    class Resource:
        class Config:
            name: str
            config_operation: int
            value: str | None
            def __init__(
                self,
                *,
                name: str = ...,
                config_operation: int = ...,
                value: str | None = ...,
            ) -> None: ...

        resource_type: int
        resource_name: str
        configs: list[IncrementalAlterConfigsRequest.Resource.Config]
        def __init__(
            self,
            *,
            resource_type: int = ...,
            resource_name: str = ...,
            configs: list[IncrementalAlterConfigsRequest.Resource.Config] = ...,
        ) -> None: ...

    resources: list[IncrementalAlterConfigsRequest.Resource]
    validate_only: bool
    def __init__(
        self,
        *,
        resources: list[IncrementalAlterConfigsRequest.Resource] = ...,
        validate_only: bool = ...,
    ) -> None: ...

class IncrementalAlterConfigsResponse:
    class Resource:
        error_code: int
        error_message: str | None
        resource_type: int
        resource_name: str
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            resource_type: int = ...,
            resource_name: str = ...,
        ) -> None: ...

    throttle_time_ms: int
    responses: list[IncrementalAlterConfigsResponse.Resource]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        responses: list[IncrementalAlterConfigsResponse.Resource] = ...,
    ) -> None: ...

class AlterPartitionReassignmentsRequest:
    class Topic:
        class Partition:
            partition_index: int
            replicas: list[int] | None
            def __init__(
                self,
                *,
                partition_index: int = ...,
                replicas: list[int] | None = ...,
            ) -> None: ...

        name: str
        partitions: list[AlterPartitionReassignmentsRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[AlterPartitionReassignmentsRequest.Topic.Partition] = ...,
        ) -> None: ...

    timeout_ms: int
    allow_replication_factor_change: bool
    topics: list[AlterPartitionReassignmentsRequest.Topic]
    def __init__(
        self,
        *,
        timeout_ms: int = ...,
        allow_replication_factor_change: bool = ...,
        topics: list[AlterPartitionReassignmentsRequest.Topic] = ...,
    ) -> None: ...

class AlterPartitionReassignmentsResponse:
    class Topic:
        class Partition:
            partition_index: int
            error_code: int
            error_message: str | None
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
                error_message: str | None = ...,
            ) -> None: ...

        name: str
        partitions: list[AlterPartitionReassignmentsResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[AlterPartitionReassignmentsResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    allow_replication_factor_change: bool
    error_code: int
    error_message: str | None
    responses: list[AlterPartitionReassignmentsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        allow_replication_factor_change: bool = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        responses: list[AlterPartitionReassignmentsResponse.Topic] = ...,
    ) -> None: ...

class ListPartitionReassignmentsRequest:
    class Topic:
        name: str
        partition_indexes: list[int]
        def __init__(
            self,
            *,
            name: str = ...,
            partition_indexes: list[int] = ...,
        ) -> None: ...

    timeout_ms: int
    topics: list[ListPartitionReassignmentsRequest.Topic] | None
    def __init__(
        self,
        *,
        timeout_ms: int = ...,
        topics: list[ListPartitionReassignmentsRequest.Topic] | None = ...,
    ) -> None: ...

class ListPartitionReassignmentsResponse:
    class Topic:
        class Partition:
            partition_index: int
            replicas: list[int]
            adding_replicas: list[int]
            removing_replicas: list[int]
            def __init__(
                self,
                *,
                partition_index: int = ...,
                replicas: list[int] = ...,
                adding_replicas: list[int] = ...,
                removing_replicas: list[int] = ...,
            ) -> None: ...

        name: str
        partitions: list[ListPartitionReassignmentsResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[ListPartitionReassignmentsResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    topics: list[ListPartitionReassignmentsResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        topics: list[ListPartitionReassignmentsResponse.Topic] = ...,
    ) -> None: ...

class OffsetDeleteRequest:
    class Topic:
        class Partition:
            partition_index: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
            ) -> None: ...

        name: str
        partitions: list[OffsetDeleteRequest.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[OffsetDeleteRequest.Topic.Partition] = ...,
        ) -> None: ...

    group_id: str
    topics: list[OffsetDeleteRequest.Topic]
    def __init__(
        self,
        *,
        group_id: str = ...,
        topics: list[OffsetDeleteRequest.Topic] = ...,
    ) -> None: ...

class OffsetDeleteResponse:
    class Topic:
        class Partition:
            partition_index: int
            error_code: int
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
            ) -> None: ...

        name: str
        partitions: list[OffsetDeleteResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[OffsetDeleteResponse.Topic.Partition] = ...,
        ) -> None: ...

    error_code: int
    throttle_time_ms: int
    topics: list[OffsetDeleteResponse.Topic]
    def __init__(
        self,
        *,
        error_code: int = ...,
        throttle_time_ms: int = ...,
        topics: list[OffsetDeleteResponse.Topic] = ...,
    ) -> None: ...

class DescribeClientQuotasRequest:
    class Component:
        entity_type: str
        match_type: int
        match: str | None
        def __init__(
            self,
            *,
            entity_type: str = ...,
            match_type: int = ...,
            match: str | None = ...,
        ) -> None: ...

    components: list[DescribeClientQuotasRequest.Component]
    strict: bool
    def __init__(
        self,
        *,
        components: list[DescribeClientQuotasRequest.Component] = ...,
        strict: bool = ...,
    ) -> None: ...

class DescribeClientQuotasResponse:
    class Entry:
        class Entity:
            entity_type: str
            entity_name: str | None
            def __init__(
                self,
                *,
                entity_type: str = ...,
                entity_name: str | None = ...,
            ) -> None: ...

        class Value:
            key: str
            value: float
            def __init__(
                self,
                *,
                key: str = ...,
                value: float = ...,
            ) -> None: ...

        entity: list[DescribeClientQuotasResponse.Entry.Entity]
        values: list[DescribeClientQuotasResponse.Entry.Value]
        def __init__(
            self,
            *,
            entity: list[DescribeClientQuotasResponse.Entry.Entity] = ...,
            values: list[DescribeClientQuotasResponse.Entry.Value] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    entries: list[DescribeClientQuotasResponse.Entry] | None
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        entries: list[DescribeClientQuotasResponse.Entry] | None = ...,
    ) -> None: ...

class AlterClientQuotasRequest:
    class Entry:
        class Entity:
            entity_type: str
            entity_name: str | None
            def __init__(
                self,
                *,
                entity_type: str = ...,
                entity_name: str | None = ...,
            ) -> None: ...

        class Op:
            key: str
            value: float
            remove: bool
            def __init__(
                self,
                *,
                key: str = ...,
                value: float = ...,
                remove: bool = ...,
            ) -> None: ...

        entity: list[AlterClientQuotasRequest.Entry.Entity]
        ops: list[AlterClientQuotasRequest.Entry.Op]
        def __init__(
            self,
            *,
            entity: list[AlterClientQuotasRequest.Entry.Entity] = ...,
            ops: list[AlterClientQuotasRequest.Entry.Op] = ...,
        ) -> None: ...

    entries: list[AlterClientQuotasRequest.Entry]
    validate_only: bool
    def __init__(
        self,
        *,
        entries: list[AlterClientQuotasRequest.Entry] = ...,
        validate_only: bool = ...,
    ) -> None: ...

class AlterClientQuotasResponse:
    class Entry:
        class Entity:
            entity_type: str
            entity_name: str | None
            def __init__(
                self,
                *,
                entity_type: str = ...,
                entity_name: str | None = ...,
            ) -> None: ...

        error_code: int
        error_message: str | None
        entity: list[AlterClientQuotasResponse.Entry.Entity]
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            entity: list[AlterClientQuotasResponse.Entry.Entity] = ...,
        ) -> None: ...

    throttle_time_ms: int
    entries: list[AlterClientQuotasResponse.Entry]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        entries: list[AlterClientQuotasResponse.Entry] = ...,
    ) -> None: ...

class DescribeUserScramCredentialsRequest:
    class User:
        name: str
        def __init__(
            self,
            *,
            name: str = ...,
        ) -> None: ...

    users: list[DescribeUserScramCredentialsRequest.User] | None
    def __init__(
        self,
        *,
        users: list[DescribeUserScramCredentialsRequest.User] | None = ...,
    ) -> None: ...

class DescribeUserScramCredentialsResponse:
    class User:
        class CredentialInfo:
            mechanism: int
            iterations: int
            def __init__(
                self,
                *,
                mechanism: int = ...,
                iterations: int = ...,
            ) -> None: ...

        user: str
        error_code: int
        error_message: str | None
        credential_infos: list[DescribeUserScramCredentialsResponse.User.CredentialInfo]
        def __init__(
            self,
            *,
            user: str = ...,
            error_code: int = ...,
            error_message: str | None = ...,
            credential_infos: list[DescribeUserScramCredentialsResponse.User.CredentialInfo] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    results: list[DescribeUserScramCredentialsResponse.User]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        results: list[DescribeUserScramCredentialsResponse.User] = ...,
    ) -> None: ...

class AlterUserScramCredentialsRequest:
    class Deletion:
        name: str
        mechanism: int
        def __init__(
            self,
            *,
            name: str = ...,
            mechanism: int = ...,
        ) -> None: ...

    class Upsertion:
        name: str
        mechanism: int
        iterations: int
        salt: bytes
        salted_password: bytes
        def __init__(
            self,
            *,
            name: str = ...,
            mechanism: int = ...,
            iterations: int = ...,
            salt: bytes = ...,
            salted_password: bytes = ...,
        ) -> None: ...

    deletions: list[AlterUserScramCredentialsRequest.Deletion]
    upsertions: list[AlterUserScramCredentialsRequest.Upsertion]
    def __init__(
        self,
        *,
        deletions: list[AlterUserScramCredentialsRequest.Deletion] = ...,
        upsertions: list[AlterUserScramCredentialsRequest.Upsertion] = ...,
    ) -> None: ...

class AlterUserScramCredentialsResponse:
    class User:
        user: str
        error_code: int
        error_message: str | None
        def __init__(
            self,
            *,
            user: str = ...,
            error_code: int = ...,
            error_message: str | None = ...,
        ) -> None: ...

    throttle_time_ms: int
    results: list[AlterUserScramCredentialsResponse.User]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        results: list[AlterUserScramCredentialsResponse.User] = ...,
    ) -> None: ...

class DescribeClusterRequest:
    include_cluster_authorized_operations: bool
    endpoint_type: int
    include_fenced_brokers: bool
    def __init__(
        self,
        *,
        include_cluster_authorized_operations: bool = ...,
        endpoint_type: int = ...,
        include_fenced_brokers: bool = ...,
    ) -> None: ...

class DescribeClusterResponse:
    class Broker:
        broker_id: int
        host: str
        port: int
        rack: str | None
        is_fenced: bool
        def __init__(
            self,
            *,
            broker_id: int = ...,
            host: str = ...,
            port: int = ...,
            rack: str | None = ...,
            is_fenced: bool = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    endpoint_type: int
    cluster_id: str
    controller_id: int
    brokers: list[DescribeClusterResponse.Broker]
    cluster_authorized_operations: int
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        endpoint_type: int = ...,
        cluster_id: str = ...,
        controller_id: int = ...,
        brokers: list[DescribeClusterResponse.Broker] = ...,
        cluster_authorized_operations: int = ...,
    ) -> None: ...

class DescribeProducersRequest:
    class Topic:
        name: str
        partition_indexes: list[int]
        def __init__(
            self,
            *,
            name: str = ...,
            partition_indexes: list[int] = ...,
        ) -> None: ...

    topics: list[DescribeProducersRequest.Topic]
    def __init__(
        self,
        *,
        topics: list[DescribeProducersRequest.Topic] = ...,
    ) -> None: ...

class DescribeProducersResponse:
    class Topic:
        class Partition:
            class ActiveProducer:
                producer_id: int
                producer_epoch: int
                last_sequence: int
                last_timestamp: int
                coordinator_epoch: int
                current_txn_start_offset: int
                def __init__(
                    self,
                    *,
                    producer_id: int = ...,
                    producer_epoch: int = ...,
                    last_sequence: int = ...,
                    last_timestamp: int = ...,
                    coordinator_epoch: int = ...,
                    current_txn_start_offset: int = ...,
                ) -> None: ...

            partition_index: int
            error_code: int
            error_message: str | None
            active_producers: list[DescribeProducersResponse.Topic.Partition.ActiveProducer]
            def __init__(
                self,
                *,
                partition_index: int = ...,
                error_code: int = ...,
                error_message: str | None = ...,
                active_producers: list[DescribeProducersResponse.Topic.Partition.ActiveProducer] = ...,
            ) -> None: ...

        name: str
        partitions: list[DescribeProducersResponse.Topic.Partition]
        def __init__(
            self,
            *,
            name: str = ...,
            partitions: list[DescribeProducersResponse.Topic.Partition] = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[DescribeProducersResponse.Topic]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[DescribeProducersResponse.Topic] = ...,
    ) -> None: ...

class DescribeTransactionsRequest:
    transactional_ids: list[str]
    def __init__(
        self,
        *,
        transactional_ids: list[str] = ...,
    ) -> None: ...

class DescribeTransactionsResponse:
    class TransactionState:
        class Topic:
            topic: str
            partitions: list[int]
            def __init__(
                self,
                *,
                topic: str = ...,
                partitions: list[int] = ...,
            ) -> None: ...

        error_code: int
        transactional_id: str
        transaction_state: str
        transaction_timeout_ms: int
        transaction_start_time_ms: int
        producer_id: int
        producer_epoch: int
        topics: list[DescribeTransactionsResponse.TransactionState.Topic]
        def __init__(
            self,
            *,
            error_code: int = ...,
            transactional_id: str = ...,
            transaction_state: str = ...,
            transaction_timeout_ms: int = ...,
            transaction_start_time_ms: int = ...,
            producer_id: int = ...,
            producer_epoch: int = ...,
            topics: list[DescribeTransactionsResponse.TransactionState.Topic] = ...,
        ) -> None: ...

    throttle_time_ms: int
    transaction_states: list[DescribeTransactionsResponse.TransactionState]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        transaction_states: list[DescribeTransactionsResponse.TransactionState] = ...,
    ) -> None: ...

class ListTransactionsRequest:
    state_filters: list[str]
    producer_id_filters: list[int]
    duration_filter: int
    transactional_id_pattern: str | None
    def __init__(
        self,
        *,
        state_filters: list[str] = ...,
        producer_id_filters: list[int] = ...,
        duration_filter: int = ...,
        transactional_id_pattern: str | None = ...,
    ) -> None: ...

class ListTransactionsResponse:
    class TransactionState:
        transactional_id: str
        producer_id: int
        transaction_state: str
        def __init__(
            self,
            *,
            transactional_id: str = ...,
            producer_id: int = ...,
            transaction_state: str = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    unknown_state_filters: list[str]
    transaction_states: list[ListTransactionsResponse.TransactionState]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        unknown_state_filters: list[str] = ...,
        transaction_states: list[ListTransactionsResponse.TransactionState] = ...,
    ) -> None: ...

class ConsumerGroupHeartbeatRequest:
    class Topic:
        topic_id: bytes
        partitions: list[int]
        def __init__(
            self,
            *,
            topic_id: bytes = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int
    subscribed_topic_names: list[str] | None
    subscribed_topic_regex: str | None
    server_assignor: str | None
    topic_partitions: list[ConsumerGroupHeartbeatRequest.Topic] | None
    def __init__(
        self,
        *,
        group_id: str = ...,
        member_id: str = ...,
        member_epoch: int = ...,
        instance_id: str | None = ...,
        rack_id: str | None = ...,
        rebalance_timeout_ms: int = ...,
        subscribed_topic_names: list[str] | None = ...,
        subscribed_topic_regex: str | None = ...,
        server_assignor: str | None = ...,
        topic_partitions: list[ConsumerGroupHeartbeatRequest.Topic] | None = ...,
    ) -> None: ...

class ConsumerGroupHeartbeatResponse:
    class Assignment:
        class Topic:
            topic_id: bytes
            partitions: list[int]
            def __init__(
                self,
                *,
                topic_id: bytes = ...,
                partitions: list[int] = ...,
            ) -> None: ...

        topic_partitions: list[ConsumerGroupHeartbeatResponse.Assignment.Topic]
        def __init__(
            self,
            *,
            topic_partitions: list[ConsumerGroupHeartbeatResponse.Assignment.Topic] = ...,
        ) -> None: ...

    throttle_time_ms: int
    error_code: int
    error_message: str | None
    member_id: str | None
    member_epoch: int
    heartbeat_interval_ms: int
    assignment: ConsumerGroupHeartbeatResponse.Assignment | None
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        error_code: int = ...,
        error_message: str | None = ...,
        member_id: str | None = ...,
        member_epoch: int = ...,
        heartbeat_interval_ms: int = ...,
        assignment: ConsumerGroupHeartbeatResponse.Assignment | None = ...,
    ) -> None: ...

class ConsumerGroupDescribeRequest:
    group_ids: list[str]
    include_authorized_operations: bool
    def __init__(
        self,
        *,
        group_ids: list[str] = ...,
        include_authorized_operations: bool = ...,
    ) -> None: ...

class ConsumerGroupDescribeResponse:
    class Group:
        class Member:
            class Assignment:
                class Topic:
                    topic_id: bytes
                    topic_name: str
                    partitions: list[int]
                    def __init__(
                        self,
                        *,
                        topic_id: bytes = ...,
                        topic_name: str = ...,
                        partitions: list[int] = ...,
                    ) -> None: ...

                topic_partitions: list[ConsumerGroupDescribeResponse.Group.Member.Assignment.Topic]
                def __init__(
                    self,
                    *,
                    topic_partitions: list[ConsumerGroupDescribeResponse.Group.Member.Assignment.Topic] = ...,
                ) -> None: ...

            member_id: str
            instance_id: str | None
            rack_id: str | None
            member_epoch: int
            client_id: str
            client_host: str
            subscribed_topic_names: list[str]
            subscribed_topic_regex: str | None
            assignment: ConsumerGroupDescribeResponse.Group.Member.Assignment
            target_assignment: ConsumerGroupDescribeResponse.Group.Member.Assignment
            member_type: int
            def __init__(
                self,
                *,
                member_id: str = ...,
                instance_id: str | None = ...,
                rack_id: str | None = ...,
                member_epoch: int = ...,
                client_id: str = ...,
                client_host: str = ...,
                subscribed_topic_names: list[str] = ...,
                subscribed_topic_regex: str | None = ...,
                assignment: ConsumerGroupDescribeResponse.Group.Member.Assignment = ...,
                target_assignment: ConsumerGroupDescribeResponse.Group.Member.Assignment = ...,
                member_type: int = ...,
            ) -> None: ...

        error_code: int
        error_message: str | None
        group_id: str
        group_state: str
        group_epoch: int
        assignment_epoch: int
        assignor_name: str
        members: list[ConsumerGroupDescribeResponse.Group.Member]
        authorized_operations: int
        def __init__(
            self,
            *,
            error_code: int = ...,
            error_message: str | None = ...,
            group_id: str = ...,
            group_state: str = ...,
            group_epoch: int = ...,
            assignment_epoch: int = ...,
            assignor_name: str = ...,
            members: list[ConsumerGroupDescribeResponse.Group.Member] = ...,
            authorized_operations: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    groups: list[ConsumerGroupDescribeResponse.Group]
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        groups: list[ConsumerGroupDescribeResponse.Group] = ...,
    ) -> None: ...

class DescribeTopicPartitionsRequest:
    class Topic:
        name: str
        def __init__(
            self,
            *,
            name: str = ...,
        ) -> None: ...

    class Cursor:
        topic_name: str
        partition_index: int
        def __init__(
            self,
            *,
            topic_name: str = ...,
            partition_index: int = ...,
        ) -> None: ...

    topics: list[DescribeTopicPartitionsRequest.Topic]
    response_partition_limit: int
    cursor: DescribeTopicPartitionsRequest.Cursor | None
    def __init__(
        self,
        *,
        topics: list[DescribeTopicPartitionsRequest.Topic] = ...,
        response_partition_limit: int = ...,
        cursor: DescribeTopicPartitionsRequest.Cursor | None = ...,
    ) -> None: ...

class DescribeTopicPartitionsResponse:
    class Topic:
        class Partition:
            error_code: int
            partition_index: int
            leader_id: int
            leader_epoch: int
            replica_nodes: list[int]
            isr_nodes: list[int]
            eligible_leader_replicas: list[int] | None
            last_known_elr: list[int] | None
            offline_replicas: list[int]
            def __init__(
                self,
                *,
                error_code: int = ...,
                partition_index: int = ...,
                leader_id: int = ...,
                leader_epoch: int = ...,
                replica_nodes: list[int] = ...,
                isr_nodes: list[int] = ...,
                eligible_leader_replicas: list[int] | None = ...,
                last_known_elr: list[int] | None = ...,
                offline_replicas: list[int] = ...,
            ) -> None: ...

        error_code: int
        name: str | None
        topic_id: bytes
        is_internal: bool
        partitions: list[DescribeTopicPartitionsResponse.Topic.Partition]
        topic_authorized_operations: int
        def __init__(
            self,
            *,
            error_code: int = ...,
            name: str | None = ...,
            topic_id: bytes = ...,
            is_internal: bool = ...,
            partitions: list[DescribeTopicPartitionsResponse.Topic.Partition] = ...,
            topic_authorized_operations: int = ...,
        ) -> None: ...

    class Cursor:
        topic_name: str
        partition_index: int
        def __init__(
            self,
            *,
            topic_name: str = ...,
            partition_index: int = ...,
        ) -> None: ...

    throttle_time_ms: int
    topics: list[DescribeTopicPartitionsResponse.Topic]
    next_cursor: DescribeTopicPartitionsResponse.Cursor | None
    def __init__(
        self,
        *,
        throttle_time_ms: int = ...,
        topics: list[DescribeTopicPartitionsResponse.Topic] = ...,
        next_cursor: DescribeTopicPartitionsResponse.Cursor | None = ...,
    ) -> None: ...

class ConsumerProtocolSubscription:
    class Topic:
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    topics: list[str]
    user_data: bytes | None
    owned_partitions: list[ConsumerProtocolSubscription.Topic]
    generation_id: int
    rack_id: str | None
    def __init__(
        self,
        *,
        topics: list[str] = ...,
        user_data: bytes | None = ...,
        owned_partitions: list[ConsumerProtocolSubscription.Topic] = ...,
        generation_id: int = ...,
        rack_id: str | None = ...,
    ) -> None: ...

class ConsumerProtocolAssignment:
    class Topic:
        topic: str
        partitions: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partitions: list[int] = ...,
        ) -> None: ...

    assigned_partitions: list[ConsumerProtocolAssignment.Topic]
    user_data: bytes | None
    def __init__(
        self,
        *,
        assigned_partitions: list[ConsumerProtocolAssignment.Topic] = ...,
        user_data: bytes | None = ...,
    ) -> None: ...

class TransactionLogKey:
    transactional_id: str
    def __init__(
        self,
        *,
        transactional_id: str = ...,
    ) -> None: ...

class TransactionLogValue:
    class Topic:
        topic: str
        partition_ids: list[int]
        def __init__(
            self,
            *,
            topic: str = ...,
            partition_ids: list[int] = ...,
        ) -> None: ...

    producer_id: int
    previous_producer_id: int
    next_producer_id: int
    producer_epoch: int
    transaction_timeout_ms: int
    transaction_status: int
    transaction_partitions: list[TransactionLogValue.Topic] | None
    transaction_last_update_timestamp_ms: int
    transaction_start_timestamp_ms: int
    client_transaction_version: int
    def __init__(
        self,
        *,
        producer_id: int = ...,
        previous_producer_id: int = ...,
        next_producer_id: int = ...,
        producer_epoch: int = ...,
        transaction_timeout_ms: int = ...,
        transaction_status: int = ...,
        transaction_partitions: list[TransactionLogValue.Topic] | None = ...,
        transaction_last_update_timestamp_ms: int = ...,
        transaction_start_timestamp_ms: int = ...,
        client_transaction_version: int = ...,
    ) -> None: ...
