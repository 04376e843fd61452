"""The compiled fast path of LogReader.get(), which reads one record. _compiled.pyx includes this file.

The general path is in reader.py and segment.py, which define the behavior. The fast path returns a record if its segment
is held, its batch is plain, and the log has no gaps at its offset. In all other cases, also for damaged bytes, it returns
None, and the general path reads the record and reports errors. The fast path holds the GIL, and allocates only the
record.

The general path creates the Held of a segment (Segment.held) when it first reads from the segment. Held keeps the mapping
and the offset index in memory, and records which batches were checked:

- The CRC of a batch is checked when the batch is first read, and not again while the segment object exists. Held records
  the exact position of the batch. A batch at another position, from a forged index or length, does not count as checked.
  Of the batches that begin in one block of 4 KiB, only the last one may extend beyond the block, and only that batch is
  recorded. A batch inside the block is checked at each read, which takes at most 0.2 us.
- The third read of a batch records where its records begin, in one byte for each 64 bytes of the file. Later reads start
  from there. The first two reads do not: random reads of a log of 8 GB seldom read a batch again, and each read would
  cause a page fault in this memory, which makes it 8 us instead of 6.
- The search for a record starts at the position that it would have if all records were of equal size. Of 120 records,
  the search skips two or three, instead of reading 8 KiB of them on average. The offset in the record shows whether the
  search was right. If not, the general path reads the whole batch.
- Batches that this writer has appended since the segment object was created are not checked.
- A page may turn to zeros after its check, if another program shortens the file or the disk cannot read the page again
  (guard_mapping). The signal handler counts these pages for all mappings. From then on, segments that were held before
  use the general path, even if it happens during a get(). In segments that are held later, each batch is checked once.

With batches of 16 KiB and records of 116 bytes, a read takes 0.2 us. The general path takes 2.6 us, half of it for the
CRC, and 5.1 us in the active segment, which it reads with pread. The first and the third read of a batch take 2 us each.
"""


cdef enum:
    PAGE_BITS = 12
    PAGE_MASK = (1 << PAGE_BITS) - 1
    #: An entry of Held.batches: the number of reads, at most READS_TO_NOTE, times ONE_READ, plus the position.
    ONE_READ = 1 << (PAGE_BITS + 1)
    READS_TO_NOTE = 3
    NEAR_RECORDS = 8
    NEAR_STEPS = 64


@cython.final
cdef class Held:
    """The memory of one segment. See the top of this file. hold() creates it."""

    cdef Py_buffer data
    cdef bint has_data
    cdef object index
    cdef int64_t own_from
    cdef long faults
    #: For each 64 bytes of the file: 1 plus the position of the first recorded record in them, or 0.
    cdef uint8_t *records
    #: For each 4 KiB of the file: 1 plus the position of the checked batch in them, plus its reads, or 0.
    cdef uint16_t *batches

    def __dealloc__(self):
        free(self.records)
        free(self.batches)
        if self.has_data:
            PyBuffer_Release(&self.data)

    @property
    def size_bytes(self):
        """The mapped bytes of the file."""
        return self.data.len

    cdef object get(self, int64_t base_offset, int64_t offset, Py_ssize_t limit, int64_t end_offset):
        """Return the record that the search finds for an offset; None if the general path must read it."""
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
        """Return how often the batch was read, up to READS_TO_NOTE; 0 if the batch is not recorded."""
        cdef uint16_t note
        if self.batches == NULL:
            return 0
        note = self.batches[facts.position >> PAGE_BITS]
        if note % ONE_READ != (facts.position & PAGE_MASK) + 1:
            return 0
        return note // ONE_READ

    cdef int count_read(self, const uint8_t *base, const Facts *facts, int reads) noexcept:
        """Record one more read of a checked batch, and return the number of its reads."""
        if self.batches == NULL or (facts.position & PAGE_MASK) + facts.size_bytes <= PAGE_MASK + 1:
            return 0
        reads += 1
        self.batches[facts.position >> PAGE_BITS] = <uint16_t>(reads * ONE_READ + (facts.position & PAGE_MASK) + 1)
        if reads == READS_TO_NOTE:
            self.note_records(base, facts)
        return reads

    cdef void note_records(self, const uint8_t *base, const Facts *facts) noexcept:
        """Record where the records of a batch begin: the first one in each 64 bytes."""
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
        """Return a record at or before record number `left` of the batch, near the place where that record would be if all
        were of equal size. On return, `left` is the number of records between the two.
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
    """Return the offset delta of the record at p, or -1 if it is malformed."""
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
    """Return the Held with which get_fast() reads a segment. See plain.hold."""
    cdef Held held = Held.__new__(Held)
    PyObject_GetBuffer(data, &held.data, PyBUF_SIMPLE)
    held.has_data = True
    held.index = index
    held.faults = lc_all_faults()
    if held.faults:  # a page of this segment may have turned to zeros, so no batch counts as checked
        own_from = (<uint64_t>1 << 63) - 1
    held.own_from = own_from
    # If there is no memory for these two, each batch is checked at each read.
    held.records = <uint8_t *>calloc((held.data.len >> 6) + 1, 1)
    if held.records != NULL:
        held.batches = <uint16_t *>calloc((held.data.len >> PAGE_BITS) + 1, 2)
    return held


def get_fast(PartitionFields state not None, offset):
    """Return the record at an offset, or None if the general path must read it. See plain.get_fast."""
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
    persisted = state.gaps._persisted
    if persisted is None or wanted < <int64_t>persisted.dense_from:
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
