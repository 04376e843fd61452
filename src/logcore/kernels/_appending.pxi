"""The compiled fast paths of an append: one record under the policy `os`, and one batch of a Produce. _compiled.pyx
includes this file.

The general path of an append is in log.py and partition/writer.py, which define the behavior. If an append is unusual,
the fast path returns None without any effect, and the general path appends. An append is usual if:

- the processor has instructions for CRC-32C;
- the policy is `os` without flush.messages, and no other process writes or copies the log. The topic has no codec, no
  limits of timestamps and no LogAppendTime. Otherwise, Writer sets fast_path_bytes to 0;
- the files are files of the operating system. Another FS, such as the simulated disk, must see each write;
- key and value are bytes or None, and there are no headers and no timestamp. The caller requires no durability and no
  offset;
- the batch has at most fast_path_bytes;
- the log is open and has not failed, appends are not held, no earlier write is unfinished, the log was opened after the
  last fork, and it does not rest. No listener waits for appends, and no other thread holds the lock of the log;
- the active segment contains a batch, has room for this one, and needs no index entry.

The fast path then follows the rules of the general path:

- It encodes the batch like kernel.encode_one(), with the log end as its offset and the time of the clock.
- It writes with one pwrite at the end of the segment. If the write fails or is short, Writer.undo_failed_write_locked()
  removes its bytes. has_unfinished_write is set during this time, so that the log refuses writes if the removal fails.
  The general path then appends again and reports the error.
- After the write, it updates the largest timestamp, the bytes since the last index entry, the last offset and the size of
  the segment, and the written bytes, the log end, the number of appends and the visible end of the log.

Exclusion of other threads: the fast path holds the GIL from the check of the log's lock until the last field is updated,
including the write. In between, it runs no Python code, and neither allocates nor frees an object. A thread in the
general path holds the lock of the log, so the two paths exclude each other. No signal handler runs in between. Only the
end of the process can interrupt the fast path, and leaves a torn batch, as in the general path. A free-threaded Python
enables the GIL when it imports this module, because the module does not declare that it works without.

The other threads wait for the write, which takes 0.4 us. If the system throttles writes, because too many pages wait for
writeback, one write may take a tenth of a second. After a write that took longer than SLOW_NS, the log uses the general
path for PAUSE_NS, whose writes release the GIL.

append_request() appends the batch of a Produce. It holds the lock of the log, because it may run Python code for an index
entry, a listener, or the state of a producer. Log.append_batch() defines its behavior. The batch must be one that the
topic accepts unchanged, and the next batch of its producer. The policy must be `os`, or `group` if no sync is due. A
large write releases the GIL. append_encoded() does the same for Log.append_batch() itself.

append_stored() appends a batch of the leader to a copy of its log. Log.append_as_follower() defines its behavior. The
batch must belong to no transaction, and continue the log in the latest leader epoch.

A record of 116 bytes takes 0.8 us, of which pwrite takes 0.45 us, and 3.2 us in the general path. Acquiring and releasing
the lock of the log would take 0.1 us, and threads would alternate at each append: eight threads would append at a third
of the rate of one thread. Without the lock, they append at 80 % of it.
"""

cdef extern from *:
    """
    #include <sys/uio.h>
    #include <time.h>
    #include <unistd.h>
    #ifndef CLOCK_MONOTONIC_COARSE
    #define CLOCK_MONOTONIC_COARSE CLOCK_MONOTONIC
    #endif
    static int64_t lc_now_ms(void) {
        struct timespec now;
        if (clock_gettime(CLOCK_REALTIME, &now) != 0 || now.tv_sec < 0) return -1;
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
    }
    static int64_t lc_ticks_ns(void) {  /* exact to some ms, and 5 ns instead of 40 */
        struct timespec now;
        if (clock_gettime(CLOCK_MONOTONIC_COARSE, &now) != 0) return 0;
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }
    """
    int64_t lc_now_ms() noexcept nogil
    int64_t lc_ticks_ns() noexcept nogil
    ssize_t pwrite(int handle, const void *data, size_t size, int64_t position) noexcept nogil
    cdef struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t pwritev(int handle, const iovec *parts, int count, int64_t position) noexcept nogil

