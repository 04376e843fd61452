# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The hot loops, compiled. plain.py holds the same functions in Python and is the oracle for these.

Rules:
- Nothing is read past the buffer given: every length met in the bytes is checked against what is left first.
- The buffers given are held only during the call; results own their memory.
- Byte layouts come from layout.py; the constants below are checked against it at import.

This module does not decide anything: which batches to read, when to check a CRC, what to do about damage.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport PyUnicode_Decode
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from logcore.errors import CorruptBatchError, InvalidRecordError, InvalidTimestampError, RecordTooLargeError
from logcore.kernels import layout as _layout

cdef extern from *:
    """
    #include <string.h>
    #include <stdint.h>
    static inline uint16_t lc_be16(const unsigned char *p) { uint16_t v; memcpy(&v, p, 2); return __builtin_bswap16(v); }
    static inline uint32_t lc_be32(const unsigned char *p) { uint32_t v; memcpy(&v, p, 4); return __builtin_bswap32(v); }
    static inline uint64_t lc_be64(const unsigned char *p) { uint64_t v; memcpy(&v, p, 8); return __builtin_bswap64(v); }
    static inline void lc_put16(unsigned char *p, uint16_t v) { v = __builtin_bswap16(v); memcpy(p, &v, 2); }
    static inline void lc_put32(unsigned char *p, uint32_t v) { v = __builtin_bswap32(v); memcpy(p, &v, 4); }
    static inline void lc_put64(unsigned char *p, uint64_t v) { v = __builtin_bswap64(v); memcpy(p, &v, 8); }

    /* Zig-zag varints. A read returns the byte after the varint, or NULL when it is malformed or runs past end. */
    static inline const unsigned char *lc_read32(const unsigned char *p, const unsigned char *end, int32_t *out) {
        uint32_t value, shift; unsigned char byte;
        if (p >= end) return NULL;
        value = *p++;
        if (value < 0x80) { *out = (int32_t)(value >> 1) ^ -(int32_t)(value & 1); return p; }
        value &= 0x7f;
        for (shift = 7; shift < 35; shift += 7) {
            if (p >= end) return NULL;
            byte = *p++;
            value |= (uint32_t)(byte & 0x7f) << shift;
            if (byte < 0x80) { *out = (int32_t)(value >> 1) ^ -(int32_t)(value & 1); return p; }
        }
        return NULL;
    }
    static inline const unsigned char *lc_read64(const unsigned char *p, const unsigned char *end, int64_t *out) {
        uint64_t value; uint32_t shift; unsigned char byte;
        if (p >= end) return NULL;
        value = *p++;
        if (value < 0x80) { *out = (int64_t)(value >> 1) ^ -(int64_t)(value & 1); return p; }
        value &= 0x7f;
        for (shift = 7; shift < 70; shift += 7) {
            if (p >= end) return NULL;
            byte = *p++;
            value |= (uint64_t)(byte & 0x7f) << shift;
            if (byte < 0x80) { *out = (int64_t)(value >> 1) ^ -(int64_t)(value & 1); return p; }
        }
        return NULL;
    }
    static inline uint64_t lc_zigzag(int64_t n) { return ((uint64_t)n << 1) ^ (uint64_t)(n >> 63); }
    static inline int lc_size(uint64_t zigzag) {  /* bytes of a varint: ceil(bits / 7), one for zero */
        return zigzag < 0x80 ? 1 : (70 - __builtin_clzll(zigzag)) / 7;
    }
    static inline unsigned char *lc_write(unsigned char *p, uint64_t zigzag) {
        while (zigzag >= 0x80) { *p++ = (unsigned char)(zigzag | 0x80); zigzag >>= 7; }
        *p++ = (unsigned char)zigzag;
        return p;
    }
    /* Keys and values are mostly short, where a call of memcpy costs more than the copy: blocks of 16, the last one
       overlapping, so that nothing outside either range is touched. */
    static inline void lc_copy(unsigned char *to, const unsigned char *from, size_t size) {
        size_t at;
        if (size > 256) { memcpy(to, from, size); return; }
        if (size >= 16) {
            for (at = 0; at + 16 <= size; at += 16) memcpy(to + at, from + at, 16);
            memcpy(to + size - 16, from + size - 16, 16);
        } else if (size >= 8) { uint64_t a, b; memcpy(&a, from, 8); memcpy(&b, from + size - 8, 8);
            memcpy(to, &a, 8); memcpy(to + size - 8, &b, 8);
        } else for (at = 0; at < size; at++) to[at] = from[at];
    }
    /* Writes one v2 record. The length stands before fields whose size it counts, so its own width is guessed from
       the payload; the guess is wrong only at a border, and then the fields are moved by a byte. */
    static inline unsigned char *lc_write_record(unsigned char *p, int64_t timestamp_delta, int64_t offset_delta,
            const unsigned char *key, int64_t key_size, const unsigned char *value, int64_t value_size,
            int64_t header_count, const unsigned char *headers, int64_t headers_size) {
        int64_t payload = (key_size > 0 ? key_size : 0) + (value_size > 0 ? value_size : 0) + headers_size;
        int guess = lc_size(lc_zigzag(payload + 8)), width;
        unsigned char *start = p, *fields = p + guess;
        uint64_t length;
        p = fields;
        *p++ = 0;
        p = lc_write(p, lc_zigzag(timestamp_delta));
        p = lc_write(p, (uint64_t)offset_delta << 1);
        p = lc_write(p, lc_zigzag(key_size));
        if (key_size > 0) { lc_copy(p, key, key_size); p += key_size; }
        p = lc_write(p, lc_zigzag(value_size));
        if (value_size > 0) { lc_copy(p, value, value_size); p += value_size; }
        p = lc_write(p, (uint64_t)header_count << 1);
        if (headers_size) { memcpy(p, headers, headers_size); p += headers_size; }
        length = lc_zigzag(p - fields);
        width = lc_size(length);
        if (width != guess) { memmove(start + width, fields, p - fields); p += width - guess; }
        lc_write(start, length);
        return p;
    }
    """
    uint8_t *lc_write_record(uint8_t *p, int64_t timestamp_delta, int64_t offset_delta, const uint8_t *key, int64_t key_size,
                             const uint8_t *value, int64_t value_size, int64_t header_count, const uint8_t *headers,
                             int64_t headers_size) noexcept nogil
    uint16_t lc_be16(const uint8_t *p) noexcept nogil
    uint32_t lc_be32(const uint8_t *p) noexcept nogil
    uint64_t lc_be64(const uint8_t *p) noexcept nogil
    void lc_put16(uint8_t *p, uint16_t v) noexcept nogil
    void lc_put32(uint8_t *p, uint32_t v) noexcept nogil
    void lc_put64(uint8_t *p, uint64_t v) noexcept nogil
    const uint8_t *lc_read32(const uint8_t *p, const uint8_t *end, int32_t *out) noexcept nogil
    const uint8_t *lc_read64(const uint8_t *p, const uint8_t *end, int64_t *out) noexcept nogil
    uint64_t lc_zigzag(int64_t n) noexcept nogil
    int lc_size(uint64_t zigzag) noexcept nogil
    uint8_t *lc_write(uint8_t *p, uint64_t zigzag) noexcept nogil
    void lc_copy(uint8_t *to, const uint8_t *source, size_t size) noexcept nogil

