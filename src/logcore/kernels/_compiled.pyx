# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled kernels. plain.py contains the same functions in Python, which define the behavior.

Rules:
- No function reads past the end of a given buffer. Each length in the bytes is checked against the remaining bytes first.
- A function holds the given buffers only during the call. Results own their memory.
- Byte layouts come from layout.py. The constants below are checked against it at import.

This module makes no decisions: its callers decide which batches to read, when to check a CRC, and how to treat damage.
The fast paths that append, get and send a record contain rules of the writer, the reader and the producer. They are in
_appending.pxi, _getting.pxi and _sending.pxi. The iteration of a consumer is in _iterating.pxi, and the usual requests of
a broker are in _requests.pxi. The compiler includes these files here.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE, PyList_New, PyList_SET_ITEM
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_Check, PyTuple_CheckExact, PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cpython.unicode cimport (
    PyUnicode_AsUTF8AndSize,
    PyUnicode_CheckExact,
    PyUnicode_Decode,
    PyUnicode_DecodeASCII,
)
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from collections.abc import Mapping as _Mapping

import numpy as np

from logcore.errors import CorruptBatchError, InvalidRecordError, InvalidTimestampError, RecordTooLargeError
from logcore.kernels import appending as _appending
from logcore.kernels import layout as _layout
from logcore.kernels import sending as _sending

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
    /* Skips over records by their lengths; NULL when one is malformed or runs past end. The position of the next record
       is known only when the length of this one has arrived from memory, so the bytes ahead are prefetched: 6 ns instead
       of 11 for each record of 130 bytes. */
    enum { LC_AHEAD = 1024, LC_LINE = 64 };
    static const unsigned char *lc_skip(const unsigned char *p, const unsigned char *end, int64_t count) {
        const unsigned char *fetched = p;
        for (; count > 0; count--) {
            int32_t length;
            if (fetched < p) fetched = p;
            for (; fetched < p + LC_AHEAD; fetched += LC_LINE) __builtin_prefetch(fetched, 0);
            if (end - p >= 2 && p[0] >= 0x80 && p[1] < 0x80) {
                uint32_t two = (uint32_t)(p[0] & 0x7f) | (uint32_t)p[1] << 7;
                length = (int32_t)(two >> 1) ^ -(int32_t)(two & 1);
                p += 2;
            } else {
                p = lc_read32(p, end, &length);
                if (p == NULL) return NULL;
            }
            if (length < 0 || length > end - p) return NULL;
            p += length;
        }
        return p;
    }
    /* As lc_read32; strict: also NULL when the last of five bytes has bits that a reader of 64-bit varints would count. */
    static inline const unsigned char *lc_read_size(const unsigned char *p, const unsigned char *end, int32_t *out, int strict) {
        const unsigned char *next = lc_read32(p, end, out);
        return strict && next != NULL && next - p == 5 && next[-1] > 0x0f ? NULL : next;
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
        return zigzag < 0x80 ? 1 : zigzag < 0x4000 ? 2 : (70 - __builtin_clzll(zigzag)) / 7;
    }
    /* Nearly all varints have one or two bytes; two are one store. */
    static inline unsigned char *lc_write(unsigned char *p, uint64_t zigzag) {
        if (__builtin_expect(zigzag < 0x80, 1)) { *p = (unsigned char)zigzag; return p + 1; }
        if (__builtin_expect(zigzag < 0x4000, 1)) {
            uint16_t both = (uint16_t)((zigzag & 0x7f) | 0x80 | (zigzag >> 7) << 8);
            memcpy(p, &both, 2);
            return p + 2;
        }
        while (zigzag >= 0x80) { *p++ = (unsigned char)(zigzag | 0x80); zigzag >>= 7; }
        *p++ = (unsigned char)zigzag;
        return p;
    }
    /* Keys and values are mostly short, where a call of memcpy costs more than the copy: blocks of constant size, the
       last one overlapping, so that nothing outside either range is touched. */
    static inline void lc_copy(unsigned char *to, const unsigned char *from, size_t size) {
        size_t at;
        if (size > 256) { memcpy(to, from, size); return; }
        if (size > 64) {
            for (at = 0; at + 64 < size; at += 64) memcpy(to + at, from + at, 64);
            memcpy(to + size - 64, from + size - 64, 64);
        } else if (size > 32) {
            memcpy(to, from, 32); memcpy(to + size - 32, from + size - 32, 32);
        } else if (size >= 16) {
            memcpy(to, from, 16); memcpy(to + size - 16, from + size - 16, 16);
        } else if (size >= 8) {
            memcpy(to, from, 8); memcpy(to + size - 8, from + size - 8, 8);
        } else for (at = 0; at < size; at++) to[at] = from[at];
    }
    /* Writes one v2 record, at most LC_OVERHEAD bytes more than its payload. A size of -1 is null. */
    enum { LC_OVERHEAD = 41 };
    static inline unsigned char *lc_write_record(unsigned char *p, int64_t timestamp_delta, int64_t offset_delta,
            const unsigned char *key, int64_t key_size, const unsigned char *value, int64_t value_size,
            int64_t header_count, const unsigned char *headers, int64_t headers_size) {
        uint64_t time = lc_zigzag(timestamp_delta), number = (uint64_t)offset_delta << 1,
                 key_head = lc_zigzag(key_size), value_head = lc_zigzag(value_size), header_head = (uint64_t)header_count << 1;
        int64_t length = 1 + lc_size(time) + lc_size(number) + lc_size(key_head) + lc_size(value_head)
                + lc_size(header_head) + (key_size > 0 ? key_size : 0)
                + (value_size > 0 ? value_size : 0) + headers_size;
        p = lc_write(p, (uint64_t)length << 1);
        *p++ = 0;
        p = lc_write(p, time);
        p = lc_write(p, number);
        p = lc_write(p, key_head);
        if (key_size > 0) { lc_copy(p, key, key_size); p += key_size; }
        p = lc_write(p, value_head);
        if (value_size > 0) { lc_copy(p, value, value_size); p += value_size; }
        p = lc_write(p, header_head);
        if (headers_size) { memcpy(p, headers, headers_size); p += headers_size; }
        return p;
    }
    static inline void lc_prefetch(const void *p) { __builtin_prefetch(p, 1); }
    /* Four multilinear hashes at once, factors of one word beside each other; the upper halves of their 64 bits. */
    static inline void lc_hash(const unsigned char *key, int64_t size, const uint64_t *factors, uint64_t *out) {
        uint64_t sums[4]; const uint64_t *factor = factors + 8; int64_t at; int lane;
        for (lane = 0; lane < 4; lane++) sums[lane] = factors[lane] + (uint64_t)size * factors[4 + lane];
        for (at = 0; at + 4 <= size; at += 4, factor += 4) {
            uint32_t word; memcpy(&word, key + at, 4);
            for (lane = 0; lane < 4; lane++) sums[lane] += word * factor[lane];
        }
        if (at < size) {
            uint32_t word = 0; memcpy(&word, key + at, size - at);
            for (lane = 0; lane < 4; lane++) sums[lane] += word * factor[lane];
        }
        out[0] = (sums[0] >> 32) << 32 | sums[1] >> 32;
        out[1] = (sums[2] >> 32) << 32 | sums[3] >> 32;
    }
    /* The shortest way for the commonest row: a tuple of two bytes objects, at the base timestamp. NULL when it is not
       that, or does not fit before end. */
    static inline unsigned char *lc_write_pair(unsigned char *p, const unsigned char *end, PyObject *row,
            int64_t number) {
        PyObject *key, *value;
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 2) return NULL;
        key = PyTuple_GET_ITEM(row, 0);
        value = PyTuple_GET_ITEM(row, 1);
        if (!PyBytes_CheckExact(key) || !PyBytes_CheckExact(value)) return NULL;
        if (end - p < PyBytes_GET_SIZE(key) + PyBytes_GET_SIZE(value) + LC_OVERHEAD) return NULL;
        return lc_write_record(p, 0, number, (const unsigned char *)PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key),
                               (const unsigned char *)PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value), 0, NULL, 0);
    }
    /* A column of bytes. edges is NULL when all rows are null, nulls when none is. */
    typedef struct { const unsigned char *data; const int64_t *edges; const unsigned char *nulls; } LcColumn;
    static inline int64_t lc_cell(const LcColumn *column, int64_t row) {
        if (!column->edges || (column->nulls && column->nulls[row])) return -1;
        return column->edges[row + 1] - column->edges[row];
    }
    /* The rows from *row on that fit before end and have a valid timestamp, into the open batch. */
    static unsigned char *lc_write_rows(unsigned char *p, const unsigned char *end, LcColumn keys, LcColumn values,
            const int64_t *times, int64_t *newest, int64_t base_timestamp, int64_t *row, int64_t rows, int64_t number) {
        int64_t at = *row, most = *newest;
        if (keys.edges && values.edges && !keys.nulls && !values.nulls && !times) {
            /* The same with fewer questions: 11 ns instead of 13.5 for rows of 116 bytes. */
            for (; at < rows; at++, number++) {
                int64_t key_at = keys.edges[at], key_size = keys.edges[at + 1] - key_at;
                int64_t value_at = values.edges[at], value_size = values.edges[at + 1] - value_at;
                uint64_t key_head = (uint64_t)key_size << 1, value_head = (uint64_t)value_size << 1;
                if (end - p < key_size + value_size + LC_OVERHEAD || (key_size | value_size) < 0) break;
                p = lc_write(p, (uint64_t)(3 + lc_size((uint64_t)number << 1) + lc_size(key_head) + lc_size(value_head)
                                           + key_size + value_size) << 1);
                p[0] = 0; p[1] = 0;  /* attributes and timestamp delta */
                p = lc_write(p + 2, (uint64_t)number << 1);
                p = lc_write(p, key_head);
                lc_copy(p, keys.data + key_at, key_size);
                p = lc_write(p + key_size, value_head);
                lc_copy(p, values.data + value_at, value_size);
                p += value_size;
                *p++ = 0;
            }
        } else for (; at < rows; at++, number++) {
            int64_t key_size = lc_cell(&keys, at), value_size = lc_cell(&values, at);
            int64_t payload = (key_size > 0 ? key_size : 0) + (value_size > 0 ? value_size : 0);
            int64_t time = times ? times[at] : base_timestamp;
            if (end - p < payload + LC_OVERHEAD || time < -1) break;
            if (time > most) most = time;
            p = lc_write_record(p, time - base_timestamp, number, key_size > 0 ? keys.data + keys.edges[at] : NULL,
                                key_size, value_size > 0 ? values.data + values.edges[at] : NULL, value_size, 0,
                                NULL, 0);
        }
        *newest = most;
        *row = at;
        return p;
    }
    """
    uint8_t *lc_write_record(uint8_t *p, int64_t timestamp_delta, int64_t offset_delta, const uint8_t *key, int64_t key_size,
                             const uint8_t *value, int64_t value_size, int64_t header_count, const uint8_t *headers,
                             int64_t headers_size) noexcept nogil
    uint8_t *lc_write_pair(uint8_t *p, const uint8_t *end, object row, int64_t number) noexcept
    ctypedef struct LcColumn:
        const uint8_t *data
        const int64_t *edges
        const uint8_t *nulls
    uint8_t *lc_write_rows(uint8_t *p, const uint8_t *end, LcColumn keys, LcColumn values, const int64_t *times,
                           int64_t *newest, int64_t base_timestamp, int64_t *row, int64_t rows,
                           int64_t number) noexcept nogil
    int64_t lc_cell(const LcColumn *column, int64_t row) noexcept nogil
    uint16_t lc_be16(const uint8_t *p) noexcept nogil
    uint32_t lc_be32(const uint8_t *p) noexcept nogil
    uint64_t lc_be64(const uint8_t *p) noexcept nogil
    void lc_put16(uint8_t *p, uint16_t v) noexcept nogil
    void lc_put32(uint8_t *p, uint32_t v) noexcept nogil
    void lc_put64(uint8_t *p, uint64_t v) noexcept nogil
    const uint8_t *lc_read32(const uint8_t *p, const uint8_t *end, int32_t *out) noexcept nogil
    const uint8_t *lc_skip(const uint8_t *p, const uint8_t *end, int64_t count) noexcept nogil
    const uint8_t *lc_read_size(const uint8_t *p, const uint8_t *end, int32_t *out, int strict) noexcept nogil
    const uint8_t *lc_read64(const uint8_t *p, const uint8_t *end, int64_t *out) noexcept nogil
    uint64_t lc_zigzag(int64_t n) noexcept nogil
    int lc_size(uint64_t zigzag) noexcept nogil
    uint8_t *lc_write(uint8_t *p, uint64_t zigzag) noexcept nogil
    void lc_copy(uint8_t *to, const uint8_t *source, size_t size) noexcept nogil
    void lc_prefetch(const void *p) noexcept nogil
    void lc_hash(const uint8_t *key, int64_t size, const uint64_t *factors, uint64_t *out) noexcept nogil

# -- mappings whose pages may vanish ---------------------------------------------------------------------------------

cdef extern from *:
    """
    /* An access to a page of a mapped file raises SIGBUS, which ends the process, if the file was shortened or the disk
       cannot read the page. In a guarded mapping, the handler replaces the page by zeros and counts it. It calls only
       mmap(2) and sigaction(2). Guards are never freed, because the handler may be reading them in another thread. A
       released guard is used again. Other signals are passed to the earlier handler. */
    #if defined(__linux__) || defined(__APPLE__)
    #include <errno.h>
    #include <signal.h>
    #include <stdlib.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef MAP_ANONYMOUS
    #define MAP_ANONYMOUS MAP_ANON
    #endif

    typedef struct lc_guard {
        volatile uintptr_t start, end;  /* both 0 while it is free */
        volatile long faults;
        struct lc_guard *next;
    } lc_guard;

    static lc_guard *volatile lc_guards;  /* new entries are added at the head, under the GIL */
    static struct sigaction lc_before;
    static uintptr_t lc_page;
    static int lc_installed;
    static volatile long lc_fault_count;  /* of all mappings */

    /* The first pages are replaced one by one, so that pages after a bad sector can still be read. After this number, the
       rest of the mapping is replaced at once, because each page makes the kernel's list of mappings longer. */
    enum { LC_SINGLE_PAGES = 64 };

    static void lc_on_sigbus(int number, siginfo_t *info, void *context) {
        uintptr_t at = (uintptr_t)info->si_addr & ~(lc_page - 1);
        int error = errno;
        for (lc_guard *guard = lc_guards; guard != NULL; guard = guard->next) {
            uintptr_t start = guard->start, end = guard->end;
            if (at < start || at >= end) continue;
            size_t size = guard->faults < LC_SINGLE_PAGES ? lc_page : end - at;
            if (mmap((void *)at, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
            guard->faults++;
            lc_fault_count++;
            errno = error;
            return;
        }
        if (lc_before.sa_flags & SA_SIGINFO) {
            lc_before.sa_sigaction(number, info, context);
        } else if (lc_before.sa_handler == SIG_DFL || lc_before.sa_handler == SIG_IGN) {
            sigaction(SIGBUS, &lc_before, NULL);  /* the instruction is tried again, and ends the process as it would have */
        } else {
            lc_before.sa_handler(number);
        }
        errno = error;
    }

    static lc_guard *lc_guard_mapping(uintptr_t start, size_t size) {
        if (!lc_installed) {
            struct sigaction action;
            memset(&action, 0, sizeof action);
            action.sa_sigaction = lc_on_sigbus;
            action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
            sigemptyset(&action.sa_mask);
            lc_page = (uintptr_t)sysconf(_SC_PAGESIZE);
            if (sigaction(SIGBUS, &action, &lc_before) != 0) return NULL;
            lc_installed = 1;
        }
        lc_guard *guard = lc_guards;
        while (guard != NULL && guard->end != 0) guard = guard->next;
        if (guard == NULL) {
            guard = (lc_guard *)calloc(1, sizeof *guard);
            if (guard == NULL) return NULL;
            guard->next = lc_guards;
            lc_guards = guard;
        }
        guard->faults = 0;
        guard->start = start;
        guard->end = (start + size + lc_page - 1) & ~(lc_page - 1);
        return guard;
    }

    static void lc_release(lc_guard *guard) { guard->end = 0; guard->start = 0; }  /* an end of 0 matches no address */

    static long lc_faults(uintptr_t at) {
        for (lc_guard *guard = lc_guards; guard != NULL; guard = guard->next)
            if (at >= guard->start && at < guard->end) return guard->faults;
        return 0;
    }

    static long lc_all_faults(void) { return lc_fault_count; }

    static void lc_touch(const unsigned char *p, size_t size) {
        size_t step = lc_page ? lc_page : 4096;
        for (size_t at = 0; at < size; at += step) (void)*(volatile const unsigned char *)(p + at);
        if (size) (void)*(volatile const unsigned char *)(p + size - 1);
    }
    #else
    typedef struct lc_guard lc_guard;
    static lc_guard *lc_guard_mapping(uintptr_t start, size_t size) { return NULL; }
    static void lc_release(lc_guard *guard) {}
    static long lc_faults(uintptr_t at) { return 0; }
    static long lc_all_faults(void) { return 0; }
    static void lc_touch(const unsigned char *p, size_t size) {}
    #endif
    """
    ctypedef struct lc_guard:
        pass
    lc_guard *lc_guard_mapping(size_t start, size_t size) nogil
    void lc_release(lc_guard *guard) nogil
    long lc_faults(size_t at) nogil
    long lc_all_faults() noexcept nogil
    void lc_touch(const uint8_t *p, size_t size) nogil


def guard_mapping(size_t address, size_t size):
    """Make unreadable pages of a mapping turn to zeros instead of ending the process. Return what
    release_mapping() takes, 0 where that cannot be done.
    """
    return <size_t>lc_guard_mapping(address, size)


def release_mapping(size_t guard):
    """End the guard of a mapping. Called before the mapping is removed."""
    lc_release(<lc_guard *>guard)


def unreadable_pages(data):
    """Return how many pages of the guarded mapping around data have turned to zeros; 0 for other memory."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return lc_faults(<size_t>view.buf)
    finally:
        PyBuffer_Release(&view)


def touch(data):
    """Read a byte of each page of data, so that unreadable_pages() counts all pages that cannot be read now."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            lc_touch(<const uint8_t *>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef enum:
    HEADER_SIZE = 61
    LOG_OVERHEAD = 12
    PREFIX_SIZE = 17
    CRC_FIELD = 17
    CRC_START = 21
    MIN_LENGTH = 14
    MIN_RECORD_SIZE = 7
    CODEC_MASK = 0x07
    APPEND_TIME_BIT = 0x08
    CONTROL_BIT = 0x20
    TRANSACTIONAL_BIT = 0x10
    ROW_SIZE = 40
    INT32_LIMIT = 2147483647
    OVERHEAD = 41

cdef enum:
    WALK_END, WALK_LIMIT, WALK_SHORT, WALK_LENGTH, WALK_MAGIC, WALK_CRC, WALK_COUNT

cdef enum:
    BODY_OK, BODY_SHORT, BODY_VARINT, BODY_LENGTH, BODY_HEADERS, BODY_HEADER_KEY, BODY_SIZE, BODY_LEFT, BODY_COUNT, BODY_BELOW_NULL

cdef struct Facts:
    int64_t position, base_offset, last_offset, base_timestamp, max_timestamp, producer_id
    int32_t size_bytes, partition_leader_epoch, base_sequence, record_count
    uint32_t crc
    int16_t producer_epoch, attributes
    int8_t magic

assert (HEADER_SIZE, LOG_OVERHEAD, PREFIX_SIZE, CRC_START, MIN_LENGTH, MIN_RECORD_SIZE, OVERHEAD, ROW_SIZE) == (
    _layout.HEADER_SIZE, _layout.LOG_OVERHEAD, _layout.PREFIX_SIZE, _layout.CRC_START, _layout.MIN_LENGTH,
    _layout.MIN_RECORD_SIZE, _layout.OVERHEAD, _layout.ROW_SIZE)
assert sizeof(Facts) == _layout.BATCH_FACTS.itemsize
assert (WALK_COUNT, BODY_COUNT, BODY_BELOW_NULL) == (
    _layout.WALK_COUNT, _layout.BODY_COUNT, _layout.BODY_BELOW_NULL)

NAME = "compiled"
cdef object _facts_dtype = _layout.BATCH_FACTS
cdef dict _body_reasons = _layout.BODY_REASONS
cdef tuple _no_headers = ()
cdef object _crc32c = None
cdef object _crc32 = None


@cython.final
@cython.no_gc  # the fields are ints, bytes and tuples of them, which cannot form a cycle
@cython.freelist(1024)
@cython.collection_type("sequence")  # for `match`, which an immutable type cannot get from Sequence.register()
cdef class Record:
    """A record. It replaces layout.Record, and stores the numbers as C integers (55 ns instead of 130 to create).

    It behaves like that named tuple: it unpacks, compares, adds and hashes like (offset, timestamp_ms, key, value,
    headers). A pickle of either class is read as the class of the reading process.
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

    def __lt__(self, other):
        return self.fields() < tuple(other) if isinstance(other, (Record, tuple)) else NotImplemented

    def __le__(self, other):
        return self.fields() <= tuple(other) if isinstance(other, (Record, tuple)) else NotImplemented

    def __gt__(self, other):
        return self.fields() > tuple(other) if isinstance(other, (Record, tuple)) else NotImplemented

    def __ge__(self, other):
        return self.fields() >= tuple(other) if isinstance(other, (Record, tuple)) else NotImplemented

    def __add__(self, other):
        return self.fields() + tuple(other) if isinstance(other, (Record, tuple)) else NotImplemented

    def __radd__(self, other):
        return other + self.fields() if isinstance(other, tuple) else NotImplemented

    def count(self, value):
        return self.fields().count(value)

    def index(self, value, *bounds):
        return self.fields().index(value, *bounds)

    def __reduce__(self):
        return _layout.record_of, self.fields()

    def _asdict(self):
        return dict(zip(self._fields, self.fields()))

    def _replace(self, **changes):
        return Record(**{**self._asdict(), **changes})


@cython.final
@cython.freelist(10000)  # the records of a poll reuse memory: 82 ns for each, otherwise 94
@cython.collection_type("sequence")
cdef class TopicRecord:
    """A record of a topic. It replaces layout.TopicRecord (35 ns to create from a Record, instead of 400).

    key and value are any objects, because deserializers of consumers return them. The cycle collector therefore tracks it.
    """

    cdef readonly object topic
    cdef readonly int32_t partition
    cdef readonly int64_t offset
    cdef readonly int64_t timestamp_ms
    cdef readonly object key
    cdef readonly object value
    cdef readonly tuple headers

    _fields = _layout.TopicRecord._fields
    __match_args__ = _layout.TopicRecord._fields

    def __init__(self, topic, int32_t partition, int64_t offset, int64_t timestamp_ms, key, value, tuple headers=()):
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.timestamp_ms = timestamp_ms
        self.key = key
        self.value = value
        self.headers = headers

    cdef tuple fields(self):
        return (self.topic, self.partition, self.offset, self.timestamp_ms, self.key, self.value, self.headers)

    # The same methods as in Record. A common base class would cost the free list, and Cython allows no include here.

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return self.fields()[index]

    def __iter__(self):
        return iter(self.fields())

    def __hash__(self):
        return hash(self.fields())

    def __eq__(self, other):
        if isinstance(other, (TopicRecord, tuple)):
            return self.fields() == tuple(other)
        return NotImplemented

    def __repr__(self):
        return (f"TopicRecord(topic={self.topic!r}, partition={self.partition!r}, offset={self.offset!r}, "
                f"timestamp_ms={self.timestamp_ms!r}, key={self.key!r}, value={self.value!r}, headers={self.headers!r})")

    def __lt__(self, other):
        return self.fields() < tuple(other) if isinstance(other, (TopicRecord, tuple)) else NotImplemented

    def __le__(self, other):
        return self.fields() <= tuple(other) if isinstance(other, (TopicRecord, tuple)) else NotImplemented

    def __gt__(self, other):
        return self.fields() > tuple(other) if isinstance(other, (TopicRecord, tuple)) else NotImplemented

    def __ge__(self, other):
        return self.fields() >= tuple(other) if isinstance(other, (TopicRecord, tuple)) else NotImplemented

    def __add__(self, other):
        return self.fields() + tuple(other) if isinstance(other, (TopicRecord, tuple)) else NotImplemented

    def __radd__(self, other):
        return other + self.fields() if isinstance(other, tuple) else NotImplemented

    def count(self, value):
        return self.fields().count(value)

    def index(self, value, *bounds):
        return self.fields().index(value, *bounds)

    def __reduce__(self):
        return _layout.topic_record_of, self.fields()

    def _asdict(self):
        return dict(zip(self._fields, self.fields()))

    def _replace(self, **changes):
        return TopicRecord(**{**self._asdict(), **changes})


cdef TopicRecord placed(object topic, int32_t partition, Record record):
    cdef TopicRecord found = TopicRecord.__new__(TopicRecord)
    found.topic = topic
    found.partition = partition
    found.offset = record.offset
    found.timestamp_ms = record.timestamp_ms
    found.key = record.key
    found.value = record.value
    found.headers = record.headers
    return found


def to_topic_record(topic, int32_t partition, Record record not None):
    """Return a record with its topic and partition. See plain.to_topic_record."""
    return placed(topic, partition, record)


def to_topic_records(topic, int32_t partition, list records not None):
    """Return a list of records with their topic and partition. See plain.to_topic_records."""
    cdef list found = []
    cdef Record record
    for record in records:
        found.append(placed(topic, partition, record))
    return found


cdef extern from *:
    """
    /* CRC-32C of short pieces, by the instruction of the processor, eight bytes at a time: 25 ns for 165 bytes where the
       call of the crc32c module takes 180. That one does three stretches at once, so it wins from LC_CRC_SHORT on. */
    enum { LC_CRC_SHORT = 1024 };
    #if defined(__x86_64__) && defined(__GNUC__)
    __attribute__((target("sse4.2")))
    static uint32_t lc_crc_fast(const unsigned char *p, size_t size) {
        uint64_t crc = 0xffffffffu;
        for (; size >= 8; p += 8, size -= 8) { uint64_t word; memcpy(&word, p, 8); crc = __builtin_ia32_crc32di(crc, word); }
        for (; size; p++, size--) crc = __builtin_ia32_crc32qi((uint32_t)crc, *p);
        return ~(uint32_t)crc;
    }
    static int lc_has_fast_crc(void) { return __builtin_cpu_supports("sse4.2"); }
    #elif defined(__ARM_FEATURE_CRC32)
    #include <arm_acle.h>
    static uint32_t lc_crc_fast(const unsigned char *p, size_t size) {
        uint32_t crc = 0xffffffffu;
        for (; size >= 8; p += 8, size -= 8) { uint64_t word; memcpy(&word, p, 8); crc = __crc32cd(crc, word); }
        for (; size; p++, size--) crc = __crc32cb(crc, *p);
        return ~crc;
    }
    static int lc_has_fast_crc(void) { return 1; }
    #else
    static uint32_t lc_crc_fast(const unsigned char *p, size_t size) { (void)p; (void)size; return 0; }
    static int lc_has_fast_crc(void) { return 0; }
    #endif
    """
    enum:
        LC_CRC_SHORT
    uint32_t lc_crc_fast(const uint8_t *p, size_t size) noexcept nogil
    int lc_has_fast_crc() noexcept nogil

cdef bint _has_fast_crc = lc_has_fast_crc()


cdef uint32_t crc_of(const uint8_t *data, Py_ssize_t size) except? 0:
    # crc32c is loaded at first use: importing it takes 40-70 ms, as long as the rest of the package together.
    global _crc32c
    if size <= LC_CRC_SHORT and _has_fast_crc:
        return lc_crc_fast(data, size)
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
    """Decode the head at p, which has HEADER_SIZE bytes (v2) or PREFIX_SIZE and a valid v0/v1 length."""
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
    """Return WALK_END if a whole batch of a known magic starts at p, else the reason."""
    cdef int64_t length
    cdef int8_t magic
    if left < PREFIX_SIZE:
        return WALK_SHORT
    length = <int32_t>lc_be32(p + 8)
    if length < MIN_LENGTH or length > INT32_LIMIT - LOG_OVERHEAD:  # a size is kept in 32 bits
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
    """Return WALK_END if the CRC of the whole batch at p is right, else WALK_CRC."""
    cdef Py_ssize_t size = <int32_t>lc_be32(p + 8) + LOG_OVERHEAD
    if p[16] == 2:
        return WALK_END if crc_of(p + CRC_START, size - CRC_START) == lc_be32(p + 17) else WALK_CRC
    return WALK_END if legacy_crc_of(p + 16, size - 16) == lc_be32(p + 12) else WALK_CRC


def walk(data, Py_ssize_t position, Py_ssize_t limit, Py_ssize_t max_batches, bint crc):
    """Walk batch heads. See plain.walk."""
    cdef Py_buffer view
    cdef Facts *facts
    cdef uint8_t[::1] room
    cdef const uint8_t *base
    cdef Py_ssize_t count = 0
    cdef int why = WALK_END
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        # A batch has at least 26 bytes, so the number of bytes limits the memory that is allocated.
        max_batches = min(max_batches, (limit - position) // (LOG_OVERHEAD + MIN_LENGTH) + 1)
        if max_batches < 0:
            max_batches = 0
        found = np.empty(max_batches * sizeof(Facts), np.uint8)
        room = found  # __array_interface__ of numpy crashes if there is no memory for it
        facts = <Facts *>&room[0]
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


def are_consecutive(facts, int64_t expected):
    """Return whether v2 batches continue each other from an offset on. See plain.are_consecutive."""
    cdef Py_buffer view
    cdef const Facts *at
    cdef Py_ssize_t left
    PyObject_GetBuffer(facts, &view, PyBUF_STRIDES)
    try:
        if view.strides[0] != sizeof(Facts):
            raise ValueError("facts in one piece")
        at = <const Facts *>view.buf
        left = view.shape[0]
        while left > 0:
            if at.magic != 2 or at.base_offset != expected or at.last_offset < at.base_offset:
                return False
            expected = at.last_offset + 1
            at += 1
            left -= 1
        return True
    finally:
        PyBuffer_Release(&view)


def find_batch(data, Py_ssize_t position, Py_ssize_t limit, int64_t offset):
    """Return the position of the first whole batch whose last offset is at or after offset. See plain.find_batch."""
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


def plan_run(data, Py_ssize_t position, Py_ssize_t limit, Py_ssize_t max_rows, Py_ssize_t max_bytes, int64_t end_offset,
             int64_t expected=-1, bint dense=False):
    """Return the longest run of plain data batches at position. See plain.plan_run."""
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
            if (facts.attributes & (CODEC_MASK | CONTROL_BIT) or facts.last_offset >= end_offset
                    or facts.last_offset < facts.base_offset):
                break
            if expected >= 0 and (facts.base_offset < expected or (dense and facts.base_offset > expected)):
                break
            if facts.record_count < 0 or facts.record_count > (facts.size_bytes - HEADER_SIZE) // MIN_RECORD_SIZE:
                break
            if position > start and (rows + facts.record_count > max_rows or position + facts.size_bytes - start > max_bytes):
                break
            rows += facts.record_count
            position += facts.size_bytes
            expected = facts.last_offset + 1
        return position, rows, expected
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


cdef int skip_headers(const uint8_t *p, const uint8_t *end, int32_t count, bint strict) noexcept nogil:
    """Return BODY_OK if exactly count headers fill p to end. strict: as for read_row."""
    cdef int32_t size
    while count > 0:
        p = lc_read_size(p, end, &size, strict)
        if p == NULL:
            return BODY_VARINT
        if size < 0:
            return BODY_HEADER_KEY
        if size > end - p:
            return BODY_LENGTH
        p = lc_read_size(p + size, end, &size, strict)
        if p == NULL:
            return BODY_VARINT
        if strict and size < -1:
            return BODY_BELOW_NULL
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


cdef inline int read_row(const uint8_t **cursor, const uint8_t *end, Row *row, bint strict) noexcept nogil:
    """Read the record at the cursor, and advance the cursor. Return BODY_OK or the fault. strict: see plain._read_row."""
    cdef int32_t length
    cdef const uint8_t *p = cursor[0]
    cdef const uint8_t *stop
    if p >= end:
        return BODY_SHORT
    p = lc_read_size(p, end, &length, strict)
    if p == NULL:
        return BODY_VARINT
    if length < 0 or length > end - p:
        return BODY_LENGTH
    stop = p + length
    if p >= stop:
        return BODY_SIZE
    p += 1  # the attributes of a record are unused
    p = lc_read64(p, stop, &row.timestamp_delta)
    if p == NULL:
        return BODY_VARINT
    p = lc_read_size(p, stop, &row.offset_delta, strict)
    if p == NULL:
        return BODY_VARINT
    p = lc_read_size(p, stop, &row.key_size, strict)
    if p == NULL:
        return BODY_VARINT
    if row.key_size > stop - p:
        return BODY_LENGTH
    row.key = p
    if row.key_size < 0:
        if strict and row.key_size < -1:
            return BODY_BELOW_NULL
        row.key_size = -1
    else:
        p += row.key_size
    p = lc_read_size(p, stop, &row.value_size, strict)
    if p == NULL:
        return BODY_VARINT
    if row.value_size > stop - p:
        return BODY_LENGTH
    row.value = p
    if row.value_size < 0:
        if strict and row.value_size < -1:
            return BODY_BELOW_NULL
        row.value_size = -1
    else:
        p += row.value_size
    p = lc_read_size(p, stop, &row.header_count, strict)
    if p == NULL:
        return BODY_VARINT
    row.headers = p
    cursor[0] = stop
    if row.header_count == 0:
        return BODY_OK if p == stop else BODY_SIZE
    if row.header_count < 0 or row.header_count > stop - p:
        return BODY_HEADERS
    return skip_headers(p, stop, row.header_count, strict)


cdef int fill(Columns *columns, Py_ssize_t at, const uint8_t *base, const uint8_t *p, const uint8_t *end,
              const Facts *facts, bint strict) noexcept nogil:
    """Decode the records of one batch into the rows that begin at `at`. strict: see plain._read_row."""
    cdef Row row
    cdef int wrong
    cdef Py_ssize_t stop = at + facts.record_count
    cdef bint append_time = facts.attributes & APPEND_TIME_BIT
    while at < stop:
        wrong = read_row(&p, end, &row, strict)
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
    """Check head, CRC and record count of the v2 batch at position. Raise an error if one is wrong."""
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
    """Decode a run of plain batches into a block of columns, and check their CRCs. See plain.decode_columns."""
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
                wrong = fill(&columns, at, base, base + position + HEADER_SIZE, base + position + facts.size_bytes, &facts,
                             False)
                if wrong:
                    raise bad_body(wrong, path, position)
                at += facts.record_count
                position += facts.size_bytes
            return at
        finally:
            PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&view)


cdef struct Sound:
    # See plain.check_client_batch.
    int64_t oldest, newest
    int32_t keyless


cdef bint read_sound(const uint8_t *p, int64_t size, Facts *facts, Sound *sound) except -1:
    """Return whether a plain client batch may be stored unchanged. See plain.check_client_batch."""
    cdef Row row
    cdef const uint8_t *end = p + size
    cdef int64_t timestamp, newest = -1, oldest = -1
    cdef int32_t at = 0, keyless = 0
    if check_head(p, size) != WALK_END or p[16] != 2:
        return False
    read_facts(p, 0, facts)
    if (facts.size_bytes != size or facts.attributes & ~TRANSACTIONAL_BIT or facts.record_count < 1
            or facts.last_offset - facts.base_offset != facts.record_count - 1
            or (facts.producer_id >= 0 and facts.base_sequence < 0)
            or crc_of(p + CRC_START, facts.size_bytes - CRC_START) != facts.crc):
        return False
    p += HEADER_SIZE
    while at < facts.record_count:
        if read_row(&p, end, &row, True) or row.offset_delta != at:
            return False
        timestamp = <int64_t>(<uint64_t>facts.base_timestamp + <uint64_t>row.timestamp_delta)
        if timestamp > newest:
            newest = timestamp
        if timestamp != -1 and (timestamp < oldest or oldest == -1):
            oldest = timestamp
        keyless += row.key_size < 0
        at += 1
    sound.oldest, sound.newest, sound.keyless = oldest, newest, keyless
    return p == end and newest == facts.max_timestamp


def check_client_batch(data):
    """Return the facts of a plain client batch, if it may be stored unchanged. See plain.check_client_batch."""
    cdef Py_buffer view
    cdef Facts facts
    cdef Sound sound
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if not read_sound(<const uint8_t *>view.buf, view.len, &facts, &sound):
            return None
        return facts.record_count, sound.oldest, sound.newest, sound.keyless
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
                        path=None, position=None, bint strict=False):
    """Decode decompressed records into a block of columns. See plain.decode_body_columns."""
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
                         <const uint8_t *>view.buf + view.len, &facts, strict)
        finally:
            PyBuffer_Release(&target)
        if wrong:
            raise InvalidRecordError(_body_reasons[wrong], path=path, position=position)
    finally:
        PyBuffer_Release(&view)


