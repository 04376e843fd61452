"""Sends the changes of a console to the broker of this process, as requests of its user.

Rules:
- The broker handles these requests in its event loop, as those of clients. Therefore
  access control lists and quotas apply, and a group with members refuses new offsets.
- The thread of a page waits for the response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
from starlette.exceptions import HTTPException

from logcore.metadata.checkpoint import Key
from netshim import wire
from netshim.console.access import ConsoleViewer
from netshim.console.broker import WAIT_S, wait_for
from netshim.request_counts import name_of
from netshim.scheduling import CloseConnection, PendingResponse, chain_response
from netshim.session import ClientSession
from netshim.wire import codes
from netshim.wire.codec import Api

if TYPE_CHECKING:
    from netshim.server_thread import ServerHandle

#: Client id and name of the client library in the broker's log.
_CLIENT: Final = "netshim-console"
#: Versions of the requests. Version 5 of DeleteTopics is the first with error messages.
_OFFSET_COMMIT: Final = 8
_INIT_PRODUCER_ID: Final = 4
_DELETE_TOPICS: Final = 5
_DELETE_RECORDS: Final = 2
#: Messages for some error codes.
_TEXTS: Final = {
    codes.UNKNOWN_MEMBER_ID: "The group has members. Stop its consumers first.",
    codes.NOT_COORDINATOR: "Another broker of the cluster coordinates this. Use the "
    "console of that broker.",
    codes.NOT_LEADER_OR_FOLLOWER: "Another broker of the cluster leads the partition. "
    "Use the console of that broker.",
}
#: Codes of refusals by access control lists, which become status 403.
_FORBIDDEN: Final = (
    codes.TOPIC_AUTHORIZATION_FAILED,
    codes.GROUP_AUTHORIZATION_FAILED,
    codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    codes.CLUSTER_AUTHORIZATION_FAILED,
)


@attrs.frozen
class BrokerChanges:
    """Changes by requests to the broker."""

    #: The broker of this process.
    handle: ServerHandle

    def request(
        self, viewer: ConsoleViewer, api: Api[Any, Any], version: int, request: Any
    ) -> Any:
        """Return the response to a request of a user. Blocks.

        Raises:
            HTTPException: the broker does not answer, or does not serve the request.
        """
        server = self.handle.server
        # The request has the rights of the user, and the log shows the user and the
        # address.
        session = ClientSession(
            host="127.0.0.1",
            port=0,
            client_address=viewer.host,
            client_software=_CLIENT,
            listener=server.listeners[0].name,
            principal=viewer.principal,
        )
        # A connection removes the size before it calls the broker.
        frame = wire.encode_request(api, version, 1, _CLIENT, request)[4:]

        def begin(callback: Callable[[Any], None]) -> None:
            pending = PendingResponse()
            pending.then(callback)
            chain_response(
                server.broker.handle(session, memoryview(frame), server.now_ms()),
                pending,
            )

        try:
            buffers = wait_for(self.handle, begin)
        except CloseConnection as error:
            raise HTTPException(
                409, f"The broker refuses {api.name}: {error}"
            ) from None
        except (RuntimeError, TimeoutError) as error:
            # The change may take effect later nevertheless.
            raise HTTPException(503, f"The broker does not answer: {error}") from None
        # The response begins with its size, which a client removes.
        _, response = wire.decode_response(api, version, b"".join(buffers)[4:])
        return response

    def set_offsets(
        self, viewer: ConsoleViewer, group: str, offsets: Mapping[Key, int]
    ) -> None:
        request_type = wire.OFFSET_COMMIT.Request
        topics: dict[str, Any] = {}
        for (name, number), offset in offsets.items():
            topic = topics.setdefault(name, request_type.Topic(name=name))
            topic.partitions.append(
                request_type.Topic.Partition(
                    partition_index=number,
                    committed_offset=offset,
                    committed_metadata="",
                )
            )
        response = self.request(
            viewer,
            wire.OFFSET_COMMIT,
            _OFFSET_COMMIT,
            request_type(group_id=group, topics=list(topics.values())),
        )
        _check(
            (f"{topic.name}-{partition.partition_index}", partition.error_code, None)
            for topic in response.topics
            for partition in topic.partitions
        )

    def abort_transaction(
        self, viewer: ConsoleViewer, transactional_id: str, timeout_ms: int
    ) -> None:
        # As in `kafka-transactions.sh forceTerminateTransaction`, InitProducerId gives the
        # id a new epoch, which aborts the open transaction and fences its producer.
        response = self.request(
            viewer,
            wire.INIT_PRODUCER_ID,
            _INIT_PRODUCER_ID,
            wire.INIT_PRODUCER_ID.Request(
                transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
            ),
        )
        # CONCURRENT_TRANSACTIONS means that the abort has begun. The broker completes it.
        if response.error_code != codes.CONCURRENT_TRANSACTIONS:
            _check([(transactional_id, response.error_code, None)])

    def delete_topic(self, viewer: ConsoleViewer, topic: str) -> None:
        response = self.request(
            viewer,
            wire.DELETE_TOPICS,
            _DELETE_TOPICS,
            wire.DELETE_TOPICS.Request(
                topic_names=[topic], timeout_ms=int(WAIT_S * 1000)
            ),
        )
        _check(
            (changed.name, changed.error_code, changed.error_message)
            for changed in response.responses
        )

    def delete_records(
        self, viewer: ConsoleViewer, topic: str, before: Mapping[int, int]
    ) -> None:
        request_type = wire.DELETE_RECORDS.Request
        topic_entry = request_type.Topic(
            name=topic,
            partitions=[
                request_type.Topic.Partition(partition_index=number, offset=offset)
                for number, offset in before.items()
            ],
        )
        response = self.request(
            viewer,
            wire.DELETE_RECORDS,
            _DELETE_RECORDS,
            request_type(topics=[topic_entry], timeout_ms=int(WAIT_S * 1000)),
        )
        _check(
            (f"{topic.name}-{part.partition_index}", part.error_code, None)
            for topic in response.topics
            for part in topic.partitions
        )


def _check(results: Iterable[tuple[str, int, str | None]]) -> None:
    """Raise HTTPException if a part of a response has an error code.

    Each part is a name, a code, and the broker's own text if it has one.
    """
    failed = [result for result in results if result[1] != codes.NONE]
    if not failed:
        return
    name, code, message = failed[0]
    text = _TEXTS.get(code) or f"The broker answers {name_of(code)} for {name}"
    if message:
        text += f": {message}"
    if len(failed) > 1:
        # Hundreds of partitions would fill the page.
        text += f" ({len(failed) - 1} others have errors too)"
    raise HTTPException(403 if code in _FORBIDDEN else 409, text)
