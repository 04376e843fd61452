"""Writes the traffic of a running broker to a file.

The broker's thread appends records to a block in memory. A thread of the recorder
compresses and writes the blocks, so the broker never waits for the disk.

Rules:
- A block is written when it is large enough, or shortly after its first record.
- At most MAX_PENDING_BYTES and one frame wait for the disk. If the disk is slower than
  the traffic, or fails, the recording stops with one line at ERROR. The broker
  continues.
- Frames are copied, because requests and responses are views of buffers that change.
- Secrets never reach the block, see secrets.py.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from logcore.errors import InvalidConfigError, LogcoreError, ResourceError
from logcore.fs import FS, OS, OsFS
from netshim.recording import secrets
from netshim.recording.traffic_file import (
    RECORD_HEADER,
    REDACTED,
    TrafficKind,
    encode_block,
    encode_open,
    file_header,
)
from netshim.session import ClientSession
from netshim.wire import Buffer

_log = logging.getLogger("netshim")

#: Only the owner may read a recording, because it contains all records.
_MODE: Final = 0o600
#: Size from which a block is written.
_BLOCK_BYTES: Final = 512 << 10
#: Longest time between the first record of a block and its write.
_FLUSH_S: Final = 0.2
#: Bytes that may wait for the disk.
MAX_PENDING_BYTES: Final = 64 << 20
#: Number of correlation ids of secret responses that one connection remembers. With
#: more, all its responses are redacted.
_MAX_SECRET_IDS: Final = 10_000


class TrafficRecorder:
    """A recording that is being written. Any thread may use it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fs: FS = OS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        """Create the file and start the thread.

        Raises:
            InvalidConfigError: the file exists, or its directory does not.
            DiskFullError, StorageWriteError: the file cannot be written.
        """
        self.path = os.fspath(path)
        #: The error that has stopped the recording.
        self.failure: LogcoreError | None = None
        self._fs = fs
        self._clock_ns = clock_ns
        self._max_pending_bytes = max_pending_bytes
        try:
            self._handle = fs.open(self.path, write=True, create=True, exclusive=True)
        except (FileExistsError, FileNotFoundError) as error:
            raise InvalidConfigError(
                "the file of a recording",
                expected="a new file in a directory that exists",
                found=f"{self.path}: {error.strerror}",
            ) from error
        try:
            if isinstance(fs, OsFS):
                self._restrict_permissions()
            header = file_header(fs.now_ms())
            fs.pwrite(self._handle, header, 0)
        except BaseException:
            fs.close(self._handle)
            raise
        #: Position of the next block in the file. Only the recorder's thread changes
        #: it.
        self._position = len(header)
        #: The times of records count from here.
        self._started_ns = clock_ns()
        # The lock protects the fields below. The thread waits for records and blocks.
        self._changed = threading.Condition(threading.Lock())
        #: Records that belong to no full block yet.
        self._block = bytearray()
        #: Full blocks, oldest first.
        self._full: deque[bytearray] = deque()
        #: Bytes of _block, of _full, and of the block that is being written.
        self._pending_bytes = 0
        #: Number of the latest connection.
        self._connections = 0
        #: Whether records are accepted. It never becomes true again.
        self._is_recording = True
        self._thread = threading.Thread(
            target=self._run, name="netshim-recorder", daemon=True
        )
        self._thread.start()

    def _restrict_permissions(self) -> None:
        try:
            os.chmod(self.path, _MODE)
        except OSError as error:
            raise InvalidConfigError(
                "the file of a recording",
                expected="a file system with permissions",
                found=f"{self.path}: {error.strerror}",
            ) from error

    def __repr__(self) -> str:
        return f"<TrafficRecorder {self.path}>"

    @property
    def is_recording(self) -> bool:
        """Whether records are still accepted."""
        return self._is_recording

    def connection(self, session: ClientSession, port: int) -> ConnectionRecorder:
        """Return the recorder of a connection. `port` is the port of its client."""
        with self._changed:
            self._connections += 1
            number = self._connections
        payload = encode_open(f"{session.client_address}:{port}", session.listener)
        self.append(TrafficKind.OPEN, number, (payload,))
        return ConnectionRecorder(self, number, session)

    def append(
        self,
        kind: TrafficKind,
        connection: int,
        buffers: Sequence[Buffer] = (),
        flags: int = 0,
    ) -> None:
        """Append a record, unless the recording has stopped. Never blocks on the disk."""
        with self._changed:
            if not self._is_recording:
                return
            # Checked before the append, so that a frame larger than the limit can be
            # recorded.
            if self._pending_bytes > self._max_pending_bytes:
                self._stop(
                    ResourceError(
                        "the disk is slower than the traffic",
                        path=self.path,
                        expected=f"at most {self._max_pending_bytes} bytes in the queue",
                        found=self._pending_bytes,
                    )
                )
                return
            self._append(kind, connection, buffers, flags)

    def _append(
        self,
        kind: TrafficKind,
        connection: int,
        buffers: Sequence[Buffer] = (),
        flags: int = 0,
    ) -> None:
        """Append a record to the block. The caller holds the lock."""
        block = self._block
        is_first_of_block = not block
        bytes_before = len(block)
        size = 0
        for buffer in buffers:
            size += len(buffer)
        time_ns = self._clock_ns() - self._started_ns
        block += RECORD_HEADER.pack(size, kind, flags, connection, time_ns)
        for buffer in buffers:
            block += buffer
        self._pending_bytes += len(block) - bytes_before
        if len(block) >= _BLOCK_BYTES:
            self._full.append(block)
            self._block = bytearray()
            self._changed.notify()
        elif is_first_of_block:
            self._changed.notify()

    def close(self) -> None:
        """Write the last records and close the file. A second call has no effect."""
        with self._changed:
            if self._is_recording:
                self._append(TrafficKind.END, 0)
                self._is_recording = False
            self._changed.notify()
        self._thread.join()

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                # Blocks are never synced: a power cut may remove the last ones. A
                # reader accepts an incomplete last block.
                block = self._next_block()
                if block is None:
                    break
                data = encode_block(block)
                self._fs.pwrite(self._handle, data, self._position)
                self._position += len(data)
                with self._changed:
                    self._pending_bytes -= len(block)
        except LogcoreError as error:
            self._fail(error)
        except Exception as error:  # otherwise, records would accumulate in memory
            self._fail(LogcoreError(f"an internal error: {error!r}", path=self.path))
        finally:
            self._fs.close(self._handle)

    def _fail(self, failure: LogcoreError) -> None:
        with self._changed:
            self._stop(failure)

    def _next_block(self) -> bytearray | None:
        """Wait for a block to write, and return it. Return None after the last block."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._full or self._block or not self._is_recording
            )
            # Records that follow soon become a part of the same block.
            self._changed.wait_for(
                lambda: self._full or not self._is_recording, _FLUSH_S
            )
            if self._full:
                return self._full.popleft()
            if not self._block:
                return None
            block = self._block
            self._block = bytearray()
            return block

    def _stop(self, failure: LogcoreError) -> None:
        """Stop the recording after an error. The caller holds the lock."""
        if self.failure is None:
            self.failure = failure
            _log.error(
                "the recording to %s has stopped; the broker continues: %s",
                self.path,
                failure,
            )
        self._is_recording = False
        self._block = bytearray()
        self._full.clear()
        self._changed.notify()


class ConnectionRecorder:
    """Records the frames of one connection. Used by the broker's thread."""

    __slots__ = (
        "_expects_token",
        "_is_active",
        "_number",
        "_recorder",
        "_secret_ids",
        "_session",
    )

    def __init__(
        self, recorder: TrafficRecorder, number: int, session: ClientSession
    ) -> None:
        """Create an instance. Users call TrafficRecorder.connection()."""
        self._recorder = recorder
        self._number = number
        self._session = session
        # With authentication, recording begins when no response is pending: a pending
        # response may contain a token.
        self._is_active = session.authentication is None
        #: Correlation ids of requests whose responses may contain tokens.
        self._secret_ids: set[bytes] = set()
        #: Whether the next response is a token without a header.
        self._expects_token = False

    def request(self, frame: memoryview, *, is_only_pending: bool) -> None:
        """Record a request, without its size, before it is handled.

        `is_only_pending` is whether all earlier requests of the connection were answered.
        """
        if not self._recorder.is_recording:
            return
        if not self._is_active:
            if not is_only_pending:
                return
            self._is_active = True
        authentication = self._session.authentication
        size = len(frame)
        kept_bytes = secrets.bytes_to_keep(frame, authentication)
        flags = 0
        if kept_bytes < size:
            flags = REDACTED
            if authentication is not None and authentication.expects_token:
                self._expects_token = True
            elif int.from_bytes(frame[:2], "big") in secrets.SECRET_RESPONSES:
                # The correlation id follows the API key and the version.
                self._secret_ids.add(bytes(frame[4:8]))
        header = size.to_bytes(4, "big")
        self._recorder.append(
            TrafficKind.REQUEST,
            self._number,
            (header, secrets.redacted(frame, kept_bytes) if flags else frame),
            flags,
        )

    def response(self, buffers: Sequence[Buffer]) -> None:
        """Record a response, with its size in front, when it is ready to be sent."""
        if not self._is_active or not self._recorder.is_recording:
            return
        flags = 0
        if self._expects_token or self._secret_ids:
            # The frame begins with its size, so the correlation id is at byte 4.
            frame = b"".join(buffers)
            is_token = self._expects_token
            self._expects_token = False
            # The ids remain in the set: a client may repeat an id.
            has_secrets = is_token or frame[4:8] in self._secret_ids
            if has_secrets or len(self._secret_ids) > _MAX_SECRET_IDS:
                flags = REDACTED
                buffers = (secrets.redacted_response(frame, is_token=is_token),)
        self._recorder.append(TrafficKind.RESPONSE, self._number, buffers, flags)

    def close(self) -> None:
        """Record the end of the connection."""
        self._recorder.append(TrafficKind.CLOSE, self._number)
