"""The quick way to one record: LogReader.get(), compiled. A part of _compiled.pyx, which includes it.

reader.py and segment.py are the slow way and the rule book. The quick way answers where the offset lies in a segment that
is held, in a plain batch, and where no gaps are; for everything else, damage too, it returns None, and the slow way
looks again and says what it finds. It holds the interpreter's lock throughout, and allocates nothing but the record.

A segment is held (Segment.held) once the slow way has read from it: its mapping, and its offset index. Held keeps the
memory of both, and which batches were checked:

- The CRC of a batch is checked when it is first read, and not again for as long as the segment object lives. Noted are
  positions, not pages: a batch that begins elsewhere, by a forged index or length, is not passed for the one checked. A
  byte for each 64 bytes of the file holds the position in them, and no two batches with a head of 61 bytes that follow
  each other spoil more than the note of one of them; a batch whose note was lost is checked again.
- What this writer has appended itself, in this life of the segment, needs no check: it has never been anywhere else.
- A page that was checked may turn to zeros later, when another program shortens the file or the disk fails to give the
  page again (guard_mapping). The handler counts that, for all mappings. Segments that were held before go the slow way
  from then on, also where it happens in the middle of a get; of those held later each batch is checked once.

Costs, of batches of 16 KiB with records of 116 bytes: 0.5 us where the slow way takes 2.6, half of it the CRC, and 5.1
for the segment that is written, which it reads with pread. Of these 0.5, 0.3 pass over the records before.
"""


@cython.final
cdef class Held:
    """See the top of this file. Made by hold()."""

    cdef Py_buffer data
    cdef bint has_data
    cdef object index
    cdef int64_t own_from
    cdef long faults
    cdef uint8_t *checked

    def __dealloc__(self):
        free(self.checked)
        if self.has_data:
            PyBuffer_Release(&self.data)

    @property
    def size_bytes(self):
        """How much of the file is mapped."""
        return self.data.len

    cdef bint is_checked(self, Py_ssize_t position) noexcept:
        return (position >= self.own_from
                or (self.checked != NULL and self.checked[position >> 6] == (position & 63) + 1))

    cdef void note_checked(self, Py_ssize_t position) noexcept:
        if self.checked != NULL:
            self.checked[position >> 6] = <uint8_t>((position & 63) + 1)

    cdef object get(self, int64_t base_offset, int64_t offset, Py_ssize_t limit, int64_t end_offset):
        cdef Py_buffer entries
        cdef const uint8_t *base = <const uint8_t *>self.data.buf
        cdef Py_ssize_t position
        PyObject_GetBuffer(self.index.data, &entries, PyBUF_SIMPLE)
        position = start(&entries, entries.len // 8, base, limit, base_offset, offset)
        PyBuffer_Release(&entries)
        return one(base, position, limit, offset, None, end_offset, True, self)


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
    if own_from > 0:  # without memory for it each batch is checked each time
        held.checked = <uint8_t *>calloc((held.data.len >> 6) + 1, 1)
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
