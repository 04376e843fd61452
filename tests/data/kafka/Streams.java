// Counts words with Kafka Streams, exactly once, for tests/interop/test_interop_frameworks.py.
// Arguments: address, folder of the state, name of this instance. Runs until it is killed, or until standard input ends.
// The topics exist before the start: "text", and "counts", which gets the count of a word whenever it changes.

import java.util.*;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.*;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler;
import org.apache.kafka.streams.kstream.*;

public class Streams {
    public static void main(String[] arguments) throws Exception {
        Properties options = new Properties();
        options.put(StreamsConfig.APPLICATION_ID_CONFIG, "words");
        options.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        options.put(StreamsConfig.STATE_DIR_CONFIG, arguments[1]);
        options.put(StreamsConfig.CLIENT_ID_CONFIG, arguments[2]);
        options.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        options.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 100);
        options.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        options.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        options.put("session.timeout.ms", 6000);
        options.put("producer.transaction.timeout.ms", 5000);
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, String> text = builder.stream("text");
        text.flatMapValues(line -> Arrays.asList(line.split(" ")))
            .groupBy((key, word) -> word)
            .count(Materialized.as("counts-store"))
            .toStream()
            .mapValues(count -> Long.toString(count))
            .to("counts");
        try (KafkaStreams streams = new KafkaStreams(builder.build(), options)) {
            streams.setUncaughtExceptionHandler(error -> {
                error.printStackTrace();
                return StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse.REPLACE_THREAD;
            });
            streams.setStateListener((now, before) -> System.out.println(now));
            streams.start();
            while (System.in.read() >= 0) {}
        }
    }
}
