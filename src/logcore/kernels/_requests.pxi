"""Compiled parsing and responses of the usual Produce and Fetch requests of a broker, without objects for their parts.
_compiled.pyx includes this file.

netshim.wire is the general path, and defines the behavior. read_request() returns None for every request that is not
usual, and netshim then decodes it. A usual request has:

- a version that current clients use: Produce 7 to 13, Fetch 10 to 18;
- one topic and one partition, no tagged fields, and a client id and a topic name of ASCII characters. A Fetch that
  continues a session may list no partition;
- Produce: acks 1 or -1, no transactional id, and exactly one batch of magic 2 with base offset 0, which belongs to no
  transaction;
- Fetch: a consumer that waits for at least one byte, without a session or with one that continues. Or a follower that
  uses version 15 or later; it names itself in a tagged field.

For a usual Fetch of the newest batches, one pread copies the batches into the bytes of the response. The active segment
has recorded their position when they were appended.

Decoding a request and encoding its response takes 0.4 us for a Produce and 0.5 us for a Fetch without records. The
general codec takes 11 and 12 us.
"""

cdef extern from *:
    """
    #include <unistd.h>
    /* An unsigned varint. Returns the byte after it, or NULL if it is malformed, above 2^31, or runs past end. */
    static inline const unsigned char *lc_read_unsigned(const unsigned char *p, const unsigned char *end, int64_t *out) {
        uint64_t value = 0; int shift;
        for (shift = 0; shift < 35; shift += 7) {
            if (p >= end) return NULL;
            value |= (uint64_t)(*p & 0x7f) << shift;
            if (*p++ < 0x80) {
                *out = (int64_t)value;
                return value < 0x80000000 ? p : NULL;
            }
        }
        return NULL;
    }
    static inline int lc_is_ascii(const unsigned char *p, int64_t size) {
        int64_t at; unsigned char all = 0;
        for (at = 0; at < size; at++) all |= p[at];
        return all < 0x80;
    }
    """
    const uint8_t *lc_read_unsigned(const uint8_t *p, const uint8_t *end, int64_t *out) noexcept nogil
    int lc_is_ascii(const uint8_t *p, int64_t size) noexcept nogil
    ssize_t pread(int handle, void *data, size_t size, int64_t position) noexcept nogil

cdef enum:
    PRODUCE_KEY = 0
    PRODUCE_MIN = 7
    PRODUCE_FLEXIBLE = 9
    PRODUCE_IDS = 13
    FETCH_KEY = 1
    FETCH_MIN = 10
    FETCH_RACKS = 11
    FETCH_FLEXIBLE = 12
    FETCH_IDS = 13
    FETCH_NO_REPLICA = 15
    FETCH_MAX = 18
    #: The size of a topic id.
    ID_SIZE = 16
    #: The largest response that reads the newest batches. A larger one sends views of the file, which are not copied.
    RECENT_BYTES = 64 << 10
    #: A response without records has at most 100 bytes beside its topic. Kafka's longest topic name has 249.
    MAX_TOPIC_BYTES = 384
    ROOM_OF_HEAD = 512


cdef class UsualRequest:
    """The fields that both requests have. See requests.UsualRequest."""

    cdef readonly int32_t version
    cdef readonly int32_t correlation_id
    cdef readonly int32_t partition
    #: The name of the topic, or "" if the request has its id.
    cdef readonly str topic
    #: The id of the topic, or None.
    cdef readonly bytes topic_id
    cdef readonly str client_id

    cdef uint8_t *write_topic(self, uint8_t *p, bint flexible):
        """Writes the topic and the number of its partitions."""
        cdef Py_ssize_t size
        cdef const uint8_t *name
        if self.topic_id is not None:
            memcpy(p, PyBytes_AS_STRING(self.topic_id), ID_SIZE)
            p += ID_SIZE
        else:
            name = <const uint8_t *>PyUnicode_AsUTF8AndSize(self.topic, &size)
            if flexible:
                p = lc_write(p, <uint64_t>size + 1)
            else:
                lc_put16(p, <uint16_t>size)
                p += 2
            memcpy(p, name, size)
            p += size
        return write_count(p, flexible)