cdef enum:
    #: appending.FAST_PATH_MAX_BYTES
    ROOM_BYTES = 4096
    SLOW_NS = 20_000_000
    #: Batches of which the active segment knows the positions.
    RECENT = 64

cdef int64_t PAUSE_NS = 1_000_000_000
cdef int64_t NO_LIMIT = 0x7fffffffffffffff

assert ROOM_BYTES == _appending.FAST_PATH_MAX_BYTES


@cython.final
@cython.no_gc  # ints and texts
@cython.freelist(256)
@cython.collection_type("sequence")
cdef class Receipt:
    """The result of an append. It replaces layout.Receipt, and takes 40 ns instead of 290 to create."""

    cdef readonly int64_t offset
    cdef readonly int64_t last_offset
    cdef readonly int64_t timestamp_ms
    cdef readonly str durability
    cdef readonly str topic
    cdef readonly int32_t partition

    _fields = _layout.Receipt._fields
    __match_args__ = _layout.Receipt._fields

    def __init__(self, int64_t offset, int64_t last_offset, int64_t timestamp_ms, str durability, str topic,
                 int32_t partition):
        self.offset = offset
        self.last_offset = last_offset
        self.timestamp_ms = timestamp_ms
        self.durability = durability
        self.topic = topic
        self.partition = partition

    cdef tuple fields(self):
        return (self.offset, self.last_offset, self.timestamp_ms, self.durability, self.topic, self.partition)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.fields()[index]

    def __iter__(self):
        return iter(self.fields())

    def __hash__(self):
        return hash(self.fields())

    def __eq__(self, other):
        if isinstance(other, (Receipt, tuple)):
            return self.fields() == tuple(other)
        return NotImplemented

    def __repr__(self):
        return (f"Receipt(offset={self.offset!r}, last_offset={self.last_offset!r}, timestamp_ms={self.timestamp_ms!r}, "
                f"durability={self.durability!r}, topic={self.topic!r}, partition={self.partition!r})")

    def __lt__(self, other):
        return self.fields() < tuple(other) if isinstance(other, (Receipt, tuple)) else NotImplemented

    def __le__(self, other):
        return self.fields() <= tuple(other) if isinstance(other, (Receipt, tuple)) else NotImplemented

    def __gt__(self, other):
        return self.fields() > tuple(other) if isinstance(other, (Receipt, tuple)) else NotImplemented

    def __ge__(self, other):
        return self.fields() >= tuple(other) if isinstance(other, (Receipt, tuple)) else NotImplemented

    def __add__(self, other):
        return self.fields() + tuple(other) if isinstance(other, (Receipt, tuple)) else NotImplemented

    def __radd__(self, other):
        return other + self.fields() if isinstance(other, tuple) else NotImplemented

    def count(self, value):
        return self.fields().count(value)

    def index(self, value, *bounds):
        return self.fields().index(value, *bounds)

    def __reduce__(self):
        return _layout.receipt_of, self.fields()

    def _asdict(self):
        return dict(zip(self._fields, self.fields()))

    def _replace(self, **changes):
        return Receipt(**{**self._asdict(), **changes})


cdef class PartitionFields:
    """See appending.PartitionFields."""

    cdef public int64_t end
    cdef public int64_t visible
    cdef public bint is_closed
    cdef public tuple listeners
    cdef public object lock
    cdef public list segments
    cdef public int64_t log_start
    cdef public object gaps


cdef struct Noted:
    int64_t start
    int64_t stop
    int64_t last_offset