def skip_records(body, Py_ssize_t position, Py_ssize_t count, path=None, batch_position=None):
    """Return the position after count decompressed records, by their lengths. See plain.skip_records."""
    cdef Py_buffer view
    cdef const uint8_t *p
    cdef const uint8_t *end
    cdef int32_t length
    cdef int wrong = BODY_OK
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        p = <const uint8_t *>view.buf + position
        end = <const uint8_t *>view.buf + view.len
        while count > 0:
            if p >= end:
                wrong = BODY_SHORT
                break
            p = lc_read32(p, end, &length)
            if p == NULL:
                wrong = BODY_VARINT
                break
            if length < 0 or length > end - p:
                wrong = BODY_LENGTH
                break
            p += length
            count -= 1
        if wrong:
            raise InvalidRecordError(_body_reasons[wrong], path=path, position=batch_position)
        return p - <const uint8_t *>view.buf
    finally:
        PyBuffer_Release(&view)


cdef tuple read_headers(const uint8_t *p, const uint8_t *end, int32_t count):
    """Return the headers that skip_headers() has checked."""
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


cdef int64_t offset_of(const Facts *facts, const Row *row) noexcept nogil:
    return <int64_t>(<uint64_t>facts.base_offset + <uint64_t><int64_t>row.offset_delta)


