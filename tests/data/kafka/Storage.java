// Kafka's own storage classes for comparison, in tests/interop/test_interop_life.py: no broker, only directories.
// One JSON request a line on stdin, {"do": name of the call, ...}, and one JSON answer a line on stdout.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.*;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.*;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Supplier;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.message.FetchResponseData;
import org.apache.kafka.common.record.*;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.server.util.KafkaScheduler;
import org.apache.kafka.storage.internals.checkpoint.OffsetCheckpointFile;
import org.apache.kafka.storage.internals.log.*;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

public class Storage {
    static final ObjectMapper JSON = new ObjectMapper();

    /** A wall clock that the test sets. The clocks that measure durations run normally. */
    static class Clock implements Time {
        long now = Time.SYSTEM.milliseconds();
        public long milliseconds() { return now; }
        public long hiResClockMs() { return Time.SYSTEM.hiResClockMs(); }
        public long nanoseconds() { return Time.SYSTEM.nanoseconds(); }
        public void sleep(long ms) { Time.SYSTEM.sleep(ms); }
        public void waitObject(Object o, Supplier<Boolean> c, long deadline) throws InterruptedException { Time.SYSTEM.waitObject(o, c, deadline); }
    }

    static final Clock clock = new Clock();
    static final KafkaScheduler scheduler = new KafkaScheduler(1);
    static final Map<String, UnifiedLog> logs = new HashMap<>();
    static final Map<String, Integer> epochs = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        PrintStream answers = System.out;
        System.setOut(System.err);
        scheduler.startup();
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = requests.readLine()) != null; ) {
            Object answer;
            try {
                answer = act(JSON.readTree(line));
            } catch (Throwable error) {
                StringWriter text = new StringWriter();
                error.printStackTrace(new PrintWriter(text));
                answer = Map.of("error", error.getClass().getSimpleName(), "trace", text.toString());
            }
            answers.println(JSON.writeValueAsString(answer));
            answers.flush();
        }
        System.exit(0);
    }

    static Object act(JsonNode request) throws Exception {
        String path = request.path("path").asText();
        UnifiedLog log = logs.get(path);
        switch (request.get("do").asText()) {
            case "dump": return dump(request.get("arguments"));
            case "now": clock.now = request.get("now").asLong(); return Map.of();
            case "open": return open(path, request);
            case "close": return close(path, log);
            case "state": return state(log);
            case "batches": return batches(log);
            case "committed": return committed(log);
            case "offsets": return offsets(log, request);
            case "append": return append(log, request);
            case "marker": return marker(log, request);
            case "epoch":
                epochs.put(path, request.get("epoch").asInt());
                log.assignEpochStartOffset(request.get("epoch").asInt(), log.logEndOffset());
                return Map.of();
            case "roll": log.roll(); return Map.of();
            case "truncate": log.truncateTo(request.get("offset").asLong()); raise(log); return Map.of();
            case "delete":
                if (request.get("offset").asLong() > log.highWatermark()) throw new org.apache.kafka.common.errors.OffsetOutOfRangeException("");
                log.maybeIncrementLogStartOffset(request.get("offset").asLong(), LogStartOffsetIncrementReason.ClientRecordDeletion);
                log.deleteOldSegments();
                return Map.of();
            case "retain": return Map.of("deleted", log.deleteOldSegments());
            case "clean": return clean(log, request);
            default: throw new IllegalArgumentException(request.toString());
        }
    }

    static LogConfig config(JsonNode request) {
        Properties properties = new Properties();
        request.path("config").fields().forEachRemaining(entry -> properties.put(entry.getKey(), entry.getValue().asText()));
        Object size = properties.remove("segment.bytes");  // the internal name allows values below the minimum of this one
        if (size != null) properties.put("internal.segment.bytes", size);
        return new LogConfig(properties);
    }

    /** Opens a log as LogManager does. The checkpoints and the marker of a clean shutdown are in the parent directory. */
    static Object open(String path, JsonNode request) throws Exception {
        File dir = new File(path);
        LogDirFailureChannel failures = new LogDirFailureChannel(1);
        TopicPartition partition = UnifiedLog.parseTopicPartitionName(dir);
        long start = checkpoint(dir, "log-start-offset-checkpoint").getOrDefault(partition, 0L);
        long recovery = checkpoint(dir, "recovery-point-offset-checkpoint").getOrDefault(partition, 0L);
        boolean clean = Files.deleteIfExists(dir.toPath().resolveSibling(".kafka_cleanshutdown"));
        if (request.has("clean")) clean = request.get("clean").asBoolean();
        dir.mkdirs();
        UnifiedLog log = UnifiedLog.create(dir, config(request), start, recovery, scheduler, new BrokerTopicStats(), clock,
            900_000, new ProducerStateManagerConfig(86_400_000, false), 600_000, failures, clean, Optional.empty(),
            new ConcurrentHashMap<>(), false, LogOffsetsListener.NO_OP_OFFSETS_LISTENER);
        if (logs.put(path, log) != null) throw new IllegalStateException("open already");
        epochs.put(path, log.latestEpoch().orElse(0));
        if (log.latestEpoch().isEmpty()) log.assignEpochStartOffset(0, log.logEndOffset());
        raise(log);
        return Map.of("clean", clean);
    }

    static Map<TopicPartition, Long> checkpoint(File dir, String name) throws IOException {
        File file = new File(dir.getParentFile(), name);
        return file.exists() ? new OffsetCheckpointFile(file, null).read() : Map.of();
    }

    /** Closes a log as LogManager does at a clean shutdown. */
    static Object close(String path, UnifiedLog log) throws Exception {
        log.close();
        logs.remove(path);
        note(log, "recovery-point-offset-checkpoint", log.recoveryPoint());
        if (log.logStartOffset() > log.logSegments().get(0).baseOffset()) note(log, "log-start-offset-checkpoint", log.logStartOffset());
        Files.write(new File(log.parentDir(), ".kafka_cleanshutdown").toPath(), new byte[0]);
        return Map.of();
    }

    static void note(UnifiedLog log, String name, long offset) throws IOException {
        Map<TopicPartition, Long> known = new HashMap<>(checkpoint(log.dir(), name));
        known.put(log.topicPartition(), offset);
        new OffsetCheckpointFile(new File(log.parentDir(), name), null).write(known);
    }

    /** Raises the high watermark to the log end, because there is no other replica. */
    static void raise(UnifiedLog log) throws IOException {
        log.updateHighWatermark(log.logEndOffset());
    }

    static Object state(UnifiedLog log) throws Exception {
        Map<String, Object> found = new LinkedHashMap<>();
        found.put("log_start", log.logStartOffset());
        found.put("log_end", log.logEndOffset());
        found.put("high_watermark", log.highWatermark());
        found.put("last_stable", log.lastStableOffset());
        List<Object> entries = new ArrayList<>();
        log.leaderEpochCache().epochEntries().forEach(entry -> entries.add(List.of(entry.epoch, entry.startOffset)));
        found.put("epochs", entries);
        Map<String, Object> producers = new TreeMap<>();
        log.producerStateManager().activeProducers().forEach((id, producer) -> {
            List<Object> known = new ArrayList<>();
            producer.batchMetadata().forEach(batch -> known.add(List.of(batch.firstSeq(), batch.lastSeq, batch.firstOffset(), batch.lastOffset)));
            producers.put(id.toString(), Map.of("epoch", producer.producerEpoch(), "batches", known, "coordinator", producer.coordinatorEpoch(),
                "open", producer.currentTxnFirstOffset().orElse(-1), "timestamp", producer.lastTimestamp()));
        });
        found.put("producers", producers);
        List<Object> aborted = new ArrayList<>(), segments = new ArrayList<>();
        for (AbortedTxn one : log.collectAbortedTransactions(log.logStartOffset(), log.logEndOffset()))
            aborted.add(List.of(one.producerId(), one.firstOffset(), one.lastOffset(), one.lastStableOffset()));
        found.put("aborted", aborted);
        for (LogSegment segment : log.logSegments()) segments.add(List.of(segment.baseOffset(), segment.size(), segment.largestTimestamp()));
        found.put("segments", segments);
        return found;
    }

    /** Returns all batches from the log start on, as a fetch reads them. */
    static Object batches(UnifiedLog log) throws Exception {
        List<Object> found = new ArrayList<>();
        for (long offset = log.logStartOffset(); offset < log.logEndOffset(); ) {
            FetchDataInfo info = log.read(offset, 1 << 20, FetchIsolation.LOG_END, true);
            long before = offset;
            for (RecordBatch batch : info.records.batches()) {
                batch.ensureValid();
                List<Object> records = new ArrayList<>();
                for (org.apache.kafka.common.record.Record record : batch) {
                    record.ensureValid();
                    List<Object> headers = new ArrayList<>();
                    for (Header header : record.headers()) headers.add(Arrays.asList(header.key(), text(header.value())));
                    records.add(Arrays.asList(record.offset(), record.timestamp(), text(record.key()), text(record.value()), headers));
                }
                Map<String, Object> row = new LinkedHashMap<>();
                row.put("base", batch.baseOffset());
                row.put("last", batch.lastOffset());
                row.put("magic", batch.magic());
                row.put("epoch", batch.partitionLeaderEpoch());
                row.put("codec", batch.compressionType().name);
                row.put("append_time", batch.timestampType() == TimestampType.LOG_APPEND_TIME);
                row.put("transactional", batch.isTransactional());
                row.put("control", batch.isControlBatch());
                row.put("horizon", batch.deleteHorizonMs().isPresent() ? batch.deleteHorizonMs().getAsLong() : null);
                row.put("producer", List.of(batch.producerId(), batch.producerEpoch(), batch.baseSequence(), batch.lastSequence()));
                row.put("max_timestamp", batch.maxTimestamp());
                row.put("records", records);
                found.add(row);
                offset = batch.nextOffset();
            }
            if (offset == before) break;
        }
        return Map.of("batches", found);
    }

    /** Returns the offsets of the records that a read_committed consumer gets. */
    static Object committed(UnifiedLog log) throws Exception {
        List<Long> found = new ArrayList<>();
        for (long offset = log.logStartOffset(), before = -1; offset > before; ) {
            before = offset;
            FetchDataInfo info = log.read(offset, 1 << 20, FetchIsolation.TXN_COMMITTED, true);
            var aborted = new PriorityQueue<>(Comparator.comparingLong((FetchResponseData.AbortedTransaction one) -> one.firstOffset()));
            info.abortedTransactions.ifPresent(aborted::addAll);
            Set<Long> producers = new HashSet<>();
            for (RecordBatch batch : info.records.batches()) {
                offset = batch.nextOffset();
                while (!aborted.isEmpty() && aborted.peek().firstOffset() <= batch.lastOffset()) producers.add(aborted.poll().producerId());
                if (batch.isControlBatch()) {
                    var records = batch.iterator();
                    if (records.hasNext() && ControlRecordType.parse(records.next().key()) == ControlRecordType.ABORT) producers.remove(batch.producerId());
                } else if (!batch.isTransactional() || !producers.contains(batch.producerId())) {
                    for (org.apache.kafka.common.record.Record record : batch) if (record.offset() >= log.logStartOffset()) found.add(record.offset());
                }
            }
        }
        return Map.of("offsets", found);
    }

    /** Returns offsets for timestamps, and the end offsets of epochs. */
    static Object offsets(UnifiedLog log, JsonNode request) throws Exception {
        List<Object> times = new ArrayList<>(), ends = new ArrayList<>();
        for (JsonNode time : request.get("times")) {
            var found = log.fetchOffsetByTimestamp(time.asLong(), Optional.empty()).timestampAndOffsetOpt();
            times.add(found.isPresent() ? found.get().offset : null);
        }
        for (JsonNode epoch : request.get("epochs")) {
            var found = log.endOffsetForEpoch(epoch.asInt());
            ends.add(found.isPresent() ? List.of(found.get().epoch(), found.get().offset()) : List.of(-1, -1));
        }
        return Map.of("times", times, "ends", ends);
    }

    static String text(ByteBuffer value) { return value == null ? null : text(Utils.toArray(value)); }

    static String text(byte[] value) { return value == null ? null : Base64.getEncoder().encodeToString(value); }

    static Object append(UnifiedLog log, JsonNode request) throws Exception {
        ByteBuffer data = ByteBuffer.wrap(request.get("data").binaryValue());
        LogAppendInfo info = log.appendAsLeader(MemoryRecords.readableRecords(data), epochs.get(request.get("path").asText()));
        raise(log);
        return Map.of("offset", info.firstOffset(), "last_offset", info.lastOffset());
    }

    static Object marker(UnifiedLog log, JsonNode request) throws Exception {
        ControlRecordType type = request.get("commit").asBoolean() ? ControlRecordType.COMMIT : ControlRecordType.ABORT;
        EndTransactionMarker marker = new EndTransactionMarker(type, request.get("coordinator").asInt());
        MemoryRecords records = MemoryRecords.withEndTransactionMarker(clock.now, request.get("producer").asLong(), (short) request.get("epoch").asInt(), marker);
        LogAppendInfo info = log.appendAsLeader(records, epochs.get(request.get("path").asText()), AppendOrigin.COORDINATOR);
        raise(log);
        return Map.of("offset", info.firstOffset(), "last_offset", info.lastOffset());
    }

    /** Runs one round of a cleaner thread over the part of the log that is cleanable now. */
    static Object clean(UnifiedLog log, JsonNode request) throws Exception {
        Optional<Long> cleaned = Optional.ofNullable(checkpoint(log.dir(), "cleaner-offset-checkpoint").get(log.topicPartition()));
        var range = LogCleanerManager.cleanableOffsets(log, cleaned, clock.now);
        LogToClean work = new LogToClean(log, range.firstDirtyOffset(), range.firstUncleanableDirtyOffset(), false);
        if (work.cleanableBytes() == 0) return Map.of("end", -1);
        SkimpyOffsetMap map = new SkimpyOffsetMap(request.path("memory").asInt(128 << 20));
        Throttler throttler = new Throttler(Double.MAX_VALUE, 300, "cleaner-io", "bytes", Time.SYSTEM);
        Cleaner cleaner = new Cleaner(0, map, 262144, Math.max(1048588, log.config().maxMessageSize()), 0.9, throttler, clock, any -> { });
        long began = System.nanoTime();
        var result = cleaner.clean(work);
        double seconds = (System.nanoTime() - began) / 1e9;
        note(log, "cleaner-offset-checkpoint", result.getKey());
        return Map.of("end", result.getKey(), "first_dirty", work.firstDirtyOffset(), "first_uncleanable", work.firstUncleanableOffset(),
            "clean_bytes", work.cleanBytes(), "cleanable_bytes", work.cleanableBytes(), "seconds", seconds,
            "read", result.getValue().messagesRead(), "written", result.getValue().messagesWritten());
    }

    /** Runs main() of the dump tool, and returns its output. */
    static Object dump(JsonNode arguments) throws Exception {
        List<String> words = new ArrayList<>();
        arguments.forEach(word -> words.add(word.asText()));
        ByteArrayOutputStream text = new ByteArrayOutputStream();
        PrintStream stream = new PrintStream(text, true, StandardCharsets.UTF_8), error = System.err;
        System.setErr(stream);
        try {
            scala.Console$.MODULE$.withErr(stream, () -> scala.Console$.MODULE$.withOut(stream, () -> {
                kafka.tools.DumpLogSegments.main(words.toArray(new String[0]));
                return null;
            }));
        } finally {
            System.setErr(error);
        }
        return Map.of("text", text.toString(StandardCharsets.UTF_8));
    }
}