cdef class SegmentFields:
    """See appending.SegmentFields."""

    cdef public int64_t base_offset
    cdef public object held
    cdef public int handle
    cdef public int64_t _size
    cdef public int64_t since_entry_bytes
    cdef public int64_t index_interval_bytes
    cdef public int64_t first_timestamp
    cdef public int64_t largest_timestamp
    cdef public int64_t largest_timestamp_offset
    cdef public int64_t last_offset
    cdef public int64_t limit_bytes
    cdef public int64_t limit_timestamp
    cdef public int64_t limit_offset
    cdef public object _indexes
    # A ring of the newest batches, made with the first one: a sealed segment needs none. An entry is valid if it ends
    # where the next one begins, and the newest one at _size. A truncation therefore needs no change here.
    cdef Noted *ring
    cdef int64_t noted

    def __dealloc__(self):
        free(self.ring)

    cdef bint range_of(self, int64_t offset, int64_t end, int64_t most, int64_t *position, int64_t *size) noexcept:
        """Find the batches from the one that contains an offset up to an end. Return False if they are too many."""
        cdef int64_t stop = self._size, number = self.noted, behind = -1
        cdef Noted *one
        while number > 0 and number > self.noted - RECENT:
            one = &self.ring[(number - 1) % RECENT]
            if one.stop != stop or one.last_offset < offset:
                break
            stop = one.start
            if behind < 0 and one.last_offset < end:
                behind = one.stop
            number -= 1
        if behind < 0 or behind - stop > most:
            return False
        # The loop ended at the batch before the wanted one, which shows where that begins.
        if number == 0:
            if stop or offset < self.base_offset:
                return False
        else:
            one = &self.ring[(number - 1) % RECENT]
            if number == self.noted - RECENT or one.stop != stop or one.last_offset >= offset:
                return False
        position[0] = stop
        size[0] = behind - stop
        return True

    def find_recent(self, int64_t offset):
        """Return the position of the batch that contains an offset, or -1. See appending.SegmentFields."""
        cdef int64_t position = 0, size = 0
        if not self.range_of(offset, NO_LIMIT, NO_LIMIT, &position, &size):
            return -1
        return position

    def is_full(self, int64_t size, int64_t max_timestamp, int64_t last_offset, int64_t now_ms):
        """Return whether an append needs a new segment first. See appending.SegmentFields."""
        if self._size == 0:
            return last_offset > self.limit_offset
        if self.first_timestamp < 0 and self.is_too_old(now_ms):
            return True
        return self.lacks_room(size, max_timestamp, last_offset)

    cdef bint lacks_room(self, int64_t size, int64_t max_timestamp, int64_t last_offset) noexcept:
        return (self._size + size > self.limit_bytes or max_timestamp > self.limit_timestamp
                or last_offset > self.limit_offset)

    def record_batch(self, int64_t position, int64_t size, int64_t last_offset, int64_t max_timestamp):
        """Update the indexes and the largest timestamp for a batch. See appending.SegmentFields."""
        self.note_batch(position, size, last_offset, max_timestamp)

    def record_batches(self, int64_t start, batches):
        """Update them for several batches, whose positions are relative to `start`."""
        cdef int64_t position, size, last_offset, max_timestamp
        for position, size, last_offset, max_timestamp in batches:
            self.note_batch(start + position, size, last_offset, max_timestamp)

    cdef int note_batch(self, int64_t position, int64_t size, int64_t last_offset, int64_t max_timestamp) except -1:
        cdef Noted *one
        if max_timestamp > self.largest_timestamp:
            self.largest_timestamp = max_timestamp
            self.largest_timestamp_offset = last_offset
        if position == 0:
            self._begin_at(max_timestamp)
        if self.since_entry_bytes > self.index_interval_bytes:
            self.add_entries(position, last_offset)
        self.since_entry_bytes += size
        self.last_offset = last_offset
        if self.ring == NULL:
            self.ring = <Noted *>calloc(RECENT, sizeof(Noted))
            if self.ring == NULL:  # then there are no fast reads
                return 0
        one = &self.ring[self.noted % RECENT]
        one.start, one.stop, one.last_offset = position, position + size, last_offset
        self.noted += 1
        return 0

    cdef int add_entries(self, int64_t position, int64_t last_offset) except -1:
        """Like appending.SegmentFields._add_entries(), with IndexWriter.add() inline: 0.2 us instead of 0.6."""
        cdef bytearray offsets
        cdef Py_ssize_t size
        cdef uint8_t *at
        cdef int64_t newest, entries_until_check
        indexes = self._indexes
        offsets = indexes.offsets.data
        size = PyByteArray_GET_SIZE(offsets)
        PyByteArray_Resize(offsets, size + 8)
        at = <uint8_t *>PyByteArray_AS_STRING(offsets) + size
        lc_put32(at, <uint32_t>(last_offset - self.base_offset))
        lc_put32(at + 4, <uint32_t>position)
        times = indexes.times
        newest = times.last_timestamp
        if self.largest_timestamp > newest:
            times.add(self.largest_timestamp, self.largest_timestamp_offset - self.base_offset)
        entries_until_check = indexes.entries_until_check - 1
        indexes.entries_until_check = entries_until_check
        self.since_entry_bytes = 0
        if entries_until_check <= 0:
            self._check_indexes()
        return 0