cdef int64_t timestamp_of(const Facts *facts, const Row *row) noexcept nogil:
    if facts.attributes & APPEND_TIME_BIT:
        return facts.max_timestamp
    return <int64_t>(<uint64_t>facts.base_timestamp + <uint64_t>row.timestamp_delta)


cdef Record build_record(const Row *row, const Facts *facts, const uint8_t *end):
    cdef Record record = Record.__new__(Record)
    record.offset = offset_of(facts, row)
    record.timestamp_ms = timestamp_of(facts, row)
    record.key = None if row.key_size < 0 else PyBytes_FromStringAndSize(<char *>row.key, row.key_size)
    record.value = None if row.value_size < 0 else PyBytes_FromStringAndSize(<char *>row.value, row.value_size)
    record.headers = _no_headers if row.header_count == 0 else read_headers(row.headers, end, row.header_count)
    return record


cdef TopicRecord build_placed(object topic, int32_t partition, const Row *row, const Facts *facts, const uint8_t *end):
    """Return the result of placed() for build_record(), without creating the Record."""
    cdef TopicRecord record = TopicRecord.__new__(TopicRecord)
    record.topic = topic
    record.partition = partition
    record.offset = offset_of(facts, row)
    record.timestamp_ms = timestamp_of(facts, row)
    record.key = None if row.key_size < 0 else PyBytes_FromStringAndSize(<char *>row.key, row.key_size)
    record.value = None if row.value_size < 0 else PyBytes_FromStringAndSize(<char *>row.value, row.value_size)
    record.headers = _no_headers if row.header_count == 0 else read_headers(row.headers, end, row.header_count)
    return record