cdef inline uint8_t *write_count(uint8_t *p, bint flexible) noexcept nogil:
    """Writes the length of an array with one element."""
    if flexible:
        p[0] = 2
        return p + 1
    lc_put32(p, 1)
    return p + 4


@cython.final
@cython.no_gc
cdef class UsualProduce(UsualRequest):
    """See requests.UsualProduce."""

    cdef readonly int16_t acks
    cdef readonly int32_t timeout_ms
    #: Range of the batch in the frame.
    cdef readonly Py_ssize_t start
    cdef readonly Py_ssize_t stop
    cdef readonly int32_t record_count

    def respond(self, int64_t base_offset, int64_t append_time_ms, int64_t log_start):
        """The response of a batch that was appended, with its size."""
        cdef uint8_t room[ROOM_OF_HEAD]
        cdef bint flexible = self.version >= PRODUCE_FLEXIBLE
        cdef uint8_t *p = room + 4
        lc_put32(p, <uint32_t>self.correlation_id)
        p += 4
        if flexible:
            p[0] = 0
            p += 1
        p = write_count(p, flexible)
        p = self.write_topic(p, flexible)
        lc_put32(p, <uint32_t>self.partition)
        lc_put16(p + 4, 0)
        lc_put64(p + 6, <uint64_t>base_offset)
        lc_put64(p + 14, <uint64_t>append_time_ms)
        lc_put64(p + 22, <uint64_t>log_start)
        p += 30
        if flexible:  # no record errors, no message, no tagged fields of the partition and of the topic
            p[0], p[1], p[2], p[3] = 1, 0, 0, 0
            p += 4
        elif self.version >= 8:
            lc_put32(p, 0)
            lc_put16(p + 4, 0xffff)
            p += 6
        lc_put32(p, 0)  # throttle_time_ms
        p += 4
        if flexible:
            p[0] = 0
            p += 1
        lc_put32(room, <uint32_t>(p - room - 4))
        return PyBytes_FromStringAndSize(<char *>room, p - room)


