"""The quick way to one record: LogReader.get(), compiled. A part of _compiled.pyx, which includes it.

reader.py and segment.py are the slow way and the rule book. The quick way answers where the offset lies in a segment that
is held, in a plain batch, and where no gaps are; for everything else, damage too, it returns None, and the slow way
looks again and says what it finds. It holds the interpreter's lock throughout, and allocates nothing but the record.

A segment is held (Segment.held) once the slow way has read from it: its mapping, and its offset index. Held keeps the
memory of both, and which batches were checked:

- The CRC of a batch is checked the first time that it is read, and not again for as long as the segment object lives.
  Noted is the exact position: a batch that begins elsewhere, by a forged index or length, is not passed for the one
  checked. Of the batches that begin in the same 4 KiB only the last reaches beyond them, and only that one is noted: a
  batch that lies within them is checked each time, 0.2 us at most.
- The third read notes where the records of the batch begin, in a byte for each 64 bytes of the file, and later reads find
  theirs from there. The first two take no such notes: reads all over a log of 8 GB seldom meet a batch again, and each
  would pay for a fault of the page of the notes, 8 us in place of 6.
- A record is found from one before it that is near, by where it would be if all were as long: of 120 records two or
  three are passed over, and not 8 KiB of them on average fetched from memory. Whether the place was right the offset
  of the record says; where it is not, the slow way reads all.
- What this writer has appended itself, in this life of the segment, needs no check: it has never been anywhere else.
- A page that was checked may turn to zeros later, when another program shortens the file or the disk fails to give the
  page again (guard_mapping). The handler counts that, for all mappings. Segments that were held before go the slow way
  from then on, also where it happens in the middle of a get; of those held later each batch is checked once.

Costs, of batches of 16 KiB with records of 116 bytes: 0.2 us where the slow way takes 2.6, half of it the CRC, and 5.1
for the segment that is written, which it reads with pread. The first and the third read from a batch cost 2 us each.
"""


cdef enum:
    PAGE_BITS = 12
    PAGE_MASK = (1 << PAGE_BITS) - 1
    ONE_READ = 1 << (PAGE_BITS + 1)  # a note of a batch is the reads from it, up to READS_TO_NOTE, above its place
    READS_TO_NOTE = 3
    NEAR_RECORDS = 8
    NEAR_STEPS = 64