cdef int append_placed(list records, object topic, int32_t partition, const uint8_t *p, const uint8_t *end,
                       const Facts *facts) except -1:
    cdef Row row
    cdef int wrong
    cdef int32_t left = facts.record_count
    while left > 0:
        wrong = read_row(&p, end, &row, False)
        if wrong:
            return wrong
        records.append(build_placed(topic, partition, &row, facts, p))
        left -= 1
    return BODY_OK if p == end else BODY_LEFT


cdef int append_objects(list records, const uint8_t *p, const uint8_t *end, const Facts *facts) except -1:
    cdef Row row
    cdef int wrong
    cdef int32_t left = facts.record_count
    while left > 0:
        wrong = read_row(&p, end, &row, False)
        if wrong:
            return wrong
        records.append(build_record(&row, facts, p))
        left -= 1
    return BODY_OK if p == end else BODY_LEFT


def decode_objects(data, Py_ssize_t position, Py_ssize_t limit, path=None):
    """Decode a run of plain batches to a list of Record, and check their CRCs. See plain.decode_objects."""
    return decode_run(data, position, limit, path, None, -1)


def decode_topic_records(data, Py_ssize_t position, Py_ssize_t limit, topic not None, int32_t partition, path=None):
    """Decode them to a list of TopicRecord. See plain.decode_topic_records."""
    return decode_run(data, position, limit, path, topic, partition)


