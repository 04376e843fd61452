"""A broker without sockets, threads or a clock: frames in, responses out, work to be done in time.

Who hosts it (server.py, or a test) gives it the time with each call, runs what it submits, and calls tick() when
next_ms says so. So the same broker runs on a network, or in one test on a simulated disk and clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from logcore import LogDir
from netshim import waiting, wire
from netshim.groups import Groups
from netshim.handlers import HANDLERS, NOT_SHARED, served_versions
from netshim.journal import errors_in, shown
from netshim.session import Session
from netshim.settings import Settings
from netshim.sharing import GroupsBesideOthers, TransactionsBesideOthers
from netshim.state import Call, State
from netshim.transactions import TransactionHost
from netshim.waiting import Answer, CloseConnection, Later, Submit
from netshim.wire import codes

_log = logging.getLogger("netshim")

Piece = wire.Buffer
#: What waits for records or for other members, and not for work of the broker.
_PARKED: Final = frozenset(api.key for api in (wire.FETCH, wire.JOIN_GROUP, wire.SYNC_GROUP))
#: APIs that tell what others have changed. A client that sends one behind a change wants to know what that has led to:
#: librdkafka asks for committed offsets right behind commits, on one connection.
_TELLING: Final = frozenset(
    api.key
    for api in (
        wire.LIST_OFFSETS,
        wire.METADATA,
        wire.OFFSET_FETCH,
        wire.DESCRIBE_GROUPS,
        wire.LIST_GROUPS,
        wire.OFFSET_FOR_LEADER_EPOCH,
        wire.DESCRIBE_CONFIGS,
        wire.DESCRIBE_LOG_DIRS,
        wire.DESCRIBE_PRODUCERS,
        wire.DESCRIBE_TRANSACTIONS,
        wire.LIST_TRANSACTIONS,
        wire.CONSUMER_GROUP_DESCRIBE,
        wire.DESCRIBE_TOPIC_PARTITIONS,
    )
)
#: APIs of which each refusal is worth a line: what changes something, and what a client needs to go on.
_NOTED: Final = frozenset(
    api.key
    for api in (
        wire.API_VERSIONS,
        wire.LIST_OFFSETS,
        wire.OFFSET_COMMIT,
        wire.FIND_COORDINATOR,
        wire.JOIN_GROUP,
        wire.SYNC_GROUP,
        wire.CONSUMER_GROUP_HEARTBEAT,
        wire.CREATE_TOPICS,
        wire.DELETE_TOPICS,
        wire.CREATE_PARTITIONS,
        wire.DELETE_RECORDS,
        wire.INIT_PRODUCER_ID,
        wire.ADD_PARTITIONS_TO_TXN,
        wire.ADD_OFFSETS_TO_TXN,
        wire.END_TXN,
        wire.TXN_OFFSET_COMMIT,
        wire.ALTER_CONFIGS,
        wire.INCREMENTAL_ALTER_CONFIGS,
        wire.DELETE_GROUPS,
        wire.OFFSET_DELETE,
    )
)
#: A request with more entries than this is refused where too many are worked on in pieces. Others are done whole then.
_LARGE_ENTRIES: Final = 10_000
#: What Python takes for an entry of a request.
_ENTRY_BYTES: Final = 300
#: The turns of encoding large answers: one at a time, so that the other threads are free for the disk.
_LARGE_ANSWERS: Final = "large answers"
#: What a client wants that asks for an API that is not served.
_FEATURES: Final = {
    wire.SASL_HANDSHAKE.key: "authentication and TLS",
    wire.SASL_AUTHENTICATE.key: "authentication and TLS",
    **dict.fromkeys((*range(76, 80), *range(83, 88), *range(90, 93)), "share groups"),
    **dict.fromkeys((88, 89), "streams groups"),
    **dict.fromkeys(NOT_SHARED, "groups of the consumer protocol in a directory that is shared with other processes"),
}


def tells(frame: memoryview) -> bool:
    """Whether a request tells what others have changed; for Connection."""
    return int.from_bytes(frame[:2], "big") in _TELLING


def _sendable(told: Any) -> Any:
    """What was encoded beside the loop. Where that failed, the connection ends: its client would wait for ever."""
    if isinstance(told, Exception) and not isinstance(told, CloseConnection):
        return CloseConnection(f"an answer could not be encoded: {told!r}")
    return told


class Broker:
    """One broker over a LogDir that is open for writing. submit(work, done): runs work where it may wait for the disk,
    then, in the broker's thread, tells state.hear() the time and calls done(result or exception). new_id: gives the
    part of a member id that no other has. later(action): calls action in another turn of the loop; by default through
    submit.
    """

    def __init__(
        self,
        logdir: LogDir,
        settings: Settings,
        submit: Submit,
        new_id: Callable[[], str] | None = None,
        later: Later | None = None,
    ) -> None:
        self.state = State(logdir, settings, submit, later)
        self.last_asked = "none"  # the API of the latest request; the host tells who held the loop
        if logdir.is_shared:
            self.state.groups = GroupsBesideOthers(self.state)
            self.state.transactions = TransactionsBesideOthers(self.state)
        else:
            if new_id is None:
                self.state.groups = Groups(self.state)
            else:
                self.state.groups = Groups(self.state, new_id)
            self.state.transactions = TransactionHost(self.state)

    def handle(self, session: Session, frame: memoryview, now_ms: int) -> list[Piece] | Answer | None:
        """The response to one frame, None when it has none, or the Answer that will hold one of these.

        Raises CloseConnection.
        """
        try:
            header = wire.decode_header(frame)
            api = wire.APIS[header.api_key]
            version = header.api_version
            if api is wire.API_VERSIONS and not api.min_version <= version <= api.max_version:
                refusal = served_versions(codes.UNSUPPORTED_VERSION, api.key)
                return wire.encode_response(api, 0, header.correlation_id, refusal)
            handler = HANDLERS.get(header.api_key)
            if handler is None or (self.state.is_shared and header.api_key in NOT_SHARED):
                self._say_unserved(header, session.peer, now_ms)
                raise CloseConnection(f"{api.name} is not served")
            request, entries = wire.decode_counted_request(header, frame, self.state.settings.max_request_entries)
        except wire.ProtocolError as error:
            self._say_unknown(frame, session.peer, now_ms)
            raise CloseConnection(str(error)) from error
        if entries > _LARGE_ENTRIES and self.state.pieces.is_full:
            raise CloseConnection(f"{api.name} of {entries} entries, where many large requests are in work already")
        self.last_asked = api.name
        call = Call(session, header.api_key, version, header.client_id, now_ms)
        try:
            response = handler(request, call, self.state)
        except CloseConnection:
            raise
        except Exception as error:
            response = error
        if isinstance(response, Answer):
            # A request that has to wait first is not in pieces yet; a later one would overtake the pieces.
            is_large = response.is_in_pieces or entries > waiting.PIECE
            encoded = Answer(is_parked=api.key in _PARKED, is_in_pieces=is_large)
            encoded.held_bytes = len(frame) + entries * _ENTRY_BYTES
            waited = response
            encoded.when_cancelled(waited.cancel)

            def ready(value: object) -> None:
                tell = partial(self._told, call, api, header.correlation_id, value)
                if is_large:  # 10,000 new topics with their configs would hold the loop for 0.5 s
                    self.state.in_turn(_LARGE_ANSWERS, tell, lambda told: encoded.set(_sendable(told)))
                else:
                    encoded.set(tell())

            waited.then(ready)
            return encoded
        told: list[Piece] | None = self._told(call, api, header.correlation_id, response)
        return told

    def _say_unserved(self, header: wire.Header, peer: str, now_ms: int) -> None:
        name = wire.APIS[header.api_key].name
        feature = _FEATURES.get(header.api_key)
        self.state.journal.say(
            logging.WARNING,
            f"unserved {name}",
            now_ms,
            "%s v%d of client %s at %s refused: it is not served%s",
            name,
            header.api_version,
            shown(header.client_id),
            peer,
            f"; {feature} are not there yet" if feature else "",
        )

    def _say_unknown(self, frame: memoryview, peer: str, now_ms: int) -> None:
        """Says what a client is after that asks for an API of which not even the messages are known here."""
        key = int.from_bytes(frame[:2], "big")
        if key in wire.APIS or key not in _FEATURES:
            return
        self.state.journal.say(
            logging.WARNING,
            f"unserved {key}",
            now_ms,
            "a request of %s refused: %s are not served",
            peer,
            _FEATURES[key],
        )

    def _note(self, call: Call, api: wire.Api[Any, Any], response: object) -> None:
        """Logs what was refused. Fetch and Produce say so themselves: they are asked most, and say more."""
        if api.key in _NOTED and not isinstance(response, Exception):
            for code, message in errors_in(response):
                self.state.journal.refused(call, api.name, code, message)

    def _told(self, call: Call, api: wire.Api[Any, Any], correlation_id: int, response: object) -> Any:
        """What leaves for a response or an error of ours: frames, or, as they are, None and an error that ends the
        connection. Logs what was refused. May be called in any thread.
        """
        if response is None or isinstance(response, CloseConnection):
            return response
        self._note(call, api, response)
        return self._encode(api, call.version, correlation_id, response)

    def _encode(self, api: wire.Api[Any, Any], version: int, correlation_id: int, response: object) -> list[Piece]:
        """A response as frames; for an error of ours, or a response that cannot be encoded, the API's error form."""
        try:
            if not isinstance(response, Exception):
                return wire.encode_response(api, version, correlation_id, response)
        except Exception as error:
            response = error
        _log.error("%s v%d failed", api.name, version, exc_info=response)
        failed = api.Response()
        if hasattr(failed, "error_code"):
            failed.error_code = codes.UNKNOWN_SERVER_ERROR
        return wire.encode_response(api, version, correlation_id, failed)

    @property
    def next_ms(self) -> int | None:
        """When tick() is to be called next at the latest."""
        return self.state.timers.next_ms

    def tick(self, now_ms: int) -> None:
        """Does what is due: answers those who have waited long enough, ends sessions, notices appends by others."""
        self.state.hear(now_ms)
        self.state.transactions.begin(now_ms)
        self.state.timers.run(now_ms)
        self.state.journal.tick(now_ms)
        self.state.wake_readers(now_ms)
        self.state.follow(now_ms)

    def stop(self, now_ms: int) -> None:
        """Answers everything that waits, so that connections can be drained; nothing is to be handled afterwards."""
        self.state.is_stopping = True
        self.state.fetches.wake(self.state.fetches.waited_for(), now_ms)
        self.state.groups.stop(now_ms)
        self.state.transactions.stop(now_ms)
        self.state.pieces.finish()
