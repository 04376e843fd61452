"""The compiled fast path of Producer.send(). _compiled.pyx includes this file.

The general path is in producer/producer.py, which defines the behavior. If a record is unusual, the fast path returns
None without any effect, and the general path sends the record. A record is usual if:

- the producer has no interceptors, no serializers, no transaction and no callback for all records, and its clock is the
  clock of the operating system (`_uses_fast_path`);
- key and value are bytes or None, and there are no headers and no timestamp;
- the call names the partition by a plain int, or murmur2 of the key chooses it, or the record has no key and is sent to
  the sticky partition;
- the producer is open and was created after the last fork;
- no thread waits for buffer memory, and there is memory for this record;
- no other thread holds the lock of the producer;
- the partition has an open batch, and the record fits into it. The fast path therefore neither opens nor closes a batch,
  wakes no sender thread, and does not change the sticky partition.

The fast path updates the same fields as the general path. It appends the record to its batch and its callback to the
batch's callbacks. It increases the size of the batch, the used memory and the bytes of the sticky partition. It sets the
batch of the future, and the index of the record in that batch.

Exclusion of other threads: the fast path holds the GIL from the check of the producer's lock until the last field is
updated. In between, it runs no Python code, and neither allocates nor frees an object that the garbage collector tracks.
A thread in the general path holds the lock of the producer, so the two paths exclude each other. A thread that waits for
memory has released the lock, and is listed in `waiting`.

A record of 100 bytes takes 0.4 us including the call of send(), and 1.4 us in the general path.
"""

cdef enum:
    #: sending.RECORD_BYTES and RECORD_OVERHEAD_BYTES
    SEND_RECORD_BYTES = 21
    SEND_OVERHEAD_BYTES = 43

assert (SEND_RECORD_BYTES, SEND_OVERHEAD_BYTES) == (_sending.RECORD_BYTES, _sending.RECORD_OVERHEAD_BYTES)


cdef class FutureFields:
    """See sending.FutureFields."""

    cdef public object batch
    cdef public int64_t index
    cdef public int64_t sent_ms
    cdef public int64_t key_size
    cdef public int64_t value_size


cdef class BatchFields:
    """See sending.BatchFields."""

    cdef public object delivery
    cdef public object records
    cdef public int64_t size_bytes
    cdef public int64_t limit_bytes
    cdef public int64_t max_records


cdef class QueueFields:
    """See sending.QueueFields."""

    cdef public BatchFields open_batch


cdef class AccumulatorFields:
    """See sending.AccumulatorFields."""

    cdef public int64_t used_bytes
    cdef public int64_t used_records
    cdef public object waiting


cdef class RouteFields:
    """See sending.RouteFields."""

    cdef public list queues
    cdef public QueueFields sticky
    cdef public int64_t sticky_bytes
    cdef public bint uses_murmur2


cdef class ThreadStateFields:
    """See sending.ThreadStateFields."""

    cdef public object lock
    cdef public AccumulatorFields accumulator
    cdef public bint is_closing