cdef enum:
    HEADER_SIZE = 61
    LOG_OVERHEAD = 12
    PREFIX_SIZE = 17
    CRC_START = 21
    MIN_LENGTH = 14
    MIN_RECORD_SIZE = 7
    CODEC_MASK = 0x07
    APPEND_TIME_BIT = 0x08
    CONTROL_BIT = 0x20
    ROW_SIZE = 40
    INT32_LIMIT = 2147483647

cdef enum:
    WALK_END, WALK_LIMIT, WALK_SHORT, WALK_LENGTH, WALK_MAGIC, WALK_CRC, WALK_COUNT

cdef enum:
    BODY_OK, BODY_SHORT, BODY_VARINT, BODY_LENGTH, BODY_HEADERS, BODY_HEADER_KEY, BODY_SIZE, BODY_LEFT, BODY_COUNT

cdef struct Facts:
    int64_t position, base_offset, last_offset, base_timestamp, max_timestamp, producer_id
    int32_t size_bytes, partition_leader_epoch, base_sequence, record_count
    uint32_t crc
    int16_t producer_epoch, attributes
    int8_t magic

assert (HEADER_SIZE, LOG_OVERHEAD, PREFIX_SIZE, CRC_START, MIN_LENGTH, MIN_RECORD_SIZE, ROW_SIZE) == (
    _layout.HEADER_SIZE, _layout.LOG_OVERHEAD, _layout.PREFIX_SIZE, _layout.CRC_START, _layout.MIN_LENGTH,
    _layout.MIN_RECORD_SIZE, _layout.ROW_SIZE)
assert sizeof(Facts) == _layout.BATCH_FACTS.itemsize
assert (WALK_COUNT, BODY_COUNT) == (_layout.WALK_COUNT, _layout.BODY_COUNT)

NAME = "compiled"
cdef object _facts_dtype = _layout.BATCH_FACTS
cdef dict _body_reasons = _layout.BODY_REASONS
cdef tuple _no_headers = ()
cdef object _crc32c = None
cdef object _crc32 = None


@cython.final
@cython.no_gc  # it holds ints, bytes and tuples of those: nothing the cycle collector could ever free
@cython.freelist(1024)
cdef class Record:
    """One record as applications see it: layout.Record with the numbers kept as C integers (55 ns instead of 130).

    Behaves as that named tuple does: unpacks, compares and hashes as (offset, timestamp_ms, key, value, headers).
    """

    cdef readonly int64_t offset
    cdef readonly int64_t timestamp_ms
    cdef readonly bytes key
    cdef readonly bytes value
    cdef readonly tuple headers

    _fields = _layout.Record._fields
    __match_args__ = _layout.Record._fields

    def __init__(self, int64_t offset, int64_t timestamp_ms, bytes key, bytes value, tuple headers=()):
        self.offset = offset
        self.timestamp_ms = timestamp_ms
        self.key = key
        self.value = value
        self.headers = headers

    cdef tuple fields(self):
        return (self.offset, self.timestamp_ms, self.key, self.value, self.headers)

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.fields()[index]

    def __iter__(self):
        return iter(self.fields())

    def __hash__(self):
        return hash(self.fields())

    def __eq__(self, other):
        if isinstance(other, (Record, tuple)):
            return self.fields() == tuple(other)
        return NotImplemented

    def __repr__(self):
        return (f"Record(offset={self.offset!r}, timestamp_ms={self.timestamp_ms!r}, key={self.key!r}, "
                f"value={self.value!r}, headers={self.headers!r})")

    def __reduce__(self):
        return Record, self.fields()

    def _asdict(self):
        return dict(zip(self._fields, self.fields()))

    def _replace(self, **changes):
        return Record(**{**self._asdict(), **changes})


cdef uint32_t crc_of(const uint8_t *data, Py_ssize_t size) except? 0:
    # crc32c is loaded at first use: importing it takes 40-70 ms, as long as the rest of the package together.
    global _crc32c
    if _crc32c is None:
        from crc32c import crc32c as loaded
        _crc32c = loaded
    return _crc32c(PyMemoryView_FromMemory(<char *>data, size, 0x100))


cdef uint32_t legacy_crc_of(const uint8_t *data, Py_ssize_t size) except? 0:
    global _crc32
    if _crc32 is None:
        from zlib import crc32 as loaded
        _crc32 = loaded
    return _crc32(PyMemoryView_FromMemory(<char *>data, size, 0x100))