@cython.final
@cython.no_gc
cdef class UsualFetch(UsualRequest):
    """See requests.UsualFetch."""

    cdef readonly int32_t max_wait_ms
    cdef readonly int32_t min_bytes
    cdef readonly int32_t max_bytes
    cdef readonly bint is_committed
    cdef readonly int32_t leader_epoch
    cdef readonly int64_t offset
    cdef readonly int32_t last_epoch
    #: Position of max_wait_ms in the frame.
    cdef readonly Py_ssize_t wait_position
    #: 0 without a session.
    cdef readonly int32_t session_id
    cdef readonly int32_t session_epoch
    #: False if the request lists no partition, until continue_with() is called.
    cdef readonly bint has_partition
    cdef readonly int32_t partition_max_bytes
    #: The node id of a follower, or -1, and the epoch of its registration.
    cdef readonly int32_t replica
    cdef readonly int64_t replica_epoch

    def continue_with(self, str topic, bytes topic_id, asked):
        """See requests.UsualFetch."""
        self.topic = topic
        self.topic_id = topic_id
        self.partition = asked.partition
        self.leader_epoch = asked.current_leader_epoch
        self.offset = asked.fetch_offset
        self.last_epoch = asked.last_fetched_epoch
        self.max_bytes = min(self.max_bytes, <int32_t>asked.partition_max_bytes)
        self.has_partition = True

    cdef uint8_t *write_head(self, uint8_t *p, int64_t high_watermark, int64_t stable, int64_t log_start, int64_t size):
        """Writes the response up to the records, of which there are size bytes."""
        cdef bint flexible = self.version >= FETCH_FLEXIBLE
        if self.replica >= 0:
            stable = -1  # only consumers get it
        lc_put32(p, <uint32_t>self.correlation_id)
        p += 4
        if flexible:
            p[0] = 0
            p += 1
        lc_put32(p, 0)  # throttle_time_ms
        lc_put16(p + 4, 0)
        lc_put32(p + 6, <uint32_t>self.session_id)
        p = write_count(p + 10, flexible)
        p = self.write_topic(p, flexible)
        lc_put32(p, <uint32_t>self.partition)
        lc_put16(p + 4, 0)
        lc_put64(p + 6, <uint64_t>high_watermark)
        lc_put64(p + 14, <uint64_t>stable)
        lc_put64(p + 22, <uint64_t>log_start)
        p += 30
        # Aborted transactions: none under read_committed, else null.
        if flexible:
            p[0] = 1 if self.is_committed else 0
            p += 1
        else:
            lc_put32(p, 0 if self.is_committed else 0xffffffff)
            p += 4
        if self.version >= FETCH_RACKS:
            lc_put32(p, 0xffffffff)  # preferred_read_replica
            p += 4
        if flexible:
            return lc_write(p, <uint64_t>size + 1)
        lc_put32(p, <uint32_t>size)
        return p + 4

    cdef bytes build(self, int64_t high_watermark, int64_t stable, int64_t log_start, int handle, int64_t position,
                     int64_t size):
        """The response with size bytes from a position of a file; None if they cannot be read."""
        cdef uint8_t head[ROOM_OF_HEAD]
        cdef uint8_t *p
        cdef bytes response
        cdef Py_ssize_t head_size, whole
        head_size = self.write_head(head + 4, high_watermark, stable, log_start, size) - head
        # Behind the records: tagged fields of the partition, the topic and the response.
        whole = head_size + size + (3 if self.version >= FETCH_FLEXIBLE else 0)
        lc_put32(head, <uint32_t>(whole - 4))
        response = PyBytes_FromStringAndSize(NULL, whole)
        p = <uint8_t *>PyBytes_AS_STRING(response)
        memcpy(p, head, head_size)
        p += head_size
        if size:
            if pread(handle, p, size, position) != size:
                return None
            if not are_dense(p, p + size, self.offset):
                return None
        if self.version >= FETCH_FLEXIBLE:
            p[size] = p[size + 1] = p[size + 2] = 0
        return response

    def respond_around(self, int64_t high_watermark, int64_t stable, int64_t log_start, int64_t size):
        """What precedes and follows size bytes of records in the response."""
        cdef uint8_t head[ROOM_OF_HEAD]
        cdef Py_ssize_t head_size = self.write_head(head + 4, high_watermark, stable, log_start, size) - head
        cdef bytes tail = b"\0\0\0" if self.version >= FETCH_FLEXIBLE else b""
        lc_put32(head, <uint32_t>(head_size + size + len(tail) - 4))
        return PyBytes_FromStringAndSize(<char *>head, head_size), tail

    def respond_empty(self, int64_t high_watermark, int64_t stable, int64_t log_start):
        """The response without records, with its size."""
        return self.build(high_watermark, stable, log_start, -1, 0, 0)

    def respond_without_news(self):
        """The response of a session without partitions, with its size."""
        cdef uint8_t room[32]
        cdef bint flexible = self.version >= FETCH_FLEXIBLE
        cdef uint8_t *p = room + 4
        lc_put32(p, <uint32_t>self.correlation_id)
        p += 4
        if flexible:
            p[0] = 0
            p += 1
        lc_put32(p, 0)  # throttle_time_ms
        lc_put16(p + 4, 0)
        lc_put32(p + 6, <uint32_t>self.session_id)
        p += 10
        if flexible:  # no topics, no tagged fields
            p[0], p[1] = 1, 0
            p += 2
        else:
            lc_put32(p, 0)
            p += 4
        lc_put32(room, <uint32_t>(p - room - 4))
        return PyBytes_FromStringAndSize(<char *>room, p - room)


cdef bint are_dense(const uint8_t *p, const uint8_t *end, int64_t offset) noexcept nogil:
    """Whether whole batches follow each other from the one with an offset on. CRCs are not checked."""
    cdef Facts facts
    cdef int64_t expected = -1
    while p < end:
        if check_head(p, end - p) != WALK_END or p[16] != 2:
            return False
        read_facts(p, 0, &facts)
        if facts.last_offset < facts.base_offset:
            return False
        if expected < 0 and not facts.base_offset <= offset <= facts.last_offset:
            return False
        if expected >= 0 and facts.base_offset != expected:
            return False
        expected = facts.last_offset + 1
        p += facts.size_bytes
    return True