@cython.final
cdef class Held:
    """See the top of this file. Made by hold()."""

    cdef Py_buffer data
    cdef bint has_data
    cdef object index
    cdef int64_t own_from
    cdef long faults
    cdef uint8_t *records  # one for each 64 bytes: 1 and where in them the first noted record begins, or 0
    cdef uint16_t *batches  # one for each 4 KiB: 1 and where in them the checked batch begins, and its reads, or 0

    def __dealloc__(self):
        free(self.records)
        free(self.batches)
        if self.has_data:
            PyBuffer_Release(&self.data)

    @property
    def size_bytes(self):
        """How much of the file is mapped."""
        return self.data.len

    cdef object get(self, int64_t base_offset, int64_t offset, Py_ssize_t limit, int64_t end_offset):
        """What should be the record at an offset; None where the slow way has to look."""
        cdef Py_buffer entries
        cdef Facts facts
        cdef Row row
        cdef const uint8_t *base = <const uint8_t *>self.data.buf
        cdef const uint8_t *p
        cdef const uint8_t *end
        cdef Py_ssize_t position
        cdef int64_t left
        cdef int reads
        PyObject_GetBuffer(self.index.data, &entries, PyBUF_SIMPLE)
        position = start(&entries, entries.len // 8, base, limit, base_offset, offset)
        PyBuffer_Release(&entries)
        position = seek(base, position, limit, offset)
        if position >= limit or check_head(base + position, limit - position) != WALK_END or base[position + 16] != 2:
            return None
        read_facts(base + position, position, &facts)
        left = offset - facts.base_offset
        if (facts.attributes & (CODEC_MASK | CONTROL_BIT) or not 0 <= left < facts.record_count
                or facts.record_count > (facts.size_bytes - HEADER_SIZE) // MIN_RECORD_SIZE
                or facts.last_offset - facts.base_offset != facts.record_count - 1
                or not is_followed(base, position + facts.size_bytes, limit, facts.last_offset, end_offset, True)):
            return None
        reads = self.reads_of(&facts)
        if reads == 0 and position < self.own_from:
            check_whole(base, position, limit, &facts, None)
        if reads < READS_TO_NOTE:
            reads = self.count_read(base, &facts, reads)
        p = base + position + HEADER_SIZE
        if reads == READS_TO_NOTE:
            p = self.near(base, &facts, &left)
        end = base + position + facts.size_bytes
        p = lc_skip(p, end, left)
        if p == NULL or read_row(&p, end, &row, False) != BODY_OK:
            return None
        return build_record(&row, &facts, p)

    cdef int reads_of(self, const Facts *facts) noexcept:
        """How often the batch was read, up to READS_TO_NOTE; 0 where that is not noted."""
        cdef uint16_t note
        if self.batches == NULL:
            return 0
        note = self.batches[facts.position >> PAGE_BITS]
        if note % ONE_READ != (facts.position & PAGE_MASK) + 1:
            return 0
        return note // ONE_READ

    cdef int count_read(self, const uint8_t *base, const Facts *facts, int reads) noexcept:
        """Notes one more read than these from a batch that is checked; returns how many are noted now."""
        if self.batches == NULL or (facts.position & PAGE_MASK) + facts.size_bytes <= PAGE_MASK + 1:
            return 0
        reads += 1
        self.batches[facts.position >> PAGE_BITS] = <uint16_t>(reads * ONE_READ + (facts.position & PAGE_MASK) + 1)
        if reads == READS_TO_NOTE:
            self.note_records(base, facts)
        return reads

    cdef void note_records(self, const uint8_t *base, const Facts *facts) noexcept:
        """Notes where the records of a batch begin: of each 64 bytes the first."""
        cdef const uint8_t *p = base + facts.position + HEADER_SIZE
        cdef const uint8_t *end = base + facts.position + facts.size_bytes
        cdef Py_ssize_t at
        cdef int64_t left = facts.record_count
        while left > 0 and p != NULL:
            at = p - base
            if self.records[at >> 6] == 0:
                self.records[at >> 6] = <uint8_t>((at & 63) + 1)
            p = lc_skip(p, end, 1)
            left -= 1

    cdef const uint8_t *near(self, const uint8_t *base, const Facts *facts, int64_t *left) noexcept:
        """A record at or before the one that so many records of the batch precede, by its place if all were as long;
        on return left says how many lie between.
        """
        cdef Py_ssize_t body = facts.position + HEADER_SIZE, size = facts.size_bytes - HEADER_SIZE, piece
        cdef const uint8_t *p
        cdef int64_t before = left[0], number
        cdef int steps = 0
        if before < NEAR_RECORDS:
            return base + body
        piece = (body + <Py_ssize_t>(size * before // facts.record_count)) >> 6
        while piece > body >> 6 and steps < NEAR_STEPS:
            steps += 1
            if self.records[piece] == 0:
                piece -= 1
                continue
            p = base + (piece << 6) + self.records[piece] - 1
            number = number_of(p, base + facts.position + facts.size_bytes)
            if 0 <= number <= before:
                left[0] = before - number
                return p
            if number < 0:
                break
            piece -= max(1, <Py_ssize_t>(size * (number - before) // facts.record_count) >> 6)
        return base + body


cdef int64_t number_of(const uint8_t *p, const uint8_t *end) noexcept nogil:
    """The offset delta of the record at p, -1 when it is malformed."""
    cdef int32_t length, number
    cdef int64_t time
    p = lc_read32(p, end, &length)
    if p == NULL or p >= end:
        return -1
    p = lc_read64(p + 1, end, &time)
    if p == NULL or lc_read32(p, end, &number) == NULL:
        return -1
    return number


def hold(data, index, int64_t own_from):
    """What get_quickly() reads a segment with. See plain.hold."""
    cdef Held held = Held.__new__(Held)
    PyObject_GetBuffer(data, &held.data, PyBUF_SIMPLE)
    held.has_data = True
    held.index = index
    held.faults = lc_all_faults()
    if held.faults:  # a page that is to be read may have turned to zeros before
        own_from = (<uint64_t>1 << 63) - 1
    held.own_from = own_from
    # Without memory for these two each batch is checked each time.
    held.records = <uint8_t *>calloc((held.data.len >> 6) + 1, 1)
    if held.records != NULL:
        held.batches = <uint16_t *>calloc((held.data.len >> PAGE_BITS) + 1, 2)
    return held


def get_quickly(PartitionFields state not None, offset):
    """The record at an offset, where that is plain. See plain.get_quickly."""
    cdef list segments = state.segments
    cdef SegmentFields segment
    cdef Held held
    cdef Py_ssize_t low = 0, high, middle, limit
    cdef int64_t wanted, end_offset
    cdef int overflow = 0
    if not PyLong_CheckExact(offset) or state.is_closed:
        return None
    wanted = PyLong_AsLongLongAndOverflow(offset, &overflow)
    if overflow or wanted < state.log_start or wanted >= state.visible:
        return None
    noted = state.gaps._noted
    if noted is None or wanted < <int64_t>noted.dense_from:
        return None
    high = len(segments)
    while low < high:
        middle = (low + high) >> 1
        if (<SegmentFields?>segments[middle]).base_offset <= wanted:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return None
    segment = <SegmentFields>segments[low - 1]
    if segment.held is None:
        return None
    held = <Held>segment.held
    if held.faults != lc_all_faults():
        return None
    limit = held.data.len
    end_offset = state.end
    if low < len(segments):
        end_offset = (<SegmentFields?>segments[low]).base_offset
    elif segment.handle >= 0:
        limit = min(limit, segment._size)
    try:
        found = held.get(segment.base_offset, wanted, limit, end_offset)
    except (CorruptBatchError, InvalidRecordError):
        return None
    if type(found) is Record and (<Record>found).offset == wanted and held.faults == lc_all_faults():
        return found
    return None