cdef void read_facts(const uint8_t *p, int64_t position, Facts *facts) noexcept nogil:
    """Decodes the head at p, which has HEADER_SIZE bytes (v2) or PREFIX_SIZE and a valid v0/v1 length."""
    facts.position = position
    facts.base_offset = <int64_t>lc_be64(p)
    facts.size_bytes = <int32_t>lc_be32(p + 8) + LOG_OVERHEAD
    facts.magic = <int8_t>p[16]
    if facts.magic >= 2:
        facts.partition_leader_epoch = <int32_t>lc_be32(p + 12)
        facts.crc = lc_be32(p + 17)
        facts.attributes = <int16_t>lc_be16(p + 21)
        facts.last_offset = <int64_t>(<uint64_t>facts.base_offset + <uint64_t><int64_t><int32_t>lc_be32(p + 23))
        facts.base_timestamp = <int64_t>lc_be64(p + 27)
        facts.max_timestamp = <int64_t>lc_be64(p + 35)
        facts.producer_id = <int64_t>lc_be64(p + 43)
        facts.producer_epoch = <int16_t>lc_be16(p + 51)
        facts.base_sequence = <int32_t>lc_be32(p + 53)
        facts.record_count = <int32_t>lc_be32(p + 57)
    else:
        facts.partition_leader_epoch = -1
        facts.crc = lc_be32(p + 12)
        facts.attributes = p[17]
        facts.last_offset = facts.base_offset
        facts.base_timestamp = -1
        if facts.magic == 1 and facts.size_bytes >= 26:
            facts.base_timestamp = <int64_t>lc_be64(p + 18)
        facts.max_timestamp = facts.base_timestamp
        facts.producer_id = -1
        facts.producer_epoch = -1
        facts.base_sequence = -1
        facts.record_count = -1


cdef int check_head(const uint8_t *p, int64_t left) noexcept nogil:
    """WALK_END when a whole batch of a known magic starts at p, else why not."""
    cdef int64_t length
    cdef int8_t magic
    if left < PREFIX_SIZE:
        return WALK_SHORT
    length = <int32_t>lc_be32(p + 8)
    if length < MIN_LENGTH:
        return WALK_LENGTH
    magic = <int8_t>p[16]
    if magic < 0 or magic > 2:
        return WALK_MAGIC
    if length + LOG_OVERHEAD > left:
        return WALK_SHORT
    if magic == 2 and length + LOG_OVERHEAD < HEADER_SIZE:
        return WALK_LENGTH
    return WALK_END


cdef int check_crc(const uint8_t *p) except -1:
    """WALK_END when the CRC of the whole batch at p is right, else WALK_CRC."""
    cdef Py_ssize_t size = <int32_t>lc_be32(p + 8) + LOG_OVERHEAD
    if p[16] == 2:
        return WALK_END if crc_of(p + CRC_START, size - CRC_START) == lc_be32(p + 17) else WALK_CRC
    return WALK_END if legacy_crc_of(p + 16, size - 16) == lc_be32(p + 12) else WALK_CRC