cdef list decode_run(data, Py_ssize_t position, Py_ssize_t limit, path, topic, int32_t partition):
    """Return a list of Record, or of TopicRecord if a topic is given."""
    cdef Py_buffer view
    cdef Facts facts
    cdef const uint8_t *base
    cdef const uint8_t *body
    cdef const uint8_t *end
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
            body = base + position + HEADER_SIZE
            end = base + position + facts.size_bytes
            if topic is None:
                wrong = append_objects(records, body, end, &facts)
            else:
                wrong = append_placed(records, topic, partition, body, end, &facts)
            if wrong:
                raise bad_body(wrong, path, position)
            position += facts.size_bytes
        return records
    finally:
        PyBuffer_Release(&view)


def decode_body_objects(body, int32_t count, int64_t base_offset, int64_t base_timestamp, append_timestamp, path=None,
                        position=None):
    """Decode decompressed records to a list of Record. See plain.decode_body_objects."""
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


def read_one(data, Py_ssize_t position, Py_ssize_t limit, int64_t offset, path=None, int64_t end_offset=-1,
             bint dense=False):
    """Return the first record at or after offset if a plain batch contains it, else the position at which to continue. See
    plain.read_one.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return one(<const uint8_t *>view.buf, position, min(limit, view.len), offset, path, end_offset, dense)
    finally:
        PyBuffer_Release(&view)


cdef bint is_followed(const uint8_t *base, Py_ssize_t behind, Py_ssize_t limit, int64_t last_offset, int64_t end_offset,
                      bint dense) noexcept nogil:
    cdef int64_t following
    if behind + 8 <= limit:
        following = <int64_t>lc_be64(base + behind)
    elif behind == limit:
        following = end_offset
    else:
        return False
    return following - 1 == last_offset if dense else following > last_offset


cdef object one(const uint8_t *base, Py_ssize_t position, Py_ssize_t limit, int64_t offset, path, int64_t end_offset,
                bint dense):
    cdef Facts facts
    cdef Row row
    cdef const uint8_t *p
    cdef const uint8_t *end
    cdef int64_t before
    cdef int32_t left
    cdef int wrong
    position = seek(base, position, limit, offset)
    if position >= limit or check_head(base + position, limit - position) != WALK_END or base[position + 16] != 2:
        return position
    if lc_be16(base + position + CRC_START) & (CODEC_MASK | CONTROL_BIT):
        return position
    check_whole(base, position, limit, &facts, path)
    if facts.record_count < 0 or facts.record_count > (facts.size_bytes - HEADER_SIZE) // MIN_RECORD_SIZE:
        raise bad_body(BODY_COUNT, path, position)
    if not is_followed(base, position + facts.size_bytes, limit, facts.last_offset, end_offset, dense):
        return position
    p = base + position + HEADER_SIZE
    end = base + position + facts.size_bytes
    before = <int64_t>(<uint64_t>offset - <uint64_t>facts.base_offset)
    # A batch of n records whose last delta is n - 1 has no gaps, so the record wanted is found by skipping over the
    # others: of 120 records, that is 60 lengths instead of 360 varints on average.
    if 0 < before < facts.record_count and <int32_t>lc_be32(base + position + 23) == facts.record_count - 1:
        p = lc_skip(p, end, before)
        if p != NULL and read_row(&p, end, &row, False) == BODY_OK and offset_of(&facts, &row) == offset:
            return build_record(&row, &facts, p)
        p = base + position + HEADER_SIZE
    left = facts.record_count
    while left > 0:
        wrong = read_row(&p, end, &row, False)
        if wrong:
            raise bad_body(wrong, path, position)
        if offset_of(&facts, &row) >= offset:
            return build_record(&row, &facts, p)
        left -= 1
    if p != end:
        raise bad_body(BODY_LEFT, path, position)
    return position + facts.size_bytes


def get_one(index, Py_ssize_t entries, data, Py_ssize_t limit, int64_t base_offset, int64_t offset, path=None,
            int64_t end_offset=-1, bint dense=False):
    """Call start_position() and read_one(). See plain.get_one."""
    cdef Py_buffer index_view, view
    cdef Py_ssize_t position
    PyObject_GetBuffer(index, &index_view, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            limit = min(limit, view.len)
            position = start(&index_view, entries, <const uint8_t *>view.buf, limit, base_offset, offset)
            return one(<const uint8_t *>view.buf, position, limit, offset, path, end_offset, dense)
        finally:
            PyBuffer_Release(&view)
    finally:
        PyBuffer_Release(&index_view)


def search_offsets(data, Py_ssize_t count, int32_t target):
    """Return the slot of the greatest offset index entry at or below target, else -1. See plain.search_offsets."""
    cdef Py_buffer view
    cdef Py_ssize_t slot
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    slot = find_slot(<const uint8_t *>view.buf, min(count, view.len // 8), target)
    PyBuffer_Release(&view)
    return slot


cdef Py_ssize_t find_slot(const uint8_t *base, Py_ssize_t count, int32_t target) noexcept nogil:
    cdef Py_ssize_t low = 0, middle
    while low < count:
        middle = (low + count) >> 1
        if <int32_t>lc_be32(base + middle * 8) <= target:
            low = middle + 1
        else:
            count = middle
    return low - 1


def start_position(index, Py_ssize_t entries, data, Py_ssize_t limit, int64_t base_offset, int64_t offset):
    """Return the position at which the search for an offset in a segment starts. See plain.start_position."""
    cdef Py_buffer index_view, view
    PyObject_GetBuffer(index, &index_view, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            return start(&index_view, entries, <const uint8_t *>view.buf, min(limit, view.len), base_offset, offset)
        finally:
            PyBuffer_Release(&view)
    finally:
        PyBuffer_Release(&index_view)


cdef Py_ssize_t start(const Py_buffer *index, Py_ssize_t entries, const uint8_t *base, Py_ssize_t limit,
                      int64_t base_offset, int64_t offset) noexcept nogil:
    cdef Facts facts
    cdef const uint8_t *entry
    cdef int64_t before = -1, relative
    cdef Py_ssize_t position, slot
    slot = find_slot(<const uint8_t *>index.buf, min(entries, index.len // 8),
                     <int32_t>min(offset - base_offset, <int64_t>INT32_LIMIT))
    if slot < 0:
        return 0
    entry = <const uint8_t *>index.buf + slot * 8
    relative = <int32_t>lc_be32(entry)
    position = <int32_t>lc_be32(entry + 4)
    if slot:
        before = <int32_t>lc_be32(entry - 8)
    if 0 < position < limit and check_head(base + position, limit - position) == WALK_END:
        read_facts(base + position, position, &facts)
        if facts.magic == 2 and (facts.record_count < 0 or facts.last_offset < facts.base_offset):
            return 0
        if before < facts.last_offset - base_offset <= relative:
            return position
    return 0


def gather(data, positions, sizes):
    """Copy scattered slices into one buffer, one after the other. See plain.gather."""
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const int32_t[::1] where = positions
    cdef const int32_t[::1] sized = sizes
    cdef Py_ssize_t count = where.shape[0], slot
    cdef int64_t total = 0, at = 0
    cdef uint8_t[::1] room
    offsets = np.empty(count + 1, np.int32)
    cdef int32_t[::1] starts = offsets
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        for slot in range(count):
            if sized[slot] > 0:
                if where[slot] < 0 or where[slot] > view.len - sized[slot]:
                    raise ValueError("a slice is outside the data")
                total += sized[slot]
        if total > INT32_LIMIT:
            raise ValueError("more than 2^31-1 bytes in one chunk")
        slices = np.empty(total, np.uint8)
        if total:
            room = slices
            target = &room[0]
            for slot in range(count):
                starts[slot] = <int32_t>at
                if sized[slot] > 0:
                    lc_copy(target + at, base + where[slot], sized[slot])
                    at += sized[slot]
        else:
            offsets[:] = 0
        starts[count] = <int32_t>at
        return offsets, slices
    finally:
        PyBuffer_Release(&view)


def bytes_list(data, positions, sizes):
    """Return scattered slices as bytes objects. See plain.bytes_list."""
    cdef Py_buffer view
    cdef const char *base
    cdef const int32_t[::1] where = positions
    cdef const int32_t[::1] sized = sizes
    cdef Py_ssize_t count = where.shape[0], slot
    cdef list found
    if sized.shape[0] != count:
        raise ValueError("positions and sizes differ in length")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const char *>view.buf
        for slot in range(count):
            if sized[slot] > 0 and (where[slot] < 0 or where[slot] > view.len - sized[slot]):
                raise ValueError("a slice is outside the data")
        found = PyList_New(count)
        for slot in range(count):
            if sized[slot] < 0:
                piece = None
            elif sized[slot] == 0:
                piece = b""
            else:
                piece = PyBytes_FromStringAndSize(base + where[slot], sized[slot])
            Py_INCREF(piece)
            PyList_SET_ITEM(found, slot, piece)
        return found
    finally:
        PyBuffer_Release(&view)


cdef struct Head:
    int64_t base_offset, base_timestamp, max_timestamp, producer_id, now_ms
    int32_t leader_epoch, base_sequence
    int16_t producer_epoch, attributes
    Py_ssize_t batch_bytes, max_bytes


cdef int write_head(uint8_t *p, const Head *head, Py_ssize_t size, int32_t count) except -1:
    """Write the head and the CRC of the batch at p. Its records are already there."""
    write_fields(p, head, size, count)
    lc_put32(p + CRC_FIELD, crc_of(p + CRC_START, size - CRC_START))
    return 0


cdef void write_fields(uint8_t *p, const Head *head, Py_ssize_t size, int32_t count) noexcept nogil:
    """Write the head of the batch at p without its CRC."""
    lc_put64(p, <uint64_t>head.base_offset)
    lc_put32(p + 8, <uint32_t>(size - LOG_OVERHEAD))
    lc_put32(p + 12, <uint32_t>head.leader_epoch)
    p[16] = 2
    lc_put16(p + 21, <uint16_t>head.attributes)
    lc_put32(p + 23, <uint32_t>(count - 1))
    lc_put64(p + 27, <uint64_t>head.base_timestamp)
    lc_put64(p + 35, <uint64_t>head.max_timestamp)
    lc_put64(p + 43, <uint64_t>head.producer_id)
    lc_put16(p + 51, <uint16_t>head.producer_epoch)
    lc_put32(p + 53, <uint32_t>head.base_sequence)
    lc_put32(p + 57, <uint32_t>count)


cdef class _Writer:
    """The output of one encode call: batches one after the other in a bytearray that the caller owns."""

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
        """Make room for size more bytes at `at`. The buffer keeps its length between calls, so it seldom grows."""
        if self.at + size > self.capacity:
            self.capacity = max(2 * self.capacity, self.at + size + 4096)
            PyByteArray_Resize(self.out, self.capacity)
            self.base = <uint8_t *>PyByteArray_AS_STRING(self.out)
        return 0

    cdef int finish(self) except -1:
        """Compress the open batch, write its head, and start the next batch after it."""
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
        last = self.head.base_offset + self.count - 1
        if self.head.attributes & APPEND_TIME_BIT:
            self.head.max_timestamp = self.head.now_ms
        write_head(self.base + self.start, &self.head, size, self.count)
        self.batches.append((self.start, size, last, self.head.max_timestamp))
        if self.head.base_sequence >= 0:
            self.head.base_sequence = <int32_t>((<int64_t>self.head.base_sequence + self.count) & INT32_LIMIT)
        self.head.base_offset = last + 1
        self.start = self.at
        self.at += HEADER_SIZE
        self.count = 0
        return 0

    cdef int begin(self, int64_t timestamp, Py_ssize_t payload, Py_ssize_t index) except -1:
        """Open a batch for a record of about payload bytes, and close the one that would get too large."""
        cdef Py_ssize_t size = payload + OVERHEAD
        if timestamp < -1:
            raise InvalidTimestampError(f"record {index}: a timestamp is -1 or at least 0", found=timestamp)
        if self.count and (self.at - self.start + size > self.head.batch_bytes or self.count == INT32_LIMIT):
            self.finish()
        if payload > self.head.max_bytes and self.compress is None:
            raise RecordTooLargeError(f"record {index} is larger than max.message.bytes",
                                      expected=f"at most {self.head.max_bytes} bytes", found=f"{payload} bytes")
        if payload > INT32_LIMIT - 2 * HEADER_SIZE - OVERHEAD:
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

    cdef int leave(self, const uint8_t *p, int64_t count, int64_t newest) noexcept:
        """Store the values that an encoder's loop keeps in local variables."""
        self.at = p - self.base
        self.count = <int32_t>count
        self.head.max_timestamp = newest
        return 0

    cdef uint8_t *room(self) noexcept:
        """Return the limit of the open batch. A record that ends before it, OVERHEAD included, passes all checks of
        begin() except for the check of its timestamp.
        """
        cdef Py_ssize_t most = min(self.head.batch_bytes, self.head.max_bytes)
        return self.base + min(self.capacity, self.start + min(most, INT32_LIMIT - 2 * HEADER_SIZE))