cdef inline const uint8_t *read_text(const uint8_t *p, const uint8_t *end, bint flexible, const uint8_t **text,
                                     int64_t *size) noexcept nogil:
    """Reads a string. NULL if it is null, malformed or not ASCII."""
    if flexible:
        p = lc_read_unsigned(p, end, size)
        if p == NULL:
            return NULL
        size[0] -= 1
    else:
        if end - p < 2:
            return NULL
        size[0] = <int16_t>lc_be16(p)
        p += 2
    if size[0] < 0 or size[0] > end - p or not lc_is_ascii(p, size[0]):
        return NULL
    text[0] = p
    return p + size[0]


cdef inline const uint8_t *read_single(const uint8_t *p, const uint8_t *end, bint flexible) noexcept nogil:
    """Reads the length of an array. NULL unless it is 1."""
    if flexible:
        return p + 1 if end - p >= 1 and p[0] == 2 else NULL
    return p + 4 if end - p >= 4 and lc_be32(p) == 1 else NULL


cdef inline bint is_empty(const uint8_t *p, const uint8_t *end, bint flexible) noexcept nogil:
    """Whether an array follows whose length is 0."""
    if flexible:
        return end - p >= 1 and p[0] == 1
    return end - p >= 4 and lc_be32(p) == 0


cdef inline bint is_over(const uint8_t *p, const uint8_t *end, bint flexible, Py_ssize_t tags) noexcept nogil:
    """Whether nothing is left but as many empty sections of tagged fields."""
    cdef Py_ssize_t at
    if not flexible:
        return p == end
    if end - p != tags:
        return False
    for at in range(tags):
        if p[at]:
            return False
    return True


cdef const uint8_t *read_topic(UsualRequest request, const uint8_t *p, const uint8_t *end, bint flexible, bint has_id):
    """Reads a topic up to its only partition, whose number it reads too. NULL if that is not usual."""
    cdef const uint8_t *text
    cdef int64_t size
    p = read_single(p, end, flexible)
    if p == NULL:
        return NULL
    if has_id:
        if end - p < ID_SIZE:
            return NULL
        request.topic_id = PyBytes_FromStringAndSize(<const char *>p, ID_SIZE)
        request.topic = ""
        p += ID_SIZE
    else:
        p = read_text(p, end, flexible, &text, &size)
        if p == NULL or size > MAX_TOPIC_BYTES:
            return NULL
        request.topic = PyUnicode_DecodeASCII(<const char *>text, size, NULL)
    p = read_single(p, end, flexible)
    if p == NULL or end - p < 4:
        return NULL
    request.partition = <int32_t>lc_be32(p)
    return p + 4


cdef UsualProduce read_produce(const uint8_t *base, const uint8_t *p, const uint8_t *end, int32_t version):
    cdef UsualProduce request = UsualProduce.__new__(UsualProduce)
    cdef bint flexible = version >= PRODUCE_FLEXIBLE
    cdef int64_t size
    cdef int16_t attributes
    # A transactional id of null.
    if flexible:
        if p >= end or p[0]:
            return None
        p += 1
    else:
        if end - p < 2 or lc_be16(p) != 0xffff:
            return None
        p += 2
    if end - p < 6:
        return None
    request.acks = <int16_t>lc_be16(p)
    request.timeout_ms = <int32_t>lc_be32(p + 2)
    if request.acks != 1 and request.acks != -1:
        return None
    p = read_topic(request, p + 6, end, flexible, version >= PRODUCE_IDS)
    if p == NULL:
        return None
    if flexible:
        p = lc_read_unsigned(p, end, &size)
        size -= 1
    else:
        if end - p < 4:
            return None
        size = <int32_t>lc_be32(p)
        p += 4
    if p == NULL or size < HEADER_SIZE or size > end - p or not is_over(p + size, end, flexible, 3):
        return None
    attributes = <int16_t>lc_be16(p + 21)
    if (lc_be64(p) or <int64_t><int32_t>lc_be32(p + 8) + LOG_OVERHEAD != size or p[16] != 2
            or attributes & (TRANSACTIONAL_BIT | CONTROL_BIT)):
        return None
    request.start = p - base
    request.stop = request.start + size
    request.record_count = <int32_t>lc_be32(p + 57)
    return request