cdef class Appender:
    """See appending.Appender."""

    cdef public PartitionFields state
    cdef public SegmentFields active
    cdef public object fs
    cdef public object commit
    cdef public tuple key
    cdef public object forks
    cdef public int32_t leader_epoch
    cdef public int64_t written_bytes
    cdef public int64_t appends
    cdef public int64_t fast_path_bytes
    cdef public bint requires_key
    cdef public bint has_unfinished_write
    cdef public bint is_held
    cdef public bint is_maintenance_idle
    cdef public int64_t slow_until_ns
    cdef public bint has_descriptors
    cdef public int64_t client_batch_bytes
    cdef public int64_t stored_batch_bytes
    cdef public int64_t unsynced_limit
    cdef public int64_t max_ahead_ms
    cdef public int64_t max_behind_ms
    cdef public bint shows_appends

    def respond_recent(self, UsualFetch request not None, int64_t stable, int64_t most_bytes):
        """Return the response to a Fetch of the newest batches. See appending.Appender."""
        cdef PartitionFields state = self.state
        cdef SegmentFields active = self.active
        cdef int64_t position = 0, size = 0, began_ns = lc_ticks_ns()
        # After a slow read or write the general path is used, whose reads let other threads run.
        if began_ns < self.slow_until_ns:
            return None
        if not self.has_descriptors or state.is_closed or self.has_unfinished_write or request.offset < state.log_start:
            return None
        # Like append_fast(), this lets no other thread run: the segment is not closed before the read.
        if not active.range_of(request.offset, stable, min(most_bytes, RECENT_BYTES), &position, &size):
            return None
        response = request.build(state.visible, stable, state.log_start, active.handle, position, size)
        if lc_ticks_ns() - began_ns > SLOW_NS:
            self.slow_until_ns = lc_ticks_ns() + PAUSE_NS
        return response

    def append_fast(self, value, key, headers, timestamp_ms, durability, expected_offset):
        """Append a usual record. See the top of this file, and appending.Appender."""
        cdef uint8_t room[ROOM_BYTES]
        cdef PartitionFields state = self.state
        cdef SegmentFields active = self.active
        cdef Receipt receipt
        cdef Head head
        cdef Py_ssize_t key_size = -1, value_size = -1, size
        cdef const uint8_t *key_at = NULL
        cdef const uint8_t *value_at = NULL
        cdef int64_t now_ms, began_ns
        if (self.fast_path_bytes == 0 or not _has_fast_crc or headers is not _no_headers or timestamp_ms is not None or durability is not None
                or expected_offset is not None):
            return None
        if value is not None:
            if not PyBytes_CheckExact(value):
                return None
            value_size = PyBytes_GET_SIZE(value)
            value_at = <const uint8_t *>PyBytes_AS_STRING(value)
        if key is not None:
            if not PyBytes_CheckExact(key):
                return None
            key_size = PyBytes_GET_SIZE(key)
            key_at = <const uint8_t *>PyBytes_AS_STRING(key)
        elif self.requires_key:
            return None
        if key_size > ROOM_BYTES or value_size > ROOM_BYTES:
            return None
        # As in encode_one(): attributes, two deltas and a header count of one byte each, key and value.
        size = 4 + lc_size(lc_zigzag(key_size)) + lc_size(lc_zigzag(value_size)) + max(key_size, 0) + max(value_size, 0)
        size += HEADER_SIZE + lc_size(<uint64_t>size << 1)
        if size > self.fast_path_bytes:
            return None
        # Steps that may run Python code or allocate an object come first.
        if self.fs.forks != self.forks or self.commit.failure is not None:
            return None
        receipt = Receipt.__new__(Receipt)
        receipt.durability = "os"
        receipt.topic, receipt.partition = self.key
        if state.lock.locked():
            return None
        # From here on nothing runs Python code, until all fields describe the content of the file.
        if state.is_closed or self.has_unfinished_write or self.is_held or self.is_maintenance_idle or PyTuple_GET_SIZE(state.listeners):
            return None
        now_ms = lc_now_ms()
        began_ns = lc_ticks_ns()
        if now_ms < 0 or began_ns < self.slow_until_ns:
            return None
        if (active._size == 0 or active.first_timestamp < 0 or active.lacks_room(size, now_ms, state.end)
                or active.since_entry_bytes > active.index_interval_bytes):
            return None
        lc_write_record(room + HEADER_SIZE, 0, 0, key_at, key_size, value_at, value_size, 0, NULL, 0)
        head.base_offset = state.end
        head.leader_epoch = self.leader_epoch
        head.attributes = 0
        head.producer_id = head.producer_epoch = head.base_sequence = -1
        head.base_timestamp = head.max_timestamp = now_ms
        write_fields(room, &head, size, 1)
        lc_put32(room + CRC_FIELD, lc_crc_fast(room + CRC_START, size - CRC_START))
        if pwrite(active.handle, room, size, active._size) != size:
            self.has_unfinished_write = True
            return self.undo_fast()
        if lc_ticks_ns() - began_ns > SLOW_NS:
            self.slow_until_ns = lc_ticks_ns() + PAUSE_NS
        active.note_batch(active._size, size, state.end, now_ms)  # no entry, so no Python
        active._size += size
        self.written_bytes += size
        self.appends += 1
        receipt.offset = receipt.last_offset = state.end
        receipt.timestamp_ms = now_ms
        state.end += 1
        state.visible = state.end
        return receipt

    def append_request(self, UsualProduce request not None, frame):
        """Append the batch of a request. See appending.Appender."""
        cdef Py_buffer view
        cdef Facts facts
        cdef int64_t offset
        PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
        try:
            if request.stop > view.len:
                return None
            offset = self.append_sound(<const uint8_t *>view.buf + request.start, request.stop - request.start, lc_now_ms(),
                                       &facts)
        finally:
            PyBuffer_Release(&view)
        return None if offset < 0 else offset

    def append_encoded(self, data not None):
        """Append an encoded batch. See appending.Appender."""
        cdef Py_buffer view
        cdef Facts facts
        cdef Receipt receipt
        cdef int64_t offset, now_ms = lc_now_ms()
        if type(data) is memoryview:
            if not data.c_contiguous or data.itemsize != 1:
                return None
        elif type(data) is not bytes and type(data) is not bytearray:
            return None
        receipt = self.new_receipt(now_ms)
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            offset = self.append_sound(<const uint8_t *>view.buf, view.len, now_ms, &facts)
        finally:
            PyBuffer_Release(&view)
        if offset < 0:
            return None
        receipt.offset, receipt.last_offset = offset, offset + facts.record_count - 1
        return receipt

    cdef Receipt new_receipt(self, int64_t now_ms):
        """A receipt without offsets. It is made before the append, because there may be no memory for it."""
        cdef Receipt receipt = Receipt.__new__(Receipt)
        receipt.timestamp_ms = now_ms
        receipt.durability = "os"
        receipt.topic, receipt.partition = self.key
        return receipt

    cdef int64_t append_sound(self, const uint8_t *batch, int64_t size, int64_t now_ms, Facts *facts) except -2:
        """Check and append a batch. Returns its offset, or -1 without any effect."""
        cdef Sound sound
        if size > self.client_batch_bytes or now_ms < 0 or lc_ticks_ns() < self.slow_until_ns:
            return -1
        # The batch of a transaction has no other attribute than that, and changes more than the fields below.
        if not read_sound(batch, size, facts, &sound) or facts.attributes != 0:
            return -1
        if not self.state.lock.acquire(False):
            return -1
        try:
            return self.append_sound_locked(batch, facts, &sound, now_ms)
        finally:
            self.state.lock.release()

    cdef int64_t append_sound_locked(self, const uint8_t *batch, Facts *facts, Sound *sound, int64_t now_ms) except -2:
        """Append a valid batch of a client. Returns its offset, or -1 without any effect."""
        # All conditions are checked under the lock: while the checksum was computed, another thread may have changed the
        # settings, or made this replica a follower.
        if facts.size_bytes > self.client_batch_bytes or (sound.keyless and self.requires_key):
            return -1
        if ((sound.newest != -1 and sound.newest - now_ms > self.max_ahead_ms)
                or (sound.oldest != -1 and now_ms - sound.oldest > self.max_behind_ms)):
            return -1
        if facts.producer_id >= 0 and not (
                self.metadata.sidecar.producers
                and self.producers.is_next(facts.producer_id, facts.producer_epoch, facts.base_sequence)):
            return -1
        return self.write_batch_locked(batch, facts, self.state.end + facts.record_count - 1, now_ms, True)

    def append_stored(self, data):
        """Append a batch of a leader as it is stored there. See appending.Appender."""
        cdef Py_buffer view
        cdef const uint8_t *batch
        cdef int64_t now_ms = lc_now_ms(), offset
        cdef Facts facts
        cdef Receipt receipt
        if now_ms < 0 or lc_ticks_ns() < self.slow_until_ns:
            return None
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            batch = <const uint8_t *>view.buf
            if view.len < HEADER_SIZE or check_head(batch, view.len) != WALK_END or batch[16] != 2:
                return None
            read_facts(batch, 0, &facts)
            if (facts.size_bytes != view.len or facts.attributes & (TRANSACTIONAL_BIT | CONTROL_BIT)
                    or crc_of(batch + CRC_START, facts.size_bytes - CRC_START) != facts.crc):
                return None
            receipt = self.new_receipt(now_ms)
            if not self.state.lock.acquire(False):
                return None
            try:
                offset = self.append_stored_locked(batch, &facts, now_ms)
            finally:
                self.state.lock.release()
        finally:
            PyBuffer_Release(&view)
        if offset < 0:
            return None
        receipt.offset, receipt.last_offset = offset, facts.last_offset
        return receipt

    cdef int64_t append_stored_locked(self, const uint8_t *batch, Facts *facts, int64_t now_ms) except -2:
        """Append a batch of a leader. Returns its offset, or -1 without any effect."""
        cdef int64_t offset = facts.base_offset
        cdef Py_ssize_t count
        if facts.size_bytes > self.stored_batch_bytes or offset != self.state.end:
            return -1
        if not offset <= facts.last_offset < NO_LIMIT or facts.partition_leader_epoch != self.leader_epoch:
            return -1
        # The batch begins no epoch, and no transactions are being indexed.
        metadata = self.metadata
        epochs = metadata.epochs
        count = len(epochs)
        if count == 0:
            return -1
        epoch, first_offset = epochs[count - 1]
        if epoch != self.leader_epoch or first_offset >= offset:
            return -1
        if self.transactions.known is not None:
            return -1
        if facts.producer_id >= 0:
            if not metadata.sidecar.producers:
                return -1
            # The leader has checked the batch, so the state of producers is read again when it is needed.
            self.producers.forget()
        return self.write_batch_locked(batch, facts, facts.last_offset, now_ms, False)

    cdef int64_t write_batch_locked(self, const uint8_t *batch, Facts *facts, int64_t last_offset, int64_t now_ms,
                                    bint is_checked) except -2:
        """Write a valid batch at the log end. Returns its offset, or -1 without any effect.

        is_checked: the state of its producer is known, and the batch is added to it.
        """
        cdef PartitionFields state = self.state
        cdef SegmentFields active = self.active
        cdef uint8_t head[HEADER_SIZE]
        cdef iovec parts[2]
        cdef int64_t size = facts.size_bytes, offset = state.end, start, written_bytes, began_ns
        cdef ssize_t written
        # 1. The other conditions under which the general path does more, or refuses.
        if state.is_closed or self.has_unfinished_write or self.is_held or self.fs.forks != self.forks:
            return -1
        commit = self.commit
        written_bytes = self.written_bytes
        if commit.failure is not None or written_bytes + size - <int64_t>commit.synced_bytes > self.unsynced_limit:
            return -1
        start = active._size
        if start == 0 or active.is_full(size, facts.max_timestamp, last_offset, now_ms):
            return -1
        # 2. Write. Only base offset and leader epoch change, and the CRC covers neither.
        memcpy(head, batch, HEADER_SIZE)
        lc_put64(head, <uint64_t>offset)
        lc_put32(head + 12, <uint32_t>self.leader_epoch)
        parts[0].iov_base, parts[0].iov_len = head, HEADER_SIZE
        parts[1].iov_base, parts[1].iov_len = <void *>(batch + HEADER_SIZE), size - HEADER_SIZE
        self.has_unfinished_write = True
        began_ns = lc_ticks_ns()
        if size <= ROOM_BYTES:
            written = pwritev(active.handle, parts, 2, start)
        else:  # releases the GIL: this thread holds the lock of the log
            with nogil:
                written = pwritev(active.handle, parts, 2, start)
        if written != size:  # the general path writes again, and reports the error
            self.undo_failed_write_locked()
            return -1
        if lc_ticks_ns() - began_ns > SLOW_NS:
            self.slow_until_ns = lc_ticks_ns() + PAUSE_NS
        # 3. Update the fields.
        try:
            # If an interrupt occurs here, the batch is removed, because its caller gets no receipt.
            try:
                active._size = start + size
                active.note_batch(start, size, last_offset, facts.max_timestamp)
                self.written_bytes = written_bytes + size
                state.end = last_offset + 1
                self.has_unfinished_write = False
                if self.is_maintenance_idle:
                    self.wake_maintenance_locked()
            except BaseException:
                self.roll_back_append_locked(start, offset, written_bytes)
                self.has_unfinished_write = False
                raise
            self.appends += 1
            if self.shows_appends:
                state.visible = state.end
                if PyTuple_GET_SIZE(state.listeners):
                    state.wake()
            if is_checked and facts.producer_id >= 0:
                self.producers.add_last(facts.producer_id, facts.producer_epoch, facts.base_sequence,
                                        facts.record_count, facts.max_timestamp)
        except BaseException:
            # The batch may remain in the file. The state of its producer is read from the log again. Otherwise, a
            # retry would be stored twice.
            self.producers.forget()
            raise
        return offset

    cdef object undo_fast(self):
        """Undo a write that failed or was short. No other thread has run since the check, so the lock is free."""
        self.state.lock.acquire(False)
        try:
            self.undo_failed_write_locked()
        finally:
            self.state.lock.release()
        return None