cdef bytes as_bytes(value, str what, Py_ssize_t index):
    """Return the bytes of any buffer. Text is refused, because a guessed encoding would change data."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidRecordError(f"record {index}: {what} must be bytes or None", expected="bytes", found=type(value).__name__)


cdef int64_t as_timestamp(given, Py_ssize_t index) except? -2:
    if PyLong_CheckExact(given):
        try:
            return given
        except OverflowError:
            pass
    found = _layout.milliseconds(given)  # a float is refused, because its fraction would be lost
    if found is None:
        raise InvalidTimestampError(
            f"record {index}: not a timestamp",
            expected="an int of milliseconds, or a datetime with a time zone",
            found=repr(given),
        )
    return found


cdef tuple as_headers(headers, Py_ssize_t index):
    if not isinstance(headers, (tuple, list)) and isinstance(headers, _Mapping):
        headers = headers.items()
    try:
        return tuple(headers)
    except TypeError as error:
        raise InvalidRecordError(f"record {index}: headers must be a dict or (name, value) pairs",
                                 found=type(headers).__name__) from error


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


#: Positions in a layout.BatchEncoding.
cdef enum:
    BATCH_BYTES, MAX_BYTES, ATTRIBUTES, COMPRESS, REQUIRES_KEY, PRODUCER_ID, PRODUCER_EPOCH, BASE_SEQUENCE, ENCODING_FIELDS

assert _layout.BatchEncoding._fields == (
    "batch_bytes", "max_bytes", "attributes", "compress", "requires_key", "producer_id", "producer_epoch", "base_sequence")


cdef int fill_head(Head *head, int64_t base_offset, int32_t leader_epoch, int64_t now_ms, encoding) except -1:
    """Set the fields that are known before the records. `encoding` is a layout.BatchEncoding."""
    # Unpacking a subclass of tuple would create an iterator.
    if not PyTuple_Check(encoding) or PyTuple_GET_SIZE(encoding) != ENCODING_FIELDS:
        raise TypeError(f"expected a BatchEncoding, found {type(encoding).__name__}")
    head.base_offset = base_offset
    head.leader_epoch = leader_epoch
    head.now_ms = now_ms
    head.batch_bytes = <object>PyTuple_GET_ITEM(encoding, BATCH_BYTES)
    head.max_bytes = min(<Py_ssize_t><object>PyTuple_GET_ITEM(encoding, MAX_BYTES), INT32_LIMIT)
    head.attributes = <object>PyTuple_GET_ITEM(encoding, ATTRIBUTES)
    head.producer_id = <object>PyTuple_GET_ITEM(encoding, PRODUCER_ID)
    head.producer_epoch = <object>PyTuple_GET_ITEM(encoding, PRODUCER_EPOCH)
    head.base_sequence = <object>PyTuple_GET_ITEM(encoding, BASE_SEQUENCE)
    return 0


def encode_records(bytearray out, records, int64_t base_offset, int32_t leader_epoch, int64_t now_ms, encoding):
    """Encode (key, value[, headers[, timestamp_ms]]) tuples into batches. See plain.encode_records."""
    cdef Head head
    cdef _Writer writer = _Writer.__new__(_Writer)
    cdef Py_ssize_t index = 0, fields, header_count, headers_size, key_size, value_size
    cdef int64_t timestamp
    cdef const uint8_t *key_at
    cdef const uint8_t *value_at
    cdef const uint8_t *headers_at
    cdef tuple row
    cdef bytes packed
    # While a batch is open, the locals p and number replace writer.at and writer.count. The compiler keeps locals in
    # registers, but must reload fields after each stored byte. end is NULL before the first batch.
    cdef uint8_t *p = NULL
    cdef uint8_t *end = NULL
    cdef uint8_t *next_p
    cdef int64_t number = 0, base_timestamp = 0, newest = 0
    cdef Py_ssize_t payload
    cdef bint requires_key
    fill_head(&head, base_offset, leader_epoch, now_ms, encoding)
    requires_key = <object>PyTuple_GET_ITEM(encoding, REQUIRES_KEY)
    writer.open(out, &head, <object>PyTuple_GET_ITEM(encoding, COMPRESS))
    for record in records:
        if base_timestamp == now_ms:
            next_p = lc_write_pair(p, end, record, number)
            if next_p != NULL:
                p = next_p
                number += 1
                index += 1
                continue
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
            if requires_key:
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
                headers = as_headers(headers, index)
                header_count = PyTuple_GET_SIZE(headers)
                packed = pack_headers(headers, index)
                headers_size = PyBytes_GET_SIZE(packed)
                headers_at = <const uint8_t *>PyBytes_AS_STRING(packed)
            if fields > 3:
                given = <object>PyTuple_GET_ITEM(row, 3)
                if given is not None:
                    timestamp = as_timestamp(given, index)
        payload = max(key_size, 0) + max(value_size, 0) + headers_size
        if timestamp < -1 or end - p < payload + OVERHEAD:
            if end != NULL:
                writer.leave(p, number, newest)
            writer.begin(timestamp, payload, index)
            p, end, number = writer.base + writer.at, writer.room(), writer.count
            base_timestamp, newest = writer.head.base_timestamp, writer.head.max_timestamp
        elif timestamp > newest:
            newest = timestamp
        p = lc_write_record(p, timestamp - base_timestamp, number, key_at, key_size, value_at, value_size, header_count,
                            headers_at, headers_size)
        number += 1
        index += 1
    if end != NULL:
        writer.leave(p, number, newest)
    writer.finish()
    return writer.start, writer.batches


def encode_columns(bytearray out, columns, int64_t base_offset, int32_t leader_epoch, int64_t now_ms, encoding):
    """Encode columns into batches. See plain.encode_columns."""
    cdef Head head
    cdef _Writer writer = _Writer.__new__(_Writer)
    cdef Py_ssize_t key_size, value_size
    cdef int64_t timestamp, row = 0, first, number = 0, newest = 0
    cdef const uint8_t[::1] key_data, value_data, key_nulls, value_nulls
    cdef const int64_t[::1] key_edges, value_edges, times
    cdef LcColumn key_column, value_column
    cdef const int64_t *times_at = NULL
    cdef uint8_t *p = NULL
    cdef uint8_t *end = NULL
    cdef Py_ssize_t count
    keys, values, timestamps_ms, count = columns
    fill_head(&head, base_offset, leader_epoch, now_ms, encoding)
    writer.open(out, &head, <object>PyTuple_GET_ITEM(encoding, COMPRESS))
    key_column.data = value_column.data = NULL
    key_column.edges = value_column.edges = NULL
    key_column.nulls = value_column.nulls = NULL
    if count <= 0:
        return 0, []
    if keys is not None:
        key_data, key_edges = keys[0], keys[1]
        assert key_edges.shape[0] > count and key_edges[count] <= key_data.shape[0], "the caller has checked the keys"
        key_column.edges = &key_edges[0]
        if key_data.shape[0]:
            key_column.data = &key_data[0]
        if keys[2] is not None:
            key_nulls = keys[2]
            assert key_nulls.shape[0] >= count, "one for each key"
            key_column.nulls = &key_nulls[0]
    if values is not None:
        value_data, value_edges = values[0], values[1]
        assert value_edges.shape[0] > count and value_edges[count] <= value_data.shape[0], "the caller has checked"
        value_column.edges = &value_edges[0]
        if value_data.shape[0]:
            value_column.data = &value_data[0]
        if values[2] is not None:
            value_nulls = values[2]
            assert value_nulls.shape[0] >= count, "one for each value"
            value_column.nulls = &value_nulls[0]
    if timestamps_ms is not None:
        times = timestamps_ms
        assert times.shape[0] >= count, "one for each record"
        times_at = &times[0]
    if <object>PyTuple_GET_ITEM(encoding, REQUIRES_KEY):
        for row in range(count):
            if lc_cell(&key_column, row) < 0:
                raise InvalidRecordError(f"record {row}: a compacted topic takes no record without a key")
        row = 0
    while row < count:
        key_size, value_size = lc_cell(&key_column, row), lc_cell(&value_column, row)
        timestamp = times_at[row] if times_at != NULL else now_ms
        if end != NULL:
            writer.leave(p, number, newest)
        writer.begin(timestamp, max(key_size, 0) + max(value_size, 0), row)
        end, number, newest = writer.room(), writer.count, writer.head.max_timestamp
        p = lc_write_record(writer.base + writer.at, timestamp - writer.head.base_timestamp, number,
                            key_column.data + key_column.edges[row] if key_size > 0 else NULL, key_size,
                            value_column.data + value_column.edges[row] if value_size > 0 else NULL, value_size, 0,
                            NULL, 0)
        first = row
        row += 1
        p = lc_write_rows(p, end, key_column, value_column, times_at, &newest, writer.head.base_timestamp, &row, count,
                          number + 1)
        number += row - first
    writer.leave(p, number, newest)
    writer.finish()
    return writer.start, writer.batches


def encode_one(tuple record not None, int64_t base_offset, int32_t leader_epoch, int64_t now_ms, encoding):
    """Encode one record as a batch of its own. See plain.encode_one."""
    cdef Head head
    cdef Py_ssize_t key_size = -1, value_size = -1, payload = 0
    cdef int64_t timestamp = now_ms
    cdef int overflow = 0
    cdef const uint8_t *key_at = NULL
    cdef const uint8_t *value_at = NULL
    cdef uint8_t *p
    cdef Py_ssize_t size
    cdef bint common
    key, value, headers, timestamp_ms = record
    fill_head(&head, base_offset, leader_epoch, now_ms, encoding)
    # The usual case: the record is encoded in place. Unusual and invalid records are encoded by encode_records().
    common = <object>PyTuple_GET_ITEM(encoding, COMPRESS) is None and (headers is None or headers is _no_headers)
    if key is not None:
        common = common and PyBytes_CheckExact(key)
    else:
        common = common and not <object>PyTuple_GET_ITEM(encoding, REQUIRES_KEY)
    common = common and (value is None or PyBytes_CheckExact(value))
    if common and timestamp_ms is not None:
        common = PyLong_CheckExact(timestamp_ms)
        if common:
            timestamp = PyLong_AsLongLongAndOverflow(timestamp_ms, &overflow)
    if common and not overflow and timestamp >= -1:
        if key is not None:
            key_size = PyBytes_GET_SIZE(key)
            key_at = <const uint8_t *>PyBytes_AS_STRING(key)
            payload = key_size
        if value is not None:
            value_size = PyBytes_GET_SIZE(value)
            value_at = <const uint8_t *>PyBytes_AS_STRING(value)
            payload += value_size
        # After the length: attributes, two deltas and a header count of one byte each, key and value.
        size = 4 + lc_size(lc_zigzag(key_size)) + lc_size(lc_zigzag(value_size)) + payload
        size += HEADER_SIZE + lc_size(<uint64_t>size << 1)
        if size <= min(head.max_bytes, INT32_LIMIT - 2 * HEADER_SIZE - OVERHEAD):
            encoded = PyBytes_FromStringAndSize(NULL, size)
            p = <uint8_t *>PyBytes_AS_STRING(encoded)
            lc_write_record(p + HEADER_SIZE, 0, 0, key_at, key_size, value_at, value_size, 0, NULL, 0)
            head.base_timestamp = timestamp
            head.max_timestamp = now_ms if head.attributes & APPEND_TIME_BIT else timestamp
            write_head(p, &head, size, 1)
            return encoded, head.max_timestamp
    out = bytearray()
    size, batches = encode_records(out, (record,), base_offset, leader_epoch, now_ms, encoding)
    return PyBytes_FromStringAndSize(PyByteArray_AS_STRING(out), size), batches[0][3]


include "_requests.pxi"


include "_appending.pxi"


include "_getting.pxi"


include "_sending.pxi"


include "_iterating.pxi"


def longest_value(edges, int64_t size):
    """Return the length of the longest piece between edges; -1 if they are invalid. See plain.longest_value."""
    cdef const int64_t[::1] at = edges
    cdef Py_ssize_t count = at.shape[0], row
    cdef int64_t longest = 0
    if not count or at[0] < 0 or at[count - 1] > size:
        return -1
    with nogil:
        for row in range(1, count):
            if at[row] < at[row - 1] or at[row] > size:
                longest = -1
                break
            longest = max(longest, at[row] - at[row - 1])
    return longest


def hash_keys(data, positions, sizes, coefficients):
    """Return a hash of 128 bits for each key. See plain.hash_keys."""
    cdef Py_buffer view
    cdef const uint8_t *base
    cdef const uint8_t *key
    cdef const int32_t[::1] where = positions
    cdef const int32_t[::1] sized = sizes
    cdef const uint64_t[:, ::1] factors = coefficients
    cdef Py_ssize_t count = sized.shape[0], row
    cdef int64_t most = 4 * (factors.shape[0] - 2)
    if where.shape[0] != count or factors.shape[0] < 2 or factors.shape[1] != 4:
        raise ValueError("positions, sizes and coefficients do not fit each other")
    found = np.zeros((count, 2), np.uint64)
    cdef uint64_t[:, ::1] out = found
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        for row in range(count):
            if sized[row] < 0 or sized[row] > most:
                continue
            if sized[row] and (where[row] < 0 or where[row] > view.len - sized[row]):
                raise ValueError("a key is outside the data")
            lc_hash(base + where[row], sized[row], &factors[0, 0], &out[row, 0])
        return found
    finally:
        PyBuffer_Release(&view)


def murmur2(bytes key not None):
    return murmur2_of(<const uint8_t *>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))


cdef uint32_t murmur2_of(const uint8_t *at, Py_ssize_t size) noexcept nogil:
    cdef const uint8_t *end = at + (size & ~3)
    cdef uint32_t factor = 0x5bd1e995, found = <uint32_t>0x9747b28c ^ <uint32_t>size, mixed
    while at < end:
        mixed = (at[0] | <uint32_t>at[1] << 8 | <uint32_t>at[2] << 16 | <uint32_t>at[3] << 24) * factor
        mixed ^= mixed >> 24
        found = found * factor ^ mixed * factor
        at += 4
    size &= 3
    if size:
        if size == 3:
            found ^= <uint32_t>at[2] << 16
        if size >= 2:
            found ^= <uint32_t>at[1] << 8
        found = (found ^ at[0]) * factor
    found ^= found >> 13
    found *= factor
    return (found ^ found >> 15) & 0x7fffffff


cdef inline Py_ssize_t slot_of(uint64_t high, uint64_t slots) noexcept nogil:
    return <Py_ssize_t>((high >> 32) * slots >> 32)


cdef inline void mark(uint8_t *bits, uint64_t count, uint64_t bit) noexcept nogil:
    """Set a bit if its number is in range. An offset before the first one has a huge number."""
    if bit < count:
        bits[bit >> 3] |= 1 << (bit & 7)


cdef inline bint is_marked(const uint8_t *bits, uint64_t count, uint64_t bit) noexcept nogil:
    return bit < count and bits[bit >> 3] >> (bit & 7) & 1


def hash_run(data, Py_ssize_t position, Py_ssize_t limit, coefficients, hashes, offsets, superseded, int64_t first,
             path=None):
    """Return hashes and offsets of the keys of a run, and check its CRCs. See plain.hash_run."""
    cdef Py_buffer view
    cdef Facts facts
    cdef Row row
    cdef const uint64_t[:, ::1] factors = coefficients
    cdef uint64_t[:, ::1] out = hashes
    cdef int64_t[::1] noted = offsets
    cdef uint8_t[::1] bits = superseded
    cdef uint8_t *marks = &bits[0] if bits.shape[0] else NULL
    cdef uint64_t marked = 8 * <uint64_t>bits.shape[0]
    cdef Py_ssize_t room = noted.shape[0], taken = 0
    cdef int64_t most = 4 * (factors.shape[0] - 2), offset
    cdef bint has_long = False
    cdef const uint8_t *base
    cdef const uint8_t *p
    cdef const uint8_t *end
    cdef int32_t left
    cdef int wrong
    if factors.shape[0] < 2 or factors.shape[1] != 4 or out.shape[0] < room or out.shape[1] != 2:
        raise ValueError("coefficients, hashes and offsets do not fit each other")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        while position < limit:
            check_whole(base, position, limit, &facts, path)
            left = facts.record_count
            if left < 0 or left > room - taken:
                raise bad_body(BODY_COUNT, path, position)
            p = base + position + HEADER_SIZE
            end = base + position + facts.size_bytes
            while left > 0:
                wrong = read_row(&p, end, &row, False)
                if wrong:
                    raise bad_body(wrong, path, position)
                offset = offset_of(&facts, &row)
                if row.key_size < 0:
                    mark(marks, marked, <uint64_t>offset - <uint64_t>first)
                elif row.key_size > most:
                    has_long = True
                else:
                    lc_hash(row.key, row.key_size, &factors[0, 0], &out[taken, 0])
                    noted[taken] = offset
                    taken += 1
                left -= 1
            if p != end:
                raise bad_body(BODY_LEFT, path, position)
            position += facts.size_bytes
        return -1 if has_long else taken
    finally:
        PyBuffer_Release(&view)


cdef inline const uint8_t *read_offset(const uint8_t *p, const uint8_t *end, Row *row) noexcept nogil:
    """Read the two deltas of the record at p, and return the place after it; NULL if it is incomplete."""
    cdef int32_t length
    p = lc_read32(p, end, &length)
    if p == NULL or length < 1 or length > end - p:
        return NULL
    end = p + length
    p = lc_read64(p + 1, end, &row.timestamp_delta)
    if p == NULL or lc_read32(p, end, &row.offset_delta) == NULL:
        return NULL
    return end


def survey_run(data, Py_ssize_t position, Py_ssize_t limit, superseded, int64_t first, keep, Py_ssize_t batches,
               path=None):
    """Return which records of a run remain, by their bits, and check its CRCs. See plain.survey_run."""
    cdef Py_buffer view
    cdef Facts facts
    cdef Row row
    cdef const uint8_t[::1] bits = superseded
    cdef uint8_t[::1] stays = keep
    cdef const uint8_t *marks = &bits[0] if bits.shape[0] else NULL
    cdef uint64_t marked = 8 * <uint64_t>bits.shape[0]
    cdef Py_ssize_t rows = stays.shape[0], at = 0, batch = 0
    cdef int64_t offset
    cdef const uint8_t *base
    cdef const uint8_t *p
    cdef const uint8_t *end
    cdef const uint8_t *behind
    cdef int32_t left
    cdef int wrong
    found = np.zeros((batches, 3), np.int64)
    cdef int64_t[:, ::1] out = found
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        limit = min(limit, view.len)
        while position < limit:
            check_whole(base, position, limit, &facts, path)
            left = facts.record_count
            if left < 0 or left > rows - at or batch == batches:
                raise bad_body(BODY_COUNT, path, position)
            p = base + position + HEADER_SIZE
            end = base + position + facts.size_bytes
            while left > 0:
                behind = read_offset(p, end, &row)
                if behind == NULL:
                    raise bad_body(BODY_LENGTH, path, position)
                offset = offset_of(&facts, &row)
                stays[at] = not is_marked(marks, marked, <uint64_t>offset - <uint64_t>first)
                if stays[at]:
                    wrong = read_row(&p, end, &row, False)
                    if wrong:
                        raise bad_body(wrong, path, position)
                    if out[batch, 0] == 0:
                        out[batch, 2] = timestamp_of(&facts, &row)
                    out[batch, 0] += 1
                    out[batch, 1] += row.value_size < 0
                p = behind
                at += 1
                left -= 1
            if p != end:
                raise bad_body(BODY_LEFT, path, position)
            batch += 1
            position += facts.size_bytes
        return found
    finally:
        PyBuffer_Release(&view)


#: Number of rows that a slot is prefetched in advance, because a table is larger than the processor's cache.
cdef enum:
    AHEAD = 12


def map_put(slots, hashes, offsets, Py_ssize_t used, Py_ssize_t most, superseded, int64_t first):
    """Store the offset of each key, and mark the offsets that it supersedes. See plain.map_put."""
    cdef uint64_t[:, ::1] table = slots
    cdef const uint64_t[:, ::1] keys = hashes
    cdef const int64_t[::1] noted = offsets
    cdef uint8_t[::1] bits = superseded
    cdef uint8_t *marks = &bits[0] if bits.shape[0] else NULL
    cdef uint64_t marked = 8 * <uint64_t>bits.shape[0]
    cdef int64_t before
    cdef Py_ssize_t count = table.shape[0], rows = keys.shape[0], row, at
    if not 0 <= used <= most < count or count >> 32 or table.shape[1] != 3 or (rows and keys.shape[1] != 2) or noted.shape[0] != rows:
        raise ValueError("slots, hashes and offsets do not fit each other")
    with nogil:
        for row in range(rows):
            if row + AHEAD < rows:
                lc_prefetch(&table[slot_of(keys[row + AHEAD, 0], count), 0])
            at = slot_of(keys[row, 0], count)
            while table[at, 2] and (table[at, 0] != keys[row, 0] or table[at, 1] != keys[row, 1]):
                at = at + 1 if at + 1 < count else 0
            if table[at, 2] == 0:
                if used == most:
                    rows = row
                    break
                used += 1
                table[at, 0] = keys[row, 0]
                table[at, 1] = keys[row, 1]
            else:
                before = <int64_t>(table[at, 2] - 1)
                if before < noted[row]:
                    mark(marks, marked, <uint64_t>before - <uint64_t>first)
            table[at, 2] = <uint64_t>noted[row] + 1
    return rows, used


def map_move(source, slots):
    """Copy all keys of a table to a larger one, which is empty. See plain.map_move."""
    cdef const uint64_t[:, ::1] old = source
    cdef uint64_t[:, ::1] table = slots
    cdef Py_ssize_t count = table.shape[0], rows = old.shape[0], row, at, used = 0
    if rows >= count or count >> 32 or table.shape[1] != 3 or old.shape[1] != 3:
        raise ValueError("the tables do not fit each other")
    with nogil:
        for row in range(rows):
            if old[row, 2] == 0:
                continue
            at = slot_of(old[row, 0], count)
            while table[at, 2]:
                at = at + 1 if at + 1 < count else 0
            table[at, 0] = old[row, 0]
            table[at, 1] = old[row, 1]
            table[at, 2] = old[row, 2]
            used += 1
    return used


def map_get(slots, hashes):
    """Return the stored offset of each key. See plain.map_get."""
    cdef const uint64_t[:, ::1] table = slots
    cdef const uint64_t[:, ::1] keys = hashes
    cdef Py_ssize_t count = table.shape[0], rows = keys.shape[0], row, at
    if count >> 32 or table.shape[1] != 3 or (rows and keys.shape[1] != 2):
        raise ValueError("slots and hashes do not fit each other")
    found = np.empty(rows, np.int64)
    cdef int64_t[::1] out = found
    with nogil:
        for row in range(rows):
            if row + AHEAD < rows:
                lc_prefetch(&table[slot_of(keys[row + AHEAD, 0], count), 0])
            at = slot_of(keys[row, 0], count)
            while table[at, 2] and (table[at, 0] != keys[row, 0] or table[at, 1] != keys[row, 1]):
                at = at + 1 if at + 1 < count else 0
            out[row] = <int64_t>(table[at, 2] - 1)
    return found


DROP, COPY, FILTER, EMPTY = range(4)


def rewrite_batches(data, positions, actions, attributes, base_timestamps, keep, out):
    """Write the batches of a plain run without the records that compaction removes. See plain.rewrite_batches."""
    cdef Py_buffer view
    cdef Facts facts
    cdef const uint8_t *base
    cdef const int64_t[::1] where = positions
    cdef const uint8_t[::1] what = actions
    cdef const int16_t[::1] flags = attributes
    cdef const int64_t[::1] times = base_timestamps
    cdef const uint8_t[::1] kept = keep
    cdef uint8_t[::1] target = out
    cdef Py_ssize_t count = where.shape[0], batch, row = 0, used = 0, room = target.shape[0], records
    cdef int64_t newest
    cdef int32_t left
    cdef uint8_t *to
    cdef const uint8_t *p
    cdef int wrong
    if not count == what.shape[0] == flags.shape[0] == times.shape[0]:
        raise ValueError("positions, actions, attributes and times differ in length")
    found = np.zeros(count, np.int32)
    cdef int32_t[::1] sizes = found
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t *>view.buf
        for batch in range(count):
            if where[batch] < 0 or where[batch] > view.len or check_head(base + where[batch], view.len - where[batch]) != WALK_END:
                raise ValueError("a batch is outside the data")
            p = base + where[batch]
            read_facts(p, where[batch], &facts)
            records = max(facts.record_count, 0)
            if records > kept.shape[0] - row or facts.size_bytes + 14 * records > room - used:
                raise ValueError("records or room are missing")
            if what[batch] == 0:
                row += records
                continue
            to = &target[0] + used
            if what[batch] == 1:
                memcpy(to, p, facts.size_bytes)
                sizes[batch] = facts.size_bytes
            else:
                memcpy(to, p, HEADER_SIZE)
                left = 0
                sizes[batch] = HEADER_SIZE
                newest = facts.max_timestamp
                if what[batch] == 2:
                    newest = -1
                    wrong = filter_records(p + HEADER_SIZE, p + facts.size_bytes, &facts, &kept[0] + row if records else NULL,
                                           times[batch], to + HEADER_SIZE, &left, &newest, &sizes[batch])
                    if wrong:
                        raise bad_body(wrong, None, where[batch])
                    if flags[batch] & APPEND_TIME_BIT:
                        newest = facts.max_timestamp
                lc_put32(to + 8, <uint32_t>(sizes[batch] - LOG_OVERHEAD))
                lc_put16(to + 21, <uint16_t>flags[batch])
                lc_put64(to + 27, <uint64_t>times[batch])
                lc_put64(to + 35, <uint64_t>newest)
                lc_put32(to + 57, <uint32_t>left)
                lc_put32(to + 17, crc_of(to + CRC_START, sizes[batch] - CRC_START))
            used += sizes[batch]
            row += records
        return found
    finally:
        PyBuffer_Release(&view)


cdef int filter_records(const uint8_t *p, const uint8_t *end, const Facts *facts, const uint8_t *keep, int64_t base_timestamp,
                        uint8_t *to, int32_t *left, int64_t *newest, int32_t *size) noexcept nogil:
    """Copy the kept records to a buffer with room for them, each with its new timestamp delta."""
    cdef const uint8_t *stop
    cdef const uint8_t *rest
    cdef uint8_t *start = to
    cdef int32_t length, at
    cdef int64_t delta, timestamp
    cdef uint64_t moved
    cdef bint append_time = facts.attributes & APPEND_TIME_BIT
    for at in range(facts.record_count):
        p = lc_read32(p, end, &length)
        if p == NULL:
            return BODY_VARINT
        if length < 1 or length > end - p:
            return BODY_LENGTH
        stop = p + length
        if keep[at]:
            rest = lc_read64(p + 1, stop, &delta)
            if rest == NULL:
                return BODY_VARINT
            timestamp = facts.max_timestamp if append_time else <int64_t>(<uint64_t>facts.base_timestamp + <uint64_t>delta)
            if timestamp > newest[0]:
                newest[0] = timestamp
            moved = lc_zigzag(<int64_t>(<uint64_t>timestamp - <uint64_t>base_timestamp))
            to = lc_write(to, <uint64_t>(1 + lc_size(moved) + (stop - rest)) << 1)
            to[0] = p[0]
            to = lc_write(to + 1, moved)
            memcpy(to, rest, stop - rest)
            to += stop - rest
            left[0] += 1
        p = stop
    size[0] = <int32_t>(HEADER_SIZE + (to - start))
    return BODY_OK