cdef UsualFetch read_fetch(const uint8_t *base, const uint8_t *p, const uint8_t *end, int32_t version):
    cdef UsualFetch request = UsualFetch.__new__(UsualFetch)
    cdef bint flexible = version >= FETCH_FLEXIBLE
    cdef const uint8_t *text
    cdef int64_t size
    cdef Py_ssize_t tags = 0
    if version < FETCH_NO_REPLICA:
        if end - p < 4 or lc_be32(p) != 0xffffffff:
            return None
        p += 4
    if end - p < 21:
        return None
    request.wait_position = p - base
    request.max_wait_ms = <int32_t>lc_be32(p)
    request.min_bytes = <int32_t>lc_be32(p + 4)
    request.max_bytes = <int32_t>lc_be32(p + 8)
    # A response of no bytes would be enough.
    if request.min_bytes < 1 or request.max_bytes < 1:
        return None
    request.is_committed = p[12]
    request.session_id = <int32_t>lc_be32(p + 13)
    request.session_epoch = <int32_t>lc_be32(p + 17)
    # Id 0 and epoch -1 without a session. A session continues with its id and a positive epoch.
    if p[12] > 1 or (request.session_epoch < 1 if request.session_id else request.session_epoch != -1):
        return None
    p += 21
    request.last_epoch = -1
    request.has_partition = request.session_id == 0 or not is_empty(p, end, flexible)
    if request.has_partition:
        p = read_topic(request, p, end, flexible, version >= FETCH_IDS)
        if p == NULL or end - p < (28 if flexible else 24):
            return None
        request.leader_epoch = <int32_t>lc_be32(p)
        request.offset = <int64_t>lc_be64(p + 4)
        p += 12
        if flexible:
            request.last_epoch = <int32_t>lc_be32(p)
            p += 4
        p += 8  # the log start offset of a follower
        request.partition_max_bytes = <int32_t>lc_be32(p)
        request.max_bytes = min(request.max_bytes, request.partition_max_bytes)
        p += 4
        tags = 2  # of the partition and of the topic
    else:
        request.topic = ""
        p += 1 if flexible else 4
    # No forgotten topics, and the rack.
    if flexible:
        if end - p < tags + 1 or (tags and (p[0] or p[1])) or p[tags] != 1:
            return None
        p += tags + 1
    else:
        if end - p < 4 or lc_be32(p):
            return None
        p += 4
    if version >= FETCH_RACKS:
        p = read_text(p, end, flexible, &text, &size)
        if p == NULL:
            return None
    request.replica = -1
    request.replica_epoch = -1
    # One tagged field: its number, its size, the two values, and no tagged fields of its own.
    if version >= FETCH_NO_REPLICA and end - p == 16 and p[0] == 1 and p[1] == 1 and p[2] == 13 and p[15] == 0:
        request.replica = <int32_t>lc_be32(p + 3)
        request.replica_epoch = <int64_t>lc_be64(p + 7)
        return request if request.replica >= 0 else None
    if not is_over(p, end, flexible, 1):
        return None
    return request


def read_request(frame):
    """See plain.read_request."""
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const uint8_t *p
    cdef const uint8_t *end
    cdef const uint8_t *text
    cdef int64_t size
    cdef int32_t version, correlation_id
    cdef UsualRequest request
    cdef bint is_produce
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        end = base + view.len
        if view.len < 12 or base[0] or base[1] > FETCH_KEY:
            return None
        is_produce = base[1] == PRODUCE_KEY
        version = <int16_t>lc_be16(base + 2)
        if is_produce and not PRODUCE_MIN <= version <= PRODUCE_IDS:
            return None
        if not is_produce and not FETCH_MIN <= version <= FETCH_MAX:
            return None
        correlation_id = <int32_t>lc_be32(base + 4)
        text = base
        size = 0
        if lc_be16(base + 8) == 0xffff:  # a client without an id has the empty one
            p = base + 10
        else:
            p = read_text(base + 8, end, False, &text, &size)
            if p == NULL:
                return None
        if version >= (PRODUCE_FLEXIBLE if is_produce else FETCH_FLEXIBLE):
            if p >= end or p[0]:
                return None
            p += 1
        if is_produce:
            request = read_produce(base, p, end, version)
        else:
            request = read_fetch(base, p, end, version)
        if request is None:
            return None
        request.version = version
        request.correlation_id = correlation_id
        request.client_id = PyUnicode_DecodeASCII(<const char *>text, size, NULL)
        return request
    finally:
        PyBuffer_Release(&view)