def walk(data, Py_ssize_t position, Py_ssize_t limit, Py_ssize_t max_batches, bint crc):
    """Walks batch heads. See plain.walk."""
    cdef Py_buffer view
    cdef Facts *facts
    cdef const uint8_t *base
    cdef Py_ssize_t count = 0
    cdef int why = WALK_END
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        # A batch has at least 26 bytes, which bounds what is allocated by what is there.
        max_batches = min(max_batches, (limit - position) // (LOG_OVERHEAD + MIN_LENGTH) + 1)
        if max_batches < 0:
            max_batches = 0
        found = np.empty(max_batches * sizeof(Facts), np.uint8)
        facts = <Facts *><size_t>found.__array_interface__["data"][0]
        while position < limit:
            if count == max_batches:
                why = WALK_LIMIT
                break
            why = check_head(base + position, limit - position)
            if why == WALK_END and crc:
                why = check_crc(base + position)
            if why != WALK_END:
                break
            read_facts(base + position, position, &facts[count])
            if facts[count].magic == 2 and (facts[count].record_count < 0 or facts[count].last_offset < facts[count].base_offset):
                why = WALK_COUNT
                break
            position += facts[count].size_bytes
            count += 1
    finally:
        PyBuffer_Release(&view)
    return found[: count * sizeof(Facts)].view(_facts_dtype), position, why


def find_batch(data, Py_ssize_t position, Py_ssize_t limit, int64_t offset):
    """Position of the first whole batch whose last offset is at or after offset. See plain.find_batch."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return seek(<const uint8_t *>view.buf, position, min(limit, view.len), offset)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t seek(const uint8_t *base, Py_ssize_t position, Py_ssize_t limit, int64_t offset) noexcept nogil:
    cdef const uint8_t *p
    cdef int64_t last
    while position < limit:
        p = base + position
        if check_head(p, limit - position) != WALK_END:
            return position
        last = <int64_t>lc_be64(p)
        if p[16] == 2:
            last += <int32_t>lc_be32(p + 23)
        if last >= offset:
            return position
        position += <int32_t>lc_be32(p + 8) + LOG_OVERHEAD
    return limit


def plan_run(data, Py_ssize_t position, Py_ssize_t limit, Py_ssize_t max_rows, Py_ssize_t max_bytes, int64_t end_offset):
    """The longest run of plain data batches at position. See plain.plan_run."""
    cdef Py_buffer view
    cdef Facts facts
    cdef const uint8_t *base
    cdef Py_ssize_t start = position
    cdef Py_ssize_t rows = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        while position < limit and check_head(base + position, limit - position) == WALK_END and base[position + 16] == 2:
            read_facts(base + position, position, &facts)
            if facts.attributes & (CODEC_MASK | CONTROL_BIT) or facts.last_offset >= end_offset:
                break
            if facts.record_count < 0 or facts.record_count > (facts.size_bytes - HEADER_SIZE) // MIN_RECORD_SIZE:
                break
            if position > start and (rows + facts.record_count > max_rows or position + facts.size_bytes - start > max_bytes):
                break
            rows += facts.record_count
            position += facts.size_bytes
        return position, rows
    finally:
        PyBuffer_Release(&view)


cdef struct Columns:
    int64_t *offsets
    int64_t *timestamps_ms
    int32_t *key_positions
    int32_t *key_sizes
    int32_t *value_positions
    int32_t *value_sizes
    int32_t *header_positions
    int32_t *header_counts


cdef void lay_out(Columns *columns, char *block, Py_ssize_t rows) noexcept nogil:
    columns.offsets = <int64_t *>block
    columns.timestamps_ms = <int64_t *>(block + 8 * rows)
    columns.key_positions = <int32_t *>(block + 16 * rows)
    columns.key_sizes = <int32_t *>(block + 20 * rows)
    columns.value_positions = <int32_t *>(block + 24 * rows)
    columns.value_sizes = <int32_t *>(block + 28 * rows)
    columns.header_positions = <int32_t *>(block + 32 * rows)
    columns.header_counts = <int32_t *>(block + 36 * rows)


cdef int skip_headers(const uint8_t *p, const uint8_t *end, int32_t count) noexcept nogil:
    """BODY_OK when exactly count headers fill p to end."""
    cdef int32_t size
    while count > 0:
        p = lc_read32(p, end, &size)
        if p == NULL:
            return BODY_VARINT
        if size < 0:
            return BODY_HEADER_KEY
        if size > end - p:
            return BODY_LENGTH
        p = lc_read32(p + size, end, &size)
        if p == NULL:
            return BODY_VARINT
        if size > 0:
            if size > end - p:
                return BODY_LENGTH
            p += size
        count -= 1
    return BODY_OK if p == end else BODY_SIZE


cdef struct Row:
    int64_t timestamp_delta
    const uint8_t *key
    const uint8_t *value
    const uint8_t *headers
    int32_t offset_delta, key_size, value_size, header_count


cdef int read_row(const uint8_t **cursor, const uint8_t *end, Row *row) noexcept nogil:
    """Reads one record at the cursor and moves it on. BODY_OK or what is wrong."""
    cdef int32_t length
    cdef const uint8_t *p = cursor[0]
    cdef const uint8_t *stop
    if p >= end:
        return BODY_SHORT
    p = lc_read32(p, end, &length)
    if p == NULL:
        return BODY_VARINT
    if length < 0 or length > end - p:
        return BODY_LENGTH
    stop = p + length
    if p >= stop:
        return BODY_SIZE
    p += 1  # record attributes carry nothing, whatever they say
    p = lc_read64(p, stop, &row.timestamp_delta)
    if p == NULL:
        return BODY_VARINT
    p = lc_read32(p, stop, &row.offset_delta)
    if p == NULL:
        return BODY_VARINT
    p = lc_read32(p, stop, &row.key_size)
    if p == NULL:
        return BODY_VARINT
    if row.key_size > stop - p:
        return BODY_LENGTH
    row.key = p
    if row.key_size < 0:
        row.key_size = -1
    else:
        p += row.key_size
    p = lc_read32(p, stop, &row.value_size)
    if p == NULL:
        return BODY_VARINT
    if row.value_size > stop - p:
        return BODY_LENGTH
    row.value = p
    if row.value_size < 0:
        row.value_size = -1
    else:
        p += row.value_size
    p = lc_read32(p, stop, &row.header_count)
    if p == NULL:
        return BODY_VARINT
    row.headers = p
    cursor[0] = stop
    if row.header_count == 0:
        return BODY_OK if p == stop else BODY_SIZE
    if row.header_count < 0 or row.header_count > stop - p:
        return BODY_HEADERS
    return skip_headers(p, stop, row.header_count)


cdef int fill(Columns *columns, Py_ssize_t at, const uint8_t *base, const uint8_t *p, const uint8_t *end,
              const Facts *facts) noexcept nogil:
    """Decodes the records of one batch into the rows from at on."""
    cdef Row row
    cdef int wrong
    cdef Py_ssize_t stop = at + facts.record_count
    cdef bint append_time = facts.attributes & APPEND_TIME_BIT
    while at < stop:
        wrong = read_row(&p, end, &row)
        if wrong:
            return wrong
        columns.offsets[at] = <int64_t>(<uint64_t>facts.base_offset + <uint64_t><int64_t>row.offset_delta)
        columns.timestamps_ms[at] = facts.max_timestamp if append_time else <int64_t>(
            <uint64_t>facts.base_timestamp + <uint64_t>row.timestamp_delta)
        columns.key_positions[at] = <int32_t>(row.key - base)
        columns.key_sizes[at] = row.key_size
        columns.value_positions[at] = <int32_t>(row.value - base)
        columns.value_sizes[at] = row.value_size
        columns.header_positions[at] = <int32_t>(row.headers - base)
        columns.header_counts[at] = row.header_count
        at += 1
    return BODY_OK if p == end else BODY_LEFT


cdef object bad_body(int wrong, path, Py_ssize_t position):
    return InvalidRecordError(_body_reasons[wrong], path=path, position=position)


cdef int check_whole(const uint8_t *base, Py_ssize_t position, Py_ssize_t limit, Facts *facts, path) except -1:
    """Head, CRC and record count of the v2 batch at position; raises when one is wrong."""
    cdef const uint8_t *p = base + position
    cdef int why = check_head(p, limit - position)
    cdef uint32_t crc
    if why != WALK_END:
        raise CorruptBatchError(_layout.WALK_REASONS[why], path=path, position=position)
    read_facts(p, position, facts)
    crc = crc_of(p + CRC_START, facts.size_bytes - CRC_START)
    if crc != facts.crc:
        raise CorruptBatchError("CRC-32C does not match", path=path, position=position,
                                expected=f"{facts.crc:#010x}", found=f"{crc:#010x}")
    return 0


def decode_columns(data, Py_ssize_t position, Py_ssize_t limit, block, Py_ssize_t rows, path=None):
    """Decodes a run of plain batches into a block of columns, CRC checked. See plain.decode_columns."""
    cdef Py_buffer view, target
    cdef Columns columns
    cdef Facts facts
    cdef const uint8_t *base
    cdef Py_ssize_t at = 0
    cdef int wrong
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(block, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            assert target.len >= rows * ROW_SIZE, "the block holds its rows"
            lay_out(&columns, <char *>target.buf, rows)
            base = <const uint8_t *>view.buf
            limit = min(limit, view.len)
            while position < limit:
                check_whole(base, position, limit, &facts, path)
                if facts.record_count < 0 or facts.record_count > rows - at:
                    raise bad_body(BODY_COUNT, path, position)
                wrong = fill(&columns, at, base, base + position + HEADER_SIZE, base + position + facts.size_bytes, &facts)
                if wrong:
                    raise bad_body(wrong, path, position)
                at += facts.record_count
                position += facts.size_bytes
            return at
        finally:
            PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&view)


cdef void body_facts(Facts *facts, int32_t count, int64_t base_offset, int64_t base_timestamp, append_timestamp):
    facts.record_count = count
    facts.base_offset = base_offset
    facts.base_timestamp = base_timestamp
    facts.attributes = 0
    if append_timestamp is not None:
        facts.attributes = APPEND_TIME_BIT
        facts.max_timestamp = append_timestamp


def decode_body_columns(body, int32_t count, int64_t base_offset, int64_t base_timestamp, append_timestamp, block,
                        path=None, position=None):
    """Decodes inflated records into a block of columns. See plain.decode_body_columns."""
    cdef Py_buffer view, target
    cdef Columns columns
    cdef Facts facts
    cdef int wrong
    body_facts(&facts, count, base_offset, base_timestamp, append_timestamp)
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        if count < 0 or count > view.len // MIN_RECORD_SIZE:
            raise InvalidRecordError(_body_reasons[BODY_COUNT], path=path, position=position)
        PyObject_GetBuffer(block, &target, PyBUF_SIMPLE | PyBUF_WRITABLE)
        try:
            assert target.len >= count * ROW_SIZE, "the block holds its rows"
            lay_out(&columns, <char *>target.buf, count)
            wrong = fill(&columns, 0, <const uint8_t *>view.buf, <const uint8_t *>view.buf,
                         <const uint8_t *>view.buf + view.len, &facts)
        finally:
            PyBuffer_Release(&target)
        if wrong:
            raise InvalidRecordError(_body_reasons[wrong], path=path, position=position)
    finally:
        PyBuffer_Release(&view)


cdef tuple read_headers(const uint8_t *p, const uint8_t *end, int32_t count):
    """The headers that skip_headers has found sound."""
    cdef list headers = []
    cdef int32_t size
    while count > 0:
        p = lc_read32(p, end, &size)
        name = PyUnicode_Decode(<char *>p, size, "utf-8", "surrogateescape")
        p = lc_read32(p + size, end, &size)
        if size < 0:
            headers.append((name, None))
        else:
            headers.append((name, PyBytes_FromStringAndSize(<char *>p, size)))
            p += size
        count -= 1
    return tuple(headers)


cdef Record build_record(const Row *row, const Facts *facts, const uint8_t *end):
    cdef Record record = Record.__new__(Record)
    record.offset = <int64_t>(<uint64_t>facts.base_offset + <uint64_t><int64_t>row.offset_delta)
    if facts.attributes & APPEND_TIME_BIT:
        record.timestamp_ms = facts.max_timestamp
    else:
        record.timestamp_ms = <int64_t>(<uint64_t>facts.base_timestamp + <uint64_t>row.timestamp_delta)
    record.key = None if row.key_size < 0 else PyBytes_FromStringAndSize(<char *>row.key, row.key_size)
    record.value = None if row.value_size < 0 else PyBytes_FromStringAndSize(<char *>row.value, row.value_size)
    record.headers = _no_headers if row.header_count == 0 else read_headers(row.headers, end, row.header_count)
    return record


cdef int append_objects(list records, const uint8_t *p, const uint8_t *end, const Facts *facts) except -1:
    cdef Row row
    cdef int wrong
    cdef int32_t left = facts.record_count
    while left > 0:
        wrong = read_row(&p, end, &row)
        if wrong:
            return wrong
        records.append(build_record(&row, facts, p))
        left -= 1
    return BODY_OK if p == end else BODY_LEFT


def decode_objects(data, Py_ssize_t position, Py_ssize_t limit, path=None):
    """Decodes a run of plain batches to a list of Record, CRC checked. See plain.decode_objects."""
    cdef Py_buffer view
    cdef Facts facts
    cdef const uint8_t *base
    cdef list records = []
    cdef int wrong
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        while position < limit:
            check_whole(base, position, limit, &facts, path)
            if facts.record_count < 0 or facts.record_count > (facts.size_bytes - HEADER_SIZE) // MIN_RECORD_SIZE:
                raise bad_body(BODY_COUNT, path, position)
            wrong = append_objects(records, base + position + HEADER_SIZE, base + position + facts.size_bytes, &facts)
            if wrong:
                raise bad_body(wrong, path, position)
            position += facts.size_bytes
        return records
    finally:
        PyBuffer_Release(&view)


def decode_body_objects(body, int32_t count, int64_t base_offset, int64_t base_timestamp, append_timestamp, path=None,
                        position=None):
    """Decodes inflated records to a list of Record. See plain.decode_body_objects."""
    cdef Py_buffer view
    cdef Facts facts
    cdef list records = []
    cdef int wrong
    body_facts(&facts, count, base_offset, base_timestamp, append_timestamp)
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        if count < 0 or count > view.len // MIN_RECORD_SIZE:
            raise InvalidRecordError(_body_reasons[BODY_COUNT], path=path, position=position)
        wrong = append_objects(records, <const uint8_t *>view.buf, <const uint8_t *>view.buf + view.len, &facts)
        if wrong:
            raise InvalidRecordError(_body_reasons[wrong], path=path, position=position)
        return records
    finally:
        PyBuffer_Release(&view)


def read_one(data, Py_ssize_t position, Py_ssize_t limit, int64_t offset, path=None):
    """The first record at or after offset if a plain batch holds it, else the position to go on at. See plain.read_one."""
    cdef Py_buffer view
    cdef Facts facts
    cdef Row row
    cdef const uint8_t *base
    cdef const uint8_t *p
    cdef const uint8_t *end
    cdef int wrong
    cdef int32_t left
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        position = seek(base, position, limit, offset)
        if position >= limit or check_head(base + position, limit - position) != WALK_END or base[position + 16] != 2:
            return position
        if lc_be16(base + position + CRC_START) & (CODEC_MASK | CONTROL_BIT):
            return position
        check_whole(base, position, limit, &facts, path)
        p = base + position + HEADER_SIZE
        end = base + position + facts.size_bytes
        left = facts.record_count
        while left > 0:
            wrong = read_row(&p, end, &row)
            if wrong:
                raise bad_body(wrong, path, position)
            if facts.base_offset + row.offset_delta >= offset:
                return build_record(&row, &facts, p)
            left -= 1
        return position + facts.size_bytes
    finally:
        PyBuffer_Release(&view)


def search_offsets(data, Py_ssize_t count, int32_t target):
    """Slot of the greatest offset index entry at or below target, else -1. See plain.search_offsets."""
    cdef Py_buffer view
    cdef Py_ssize_t low = 0, middle
    cdef const uint8_t *base
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    base = <const uint8_t *>view.buf
    count = min(count, view.len // 8)
    while low < count:
        middle = (low + count) >> 1
        if <int32_t>lc_be32(base + middle * 8) <= target:
            low = middle + 1
        else:
            count = middle
    PyBuffer_Release(&view)
    return low - 1


def start_position(index, Py_ssize_t entries, data, Py_ssize_t limit, int64_t base_offset, int64_t offset):
    """Where to start looking for offset in a segment. See plain.start_position."""
    cdef Py_buffer view
    cdef Facts facts
    cdef const uint8_t *base
    cdef const uint8_t *entry
    cdef int64_t before = -1, relative
    cdef Py_ssize_t position
    cdef Py_ssize_t slot = search_offsets(index, entries, <int32_t>min(offset - base_offset, <int64_t>INT32_LIMIT))
    if slot < 0:
        return 0
    PyObject_GetBuffer(index, &view, PyBUF_SIMPLE)
    entry = <const uint8_t *>view.buf + slot * 8
    relative = <int32_t>lc_be32(entry)
    position = <int32_t>lc_be32(entry + 4)
    if slot:
        before = <int32_t>lc_be32(entry - 8)
    PyBuffer_Release(&view)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        if 0 < position < limit and check_head(base + position, limit - position) == WALK_END:
            read_facts(base + position, position, &facts)
            if facts.magic == 2 and (facts.record_count < 0 or facts.last_offset < facts.base_offset):
                return 0
            if before < facts.last_offset - base_offset <= relative:
                return position
        return 0
    finally:
        PyBuffer_Release(&view)


def search_times(data, Py_ssize_t count, int64_t target):
    """Slot of the greatest time index entry at or below target, else -1. See plain.search_times."""
    cdef Py_buffer view
    cdef Py_ssize_t low = 0, middle
    cdef const uint8_t *base
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    base = <const uint8_t *>view.buf
    count = min(count, view.len // 12)
    while low < count:
        middle = (low + count) >> 1
        if <int64_t>lc_be64(base + middle * 12) <= target:
            low = middle + 1
        else:
            count = middle
    PyBuffer_Release(&view)
    return low - 1


def gather(data, positions, sizes):
    """Copies scattered pieces behind each other. See plain.gather."""
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const int32_t[::1] where = positions
    cdef const int32_t[::1] sized = sizes
    cdef Py_ssize_t count = where.shape[0], slot
    cdef int64_t total = 0, at = 0
    offsets = np.empty(count + 1, np.int32)
    cdef int32_t[::1] starts = offsets
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        for slot in range(count):
            if sized[slot] > 0:
                if where[slot] < 0 or where[slot] > view.len - sized[slot]:
                    raise ValueError("a piece lies outside the data")
                total += sized[slot]
        if total > INT32_LIMIT:
            raise ValueError("more than 2^31-1 bytes in one chunk")
        pieces = np.empty(total, np.uint8)
        if total:
            target = <uint8_t *><size_t>pieces.__array_interface__["data"][0]
            for slot in range(count):
                starts[slot] = <int32_t>at
                if sized[slot] > 0:
                    lc_copy(target + at, base + where[slot], sized[slot])
                    at += sized[slot]
        else:
            offsets[:] = 0
        starts[count] = <int32_t>at
        return offsets, pieces
    finally:
        PyBuffer_Release(&view)


cdef struct Head:
    int64_t base_offset, base_timestamp, max_timestamp, producer_id, now_ms
    int32_t leader_epoch, base_sequence
    int16_t producer_epoch, attributes
    Py_ssize_t batch_bytes, max_bytes


cdef class _Writer:
    """The growing output of one encode call: batches one after the other in a bytearray owned by the caller."""

    cdef bytearray out
    cdef uint8_t *base
    cdef Py_ssize_t capacity, start, at
    cdef int32_t count
    cdef Head head
    cdef object compress
    cdef list batches

    cdef int open(self, bytearray out, Head *head, compress) except -1:
        self.out = out
        self.base = <uint8_t *>PyByteArray_AS_STRING(out)
        self.capacity = PyByteArray_GET_SIZE(out)
        self.start = 0
        self.at = HEADER_SIZE
        self.count = 0
        self.head = head[0]
        self.compress = compress
        self.batches = []
        return 0

    cdef int reserve(self, Py_ssize_t size) except -1:
        """Room for size more bytes behind at. The buffer keeps its length between calls, so growth is rare."""
        if self.at + size > self.capacity:
            self.capacity = max(2 * self.capacity, self.at + size + 4096)
            PyByteArray_Resize(self.out, self.capacity)
            self.base = <uint8_t *>PyByteArray_AS_STRING(self.out)
        return 0

    cdef int finish(self) except -1:
        """Compresses and heads the open batch, and starts the next one behind it."""
        cdef uint8_t *p
        cdef Py_ssize_t size
        cdef int64_t last
        if self.count == 0:
            return 0
        if self.compress is not None:
            packed = self.compress(PyMemoryView_FromMemory(
                <char *>self.base + self.start + HEADER_SIZE, self.at - self.start - HEADER_SIZE, 0x100))
            self.at = self.start + HEADER_SIZE
            self.reserve(len(packed))
            memcpy(self.base + self.at, PyBytes_AS_STRING(packed), PyBytes_GET_SIZE(packed))
            self.at += PyBytes_GET_SIZE(packed)
        size = self.at - self.start
        if size > self.head.max_bytes:
            raise RecordTooLargeError("batch is larger than max.message.bytes", expected=f"at most {self.head.max_bytes} bytes",
                                      found=f"{size} bytes")
        p = self.base + self.start
        last = self.head.base_offset + self.count - 1
        lc_put64(p, <uint64_t>self.head.base_offset)
        lc_put32(p + 8, <uint32_t>(size - LOG_OVERHEAD))
        lc_put32(p + 12, <uint32_t>self.head.leader_epoch)
        p[16] = 2
        lc_put16(p + 21, <uint16_t>self.head.attributes)
        lc_put32(p + 23, <uint32_t>(self.count - 1))
        lc_put64(p + 27, <uint64_t>self.head.base_timestamp)
        if self.head.attributes & APPEND_TIME_BIT:
            self.head.max_timestamp = self.head.now_ms
        lc_put64(p + 35, <uint64_t>self.head.max_timestamp)
        lc_put64(p + 43, <uint64_t>self.head.producer_id)
        lc_put16(p + 51, <uint16_t>self.head.producer_epoch)
        lc_put32(p + 53, <uint32_t>self.head.base_sequence)
        lc_put32(p + 57, <uint32_t>self.count)
        lc_put32(p + 17, crc_of(p + CRC_START, size - CRC_START))
        self.batches.append((self.start, size, last, self.head.max_timestamp))
        if self.head.base_sequence >= 0:
            self.head.base_sequence = <int32_t>((<int64_t>self.head.base_sequence + self.count) & INT32_LIMIT)
        self.head.base_offset = last + 1
        self.start = self.at
        self.at += HEADER_SIZE
        self.count = 0
        return 0

    cdef int begin(self, int64_t timestamp, Py_ssize_t payload, Py_ssize_t index) except -1:
        """Opens a batch for a record of about payload bytes, closing the one that would get too large."""
        cdef Py_ssize_t size = payload + 41  # at most 21 of overhead without headers, rounded up for the count
        if timestamp < -1:
            raise InvalidTimestampError(f"record {index}: a timestamp is -1 or at least 0", found=timestamp)
        if self.count and (self.at - self.start + size > self.head.batch_bytes or self.count == INT32_LIMIT):
            self.finish()
        if payload > self.head.max_bytes and self.compress is None:
            raise RecordTooLargeError(f"record {index} is larger than max.message.bytes",
                                      expected=f"at most {self.head.max_bytes} bytes", found=f"{payload} bytes")
        if payload > INT32_LIMIT - 2 * HEADER_SIZE - 41:
            raise RecordTooLargeError(f"record {index} is larger than a batch can be", found=f"{payload} bytes")
        if self.count == 0:
            self.reserve(size + HEADER_SIZE)
            self.head.base_timestamp = timestamp
            self.head.max_timestamp = timestamp
        else:
            self.reserve(size)
            if timestamp > self.head.max_timestamp:
                self.head.max_timestamp = timestamp
        return 0

    cdef void put(self, int64_t timestamp, const uint8_t *key, Py_ssize_t key_size, const uint8_t *value,
                  Py_ssize_t value_size, Py_ssize_t header_count, const uint8_t *headers, Py_ssize_t headers_size) noexcept:
        """Writes one record; begin has made the room."""
        self.at = lc_write_record(self.base + self.at, timestamp - self.head.base_timestamp, self.count, key, key_size, value,
                                  value_size, header_count, headers, headers_size) - self.base
        self.count += 1


cdef bytes as_bytes(value, str what, Py_ssize_t index):
    """Bytes of any buffer; text is refused, because guessing an encoding would change data."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidRecordError(f"record {index}: {what} must be bytes or None", expected="bytes", found=type(value).__name__)


cdef bytes pack_headers(headers, Py_ssize_t index):
    cdef bytearray packed = bytearray()
    cdef uint8_t scratch[10]
    for header in headers:
        try:
            name, value = header
        except (TypeError, ValueError):
            raise InvalidRecordError(f"record {index}: a header is a (name, value) pair", found=repr(header)) from None
        if not isinstance(name, str):
            raise InvalidRecordError(f"record {index}: a header name must be str", found=type(name).__name__)
        try:
            raw = (<str>name).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise InvalidRecordError(f"record {index}: a header name cannot be encoded as UTF-8") from error
        packed += PyBytes_FromStringAndSize(<char *>scratch, lc_write(scratch, lc_zigzag(len(raw))) - scratch)
        packed += raw
        if value is None:
            packed.append(1)
        else:
            raw = as_bytes(value, "a header value", index)
            packed += PyBytes_FromStringAndSize(<char *>scratch, lc_write(scratch, lc_zigzag(len(raw))) - scratch)
            packed += raw
    return bytes(packed)


cdef int fill_head(Head *head, int64_t base_offset, int32_t leader_epoch, int64_t now_ms, Py_ssize_t batch_bytes,
                   Py_ssize_t max_bytes, int16_t attributes, int64_t producer_id, int16_t producer_epoch,
                   int32_t base_sequence) except -1:
    head.base_offset = base_offset
    head.leader_epoch = leader_epoch
    head.now_ms = now_ms
    head.batch_bytes = batch_bytes
    head.max_bytes = min(max_bytes, INT32_LIMIT)
    head.attributes = attributes
    head.producer_id = producer_id
    head.producer_epoch = producer_epoch
    head.base_sequence = base_sequence
    return 0


def encode_records(bytearray out, records, int64_t base_offset, int32_t leader_epoch, int64_t now_ms, Py_ssize_t batch_bytes,
                   Py_ssize_t max_bytes, int16_t attributes=0, int64_t producer_id=-1, int16_t producer_epoch=-1,
                   int32_t base_sequence=-1, compress=None, bint require_key=False):
    """Encodes (key, value[, headers[, timestamp_ms]]) tuples into batches. See plain.encode_records."""
    cdef Head head
    cdef _Writer writer = _Writer.__new__(_Writer)
    cdef Py_ssize_t index = 0, fields, header_count, headers_size, key_size, value_size
    cdef int64_t timestamp
    cdef const uint8_t *key_at
    cdef const uint8_t *value_at
    cdef const uint8_t *headers_at
    cdef tuple row
    cdef bytes packed
    fill_head(&head, base_offset, leader_epoch, now_ms, batch_bytes, max_bytes, attributes, producer_id, producer_epoch,
              base_sequence)
    writer.open(out, &head, compress)
    for record in records:
        try:
            row = <tuple>record if type(record) is tuple else tuple(record)
        except TypeError:
            raise InvalidRecordError(f"record {index}: give (key, value[, headers[, timestamp_ms]])",
                                     found=type(record).__name__) from None
        fields = PyTuple_GET_SIZE(row)
        if fields < 2 or fields > 4:
            raise InvalidRecordError(f"record {index}: give (key, value[, headers[, timestamp_ms]])", expected="2 to 4 fields",
                                     found=fields)
        key = <object>PyTuple_GET_ITEM(row, 0)
        value = <object>PyTuple_GET_ITEM(row, 1)
        if key is None:
            if require_key:
                raise InvalidRecordError(f"record {index}: a compacted topic takes no record without a key")
            key_size = -1
            key_at = NULL
        else:
            if not PyBytes_CheckExact(key):
                key = as_bytes(key, "a key", index)
            key_size = PyBytes_GET_SIZE(key)
            key_at = <const uint8_t *>PyBytes_AS_STRING(key)
        if value is None:
            value_size = -1
            value_at = NULL
        else:
            if not PyBytes_CheckExact(value):
                value = as_bytes(value, "a value", index)
            value_size = PyBytes_GET_SIZE(value)
            value_at = <const uint8_t *>PyBytes_AS_STRING(value)
        timestamp = now_ms
        header_count = headers_size = 0
        headers_at = NULL
        if fields > 2:
            headers = <object>PyTuple_GET_ITEM(row, 2)
            if headers is not None and headers is not _no_headers:
                headers = tuple(headers)
                header_count = PyTuple_GET_SIZE(headers)
                packed = pack_headers(headers, index)
                headers_size = PyBytes_GET_SIZE(packed)
                headers_at = <const uint8_t *>PyBytes_AS_STRING(packed)
            if fields > 3:
                given = <object>PyTuple_GET_ITEM(row, 3)
                if given is not None:
                    try:
                        timestamp = given
                    except (TypeError, OverflowError) as error:
                        raise InvalidTimestampError(f"record {index}: a timestamp is an int of milliseconds", found=repr(given)) from error
        writer.begin(timestamp, max(key_size, 0) + max(value_size, 0) + headers_size, index)
        writer.put(timestamp, key_at, key_size, value_at, value_size, header_count, headers_at, headers_size)
        index += 1
    writer.finish()
    return writer.start, writer.batches


def encode_columns(bytearray out, keys, values, timestamps_ms, Py_ssize_t count, int64_t base_offset, int32_t leader_epoch,
                   int64_t now_ms, Py_ssize_t batch_bytes, Py_ssize_t max_bytes, int16_t attributes=0, int64_t producer_id=-1,
                   int16_t producer_epoch=-1, int32_t base_sequence=-1, compress=None, bint require_key=False):
    """Encodes columns into batches. See plain.encode_columns."""
    cdef Head head
    cdef _Writer writer = _Writer.__new__(_Writer)
    cdef Py_ssize_t index, key_size, value_size
    cdef int64_t timestamp
    cdef const uint8_t[::1] key_data, value_data
    cdef const int64_t[::1] key_offsets, value_offsets, timestamps
    cdef const uint8_t[::1] key_nulls, value_nulls
    cdef bint have_keys = keys is not None, have_values = values is not None, have_times = timestamps_ms is not None
    cdef bint have_key_nulls = False, have_value_nulls = False
    cdef const uint8_t *key_base = NULL
    cdef const uint8_t *value_base = NULL
    fill_head(&head, base_offset, leader_epoch, now_ms, batch_bytes, max_bytes, attributes, producer_id, producer_epoch,
              base_sequence)
    writer.open(out, &head, compress)
    if have_keys:
        key_data, key_offsets = keys[0], keys[1]
        have_key_nulls = keys[2] is not None
        if have_key_nulls:
            key_nulls = keys[2]
        if key_data.shape[0]:
            key_base = &key_data[0]
    if have_values:
        value_data, value_offsets = values[0], values[1]
        have_value_nulls = values[2] is not None
        if have_value_nulls:
            value_nulls = values[2]
        if value_data.shape[0]:
            value_base = &value_data[0]
    if have_times:
        timestamps = timestamps_ms
    for index in range(count):
        key_size = -1
        value_size = -1
        if have_keys and not (have_key_nulls and key_nulls[index]):
            key_size = key_offsets[index + 1] - key_offsets[index]
        elif require_key:
            raise InvalidRecordError(f"record {index}: a compacted topic takes no record without a key")
        if have_values and not (have_value_nulls and value_nulls[index]):
            value_size = value_offsets[index + 1] - value_offsets[index]
        timestamp = timestamps[index] if have_times else now_ms
        writer.begin(timestamp, max(key_size, 0) + max(value_size, 0), index)
        writer.put(timestamp, key_base + key_offsets[index] if key_size > 0 else NULL, key_size,
                   value_base + value_offsets[index] if value_size > 0 else NULL, value_size, 0, NULL, 0)
    writer.finish()
    return writer.start, writer.batches
