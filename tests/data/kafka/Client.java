// A Kafka client in Java, for tests/interop/test_interop.py: it uses only Kafka's own classes.
// Prints one line for each result. An exception ends the program.

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;

public class Client {
    public static void main(String[] arguments) throws Exception {
        String address = arguments[0];
        Map<String, Object> common = Map.of("bootstrap.servers", address);
        try (Admin admin = Admin.create(common)) {
            admin.createTopics(List.of(new NewTopic("java", 2, (short) 1).configs(Map.of("retention.ms", "1000")))).all().get();
            System.out.println("topics " + new TreeSet<>(admin.listTopics().names().get()));
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, "java");
            Config config = admin.describeConfigs(List.of(resource)).all().get().get(resource);
            System.out.println("retention.ms " + config.get("retention.ms").value() + " " + config.get("retention.ms").source());
            System.out.println("partitions " + admin.describeTopics(List.of("java")).allTopicNames().get().get("java").partitions().size());
            System.out.println("cluster " + admin.describeCluster().clusterId().get());
            System.out.println("log dirs " + admin.describeLogDirs(List.of(1)).allDescriptions().get().get(1).size());
        }
        int sent = 0;
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            Map<String, Object> options = new HashMap<>(common);  // idempotent and acks=all, which are the defaults
            options.put("compression.type", codec);
            try (Producer<String, String> producer = new KafkaProducer<>(options, new StringSerializer(), new StringSerializer())) {
                List<java.util.concurrent.Future<RecordMetadata>> futures = new ArrayList<>();
                for (int n = 0; n < 100; n++) {
                    ProducerRecord<String, String> record = new ProducerRecord<>("java", sent % 2, 1_000_000L + sent, "key" + n, codec + " " + n);
                    record.headers().add("h", codec.getBytes(StandardCharsets.UTF_8));
                    futures.add(producer.send(record));
                    sent++;
                }
                for (var future : futures) future.get();
            }
        }
        Map<String, Object> options = new HashMap<>(common);
        options.putAll(Map.of("group.id", "java-group", "auto.offset.reset", "earliest", "enable.auto.commit", "false"));
        options.put("isolation.level", "read_committed");
        try (Consumer<String, String> consumer = new KafkaConsumer<>(options, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of("java"));
            Map<String, Integer> counts = new TreeMap<>();
            for (int got = 0; got < sent; ) {
                ConsumerRecords<String, String> records = consumer.poll(Duration.ofSeconds(10));
                if (records.isEmpty()) throw new IllegalStateException("only " + got + " came");
                for (ConsumerRecord<String, String> record : records) {
                    String codec = record.value().split(" ")[0];
                    if (!codec.equals(new String(record.headers().lastHeader("h").value()))) throw new IllegalStateException(record.toString());
                    counts.merge(codec, 1, Integer::sum);
                    got++;
                }
            }
            System.out.println("consumed " + counts);
            consumer.commitSync();
            TopicPartition first = new TopicPartition("java", 0);
            System.out.println("committed " + consumer.committed(Set.of(first)).get(first).offset());
            System.out.println("by time " + consumer.offsetsForTimes(Map.of(first, 1_000_100L)).get(first).offset());
            System.out.println("ends " + new TreeMap<>(Map.of("b", consumer.beginningOffsets(Set.of(first)).get(first), "e", consumer.endOffsets(Set.of(first)).get(first))));
        }
        try (Admin admin = Admin.create(common)) {
            System.out.println("group " + admin.describeConsumerGroups(List.of("java-group")).all().get().get("java-group").state());
            System.out.println("offsets " + admin.listConsumerGroupOffsets("java-group").partitionsToOffsetAndMetadata().get().size());
            System.out.println("newest " + admin.listOffsets(Map.of(new TopicPartition("java", 0), OffsetSpec.maxTimestamp())).all().get().get(new TopicPartition("java", 0)).offset());
            admin.deleteConsumerGroups(List.of("java-group")).all().get();
        }
    }
}
