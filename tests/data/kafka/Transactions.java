// Transactions of Kafka's Java clients, for tests/interop/test_interop_transactions.py.
// Prints one line for each result. An exception ends the program.

import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.ProducerFencedException;
import org.apache.kafka.common.serialization.*;

public class Transactions {
    static Producer<String, String> producer(String address, String id) {
        Map<String, Object> options = Map.of("bootstrap.servers", address, "transactional.id", id);
        Producer<String, String> made = new KafkaProducer<>(options, new StringSerializer(), new StringSerializer());
        made.initTransactions();
        return made;
    }

    static void send(Producer<String, String> producer, String value) {
        for (int partition = 0; partition < 2; partition++) producer.send(new ProducerRecord<>("t", partition, null, value));
    }

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0];
        Map<String, Object> common = Map.of("bootstrap.servers", address);
        Map<String, Object> options = new HashMap<>(common);
        options.putAll(Map.of("group.id", "g", "auto.offset.reset", "earliest", "enable.auto.commit", "false", "isolation.level", "read_committed"));
        TopicPartition first = new TopicPartition("t", 0);
        try (Admin admin = Admin.create(common)) {
            admin.createTopics(List.of(new NewTopic("t", 2, (short) 1))).all().get();
            System.out.println("feature " + admin.describeFeatures().featureMetadata().get().finalizedFeatures().get("transaction.version").maxVersionLevel());
            Producer<String, String> one = producer(address, "one");
            for (int turn = 0; turn < 5; turn++) {
                one.beginTransaction();
                send(one, "turn " + turn);
                if (turn % 2 == 0) one.commitTransaction();
                else {
                    one.flush();
                    one.abortTransaction();
                }
            }
            try (Consumer<String, String> consumer = new KafkaConsumer<>(options, new StringDeserializer(), new StringDeserializer())) {
                consumer.subscribe(List.of("t"));
                List<String> values = new ArrayList<>();
                while (values.size() < 6) {
                    ConsumerRecords<String, String> records = consumer.poll(Duration.ofSeconds(10));
                    if (records.isEmpty()) throw new IllegalStateException("only " + values + " came");
                    for (ConsumerRecord<String, String> record : records) values.add(record.value());
                }
                Collections.sort(values);
                System.out.println("read " + values);
                one.beginTransaction();
                one.sendOffsetsToTransaction(Map.of(first, new OffsetAndMetadata(7)), consumer.groupMetadata());
                one.abortTransaction();
                System.out.println("aborted " + consumer.committed(Set.of(first)).get(first));
                one.beginTransaction();
                one.sendOffsetsToTransaction(Map.of(first, new OffsetAndMetadata(8)), consumer.groupMetadata());
                one.commitTransaction();
                System.out.println("committed " + consumer.committed(Set.of(first)).get(first).offset());
            }
            one.beginTransaction();
            send(one, "open");
            one.flush();
            TransactionDescription open = admin.describeTransactions(List.of("one")).description("one").get();
            System.out.println("open " + open.state() + " " + open.topicPartitions().size());
            System.out.println("listed " + admin.listTransactions().all().get().size());
            ProducerState state = admin.describeProducers(List.of(first)).partitionResult(first).get().activeProducers().get(0);
            System.out.println("producer open " + state.currentTransactionStartOffset().isPresent() + " " + (state.producerId() == open.producerId()));
            Producer<String, String> two = producer(address, "one");
            try {
                one.commitTransaction();
                System.out.println("not fenced");
            } catch (ProducerFencedException fenced) {
                System.out.println("fenced");
            }
            two.beginTransaction();
            send(two, "last");
            two.commitTransaction();
            two.beginTransaction();
            send(two, "fenced by a tool");
            two.flush();
            admin.fenceProducers(List.of("one")).all().get();
            System.out.println("state " + admin.describeTransactions(List.of("one")).description("one").get().state());
            ProducerState stale = admin.describeProducers(List.of(first)).partitionResult(first).get().activeProducers().get(0);
            admin.abortTransaction(new AbortTransactionSpec(first, stale.producerId(), (short) stale.producerEpoch(), stale.coordinatorEpoch().getAsInt())).all().get();
            System.out.println("ends");
            one.close(Duration.ZERO);
            two.close(Duration.ZERO);
        }
    }
}
