// Groups of the consumer protocol (KIP-848) of Kafka's Java clients, for tests/interop/test_interop_consumer_groups.py.
// Prints one line for each result. An exception ends the program.

import java.time.Duration;
import java.util.*;
import java.util.regex.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

public class ConsumerGroups {
    static Consumer<String, String> consumer(String address, String... more) {
        Map<String, Object> options = new HashMap<>(Map.of("bootstrap.servers", address, "group.id", "g", "group.protocol", "consumer",
            "auto.offset.reset", "earliest", "enable.auto.commit", "false"));
        for (int i = 0; i < more.length; i += 2) options.put(more[i], more[i + 1]);
        return new KafkaConsumer<>(options, new StringDeserializer(), new StringDeserializer());
    }

    static Set<String> pollUntil(Map<Consumer<String, String>, Integer> wanted) {
        Set<String> values = new TreeSet<>();
        long end = System.currentTimeMillis() + 30_000;
        while (!wanted.entrySet().stream().allMatch(one -> one.getKey().assignment().size() == one.getValue())) {
            if (System.currentTimeMillis() > end) throw new IllegalStateException("assigned " + wanted.keySet().stream().map(Consumer::assignment).toList());
            for (Consumer<String, String> one : wanted.keySet())
                for (ConsumerRecord<String, String> record : one.poll(Duration.ofMillis(20))) values.add(record.value());
        }
        return values;
    }

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0];
        Map<String, Object> common = Map.of("bootstrap.servers", address);
        try (Admin admin = Admin.create(common)) {
            admin.createTopics(List.of(new NewTopic("t", 4, (short) 1))).all().get();
            System.out.println("feature " + admin.describeFeatures().featureMetadata().get().finalizedFeatures().get("group.version").maxVersionLevel());
            try (Producer<String, String> producer = new KafkaProducer<>(common, new StringSerializer(), new StringSerializer())) {
                for (int i = 0; i < 8; i++) producer.send(new ProducerRecord<>("t", i % 4, null, "value " + i));
            }
            Consumer<String, String> first = consumer(address);
            first.subscribe(List.of("t"));
            Set<String> values = pollUntil(Map.of(first, 4));
            while (values.size() < 8) for (ConsumerRecord<String, String> record : first.poll(Duration.ofSeconds(10))) values.add(record.value());
            System.out.println("read " + values.size());
            first.commitSync();
            System.out.println("committed " + first.committed(Set.of(new TopicPartition("t", 3))).get(new TopicPartition("t", 3)).offset());
            Consumer<String, String> second = consumer(address, "group.instance.id", "i", "group.remote.assignor", "range");
            second.subscribe(new SubscriptionPattern("t.*"));
            pollUntil(Map.of(first, 2, second, 2));
            Set<TopicPartition> both = new HashSet<>(first.assignment());
            both.addAll(second.assignment());
            System.out.println("shared " + both.size());
            ConsumerGroupDescription described = admin.describeConsumerGroups(List.of("g")).describedGroups().get("g").get();
            System.out.println("described " + described.groupState() + " " + described.type() + " " + described.members().size() + " " + described.partitionAssignor());
            System.out.println("listed " + admin.listGroups().all().get().iterator().next().type());
            admin.createPartitions(Map.of("t", NewPartitions.increaseTo(6))).all().get();
            pollUntil(Map.of(first, 3, second, 3));
            System.out.println("grown");
            Set<TopicPartition> held = new HashSet<>(second.assignment());
            second.close();
            second = consumer(address, "group.instance.id", "i");
            second.subscribe(List.of("t"));
            pollUntil(Map.of(first, 3, second, 3));
            System.out.println("came back to its own " + second.assignment().equals(held));
            first.close();
            pollUntil(Map.of(second, 6));
            second.commitSync(Map.of(new TopicPartition("t", 0), new OffsetAndMetadata(1)));
            System.out.println("alone");
            try (Consumer<String, String> wrong = consumer(address)) {
                wrong.subscribe(new SubscriptionPattern("("));
                wrong.poll(Duration.ofSeconds(10));
                System.out.println("no pattern is refused");
            } catch (org.apache.kafka.common.errors.InvalidRegularExpression error) {
                System.out.println("pattern refused");
            }
            second.close(CloseOptions.groupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP));
            admin.deleteConsumerGroups(List.of("g")).all().get();
            System.out.println("deleted " + admin.listGroups().all().get().size());
        }
    }
}