cdef class ProducerFields:
    """See sending.ProducerFields."""

    cdef public object _fs
    cdef public ThreadStateFields _thread_state
    cdef public dict _routes_by_topic
    cdef public bint _uses_fast_path
    cdef public object _future_type
    cdef public int64_t _max_memory_bytes
    cdef public int64_t _max_memory_records
    cdef public int64_t _max_record_bytes
    cdef public object _forks

    def _send_fast(self, topic, value, key, partition, headers, timestamp_ms, on_delivery):
        """Send a usual record. See the top of this file, and sending.ProducerFields."""
        cdef ThreadStateFields work = self._thread_state
        cdef AccumulatorFields accumulator
        cdef RouteFields route
        cdef QueueFields queue
        cdef BatchFields batch
        cdef FutureFields future
        cdef list rows
        cdef int64_t size_bytes = SEND_RECORD_BYTES, key_size = -1, value_size = -1, number = -1, now_ms
        cdef int overflow = 0
        if (not self._uses_fast_path or headers is not _no_headers or timestamp_ms is not None
                or not PyUnicode_CheckExact(topic)):
            return None
        if value is not None:
            if not PyBytes_CheckExact(value):
                return None
            value_size = PyBytes_GET_SIZE(value)
            size_bytes += value_size
        if key is not None:
            if not PyBytes_CheckExact(key):
                return None
            key_size = PyBytes_GET_SIZE(key)
            size_bytes += key_size
        if partition is not None:
            if not PyLong_CheckExact(partition):
                return None
            number = PyLong_AsLongLongAndOverflow(partition, &overflow)
            if overflow or number < 0:
                return None
        now_ms = lc_now_ms()
        if size_bytes > self._max_record_bytes or now_ms < 0 or self._fs.forks != self._forks:
            return None
        route = self._routes_by_topic.get(topic)
        if route is None:
            return None
        if number < 0 and key is not None:
            if not route.uses_murmur2:
                return None
            number = murmur2_of(<const uint8_t *>PyBytes_AS_STRING(key), key_size)
            number %= PyList_GET_SIZE(route.queues)
        if number >= PyList_GET_SIZE(route.queues):
            return None
        # Allocations come first, because they may run the garbage collector.
        row = (key, value, _no_headers, now_ms)
        future = FutureFields.__new__(self._future_type)
        entry = None
        if on_delivery is not None:
            entry = (future, on_delivery)
        if work.lock.locked():
            return None
        # From here on nothing runs Python code, until all fields are updated.
        accumulator = work.accumulator
        if (work.is_closing or accumulator.waiting
                or accumulator.used_bytes + size_bytes + SEND_OVERHEAD_BYTES > self._max_memory_bytes
                or accumulator.used_records >= self._max_memory_records):
            return None
        if number >= 0:
            queue = <QueueFields>PyList_GET_ITEM(route.queues, number)
        else:
            queue = route.sticky
            if queue is None:
                return None
        batch = queue.open_batch
        if batch is None or batch.size_bytes + size_bytes > batch.limit_bytes:
            return None
        rows = batch.records
        future.index = PyList_GET_SIZE(rows)
        if future.index >= batch.max_records:
            return None
        rows.append(row)
        delivery = batch.delivery
        if entry is not None:
            delivery.record_callbacks.append(entry)
        future.batch = delivery
        future.sent_ms = now_ms
        future.key_size = key_size
        future.value_size = value_size
        batch.size_bytes += size_bytes
        accumulator.used_bytes += size_bytes + SEND_OVERHEAD_BYTES
        accumulator.used_records += 1
        if number < 0:
            route.sticky_bytes += size_bytes
        return future


def plain_rows(list rows not None):
    """Keys and sizes of many records. See plain.plain_rows."""
    cdef Py_ssize_t count = PyList_GET_SIZE(rows), row
    cdef Py_ssize_t keyed = 0
    cdef list keys = PyList_New(count)
    cdef int64_t size_bytes
    cdef tuple record
    sizes = np.empty(count, np.int64)
    cdef int64_t[::1] out = sizes
    for row in range(count):
        given = <object>PyList_GET_ITEM(rows, row)
        if not PyTuple_CheckExact(given) or PyTuple_GET_SIZE(given) != 2:
            return None
        record = <tuple>given
        key = <object>PyTuple_GET_ITEM(record, 0)
        value = <object>PyTuple_GET_ITEM(record, 1)
        size_bytes = SEND_RECORD_BYTES
        if key is not None:
            if not PyBytes_CheckExact(key):
                return None
            size_bytes += PyBytes_GET_SIZE(key)
            keyed += 1
        if value is not None:
            if not PyBytes_CheckExact(value):
                return None
            size_bytes += PyBytes_GET_SIZE(value)
        Py_INCREF(key)
        PyList_SET_ITEM(keys, row, key)
        out[row] = size_bytes
    return keys if keyed else None, sizes
