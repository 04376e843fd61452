import java.lang.reflect.Method;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;

/**
 * Runs one operation with a Kafka client of any version since 0.11. Arguments: address, operation, then
 * "write" TOPIC, "compress" PREFIX COUNT CODEC... (writes to the topics PREFIX-CODEC), or "read" GROUP COUNT TOPIC...
 */
public class ClientLines {
    static final String STRING = "org.apache.kafka.common.serialization.String";

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        String[] more = Arrays.copyOfRange(arguments, Math.min(4, arguments.length), arguments.length);
        switch (arguments[1]) {
            case "write":
                admin(settings, arguments[2]);
                write(settings, arguments[2]);
                break;
            case "compress":
                for (String codec : more) {
                    compress(settings, arguments[2] + "-" + codec, Integer.parseInt(arguments[3]), codec);
                }
                break;
            case "read":
                for (String topic : more) {
                    read(settings, arguments[2], topic, Integer.parseInt(arguments[3]));
                }
                break;
            default:
                throw new IllegalArgumentException(arguments[1]);
        }
    }

    static void admin(Properties settings, String topic) throws Exception {
        try (AdminClient admin = AdminClient.create(settings)) {
            admin.createTopics(Collections.singleton(new NewTopic(topic, 1, (short) 1))).all().get();
            System.out.println("listed " + admin.listTopics().names().get().contains(topic));
        }
    }

    static KafkaProducer<String, String> producer(Properties settings, String name, String value) {
        Properties all = new Properties();
        all.putAll(settings);
        all.put("key.serializer", STRING + "Serializer");
        all.put("value.serializer", STRING + "Serializer");
        all.put("acks", "all");
        all.put(name, value);
        return new KafkaProducer<>(all);
    }

    static void write(Properties settings, String topic) throws Exception {
        for (String isIdempotent : new String[] {"false", "true"}) {
            try (KafkaProducer<String, String> one = producer(settings, "enable.idempotence", isIdempotent)) {
                one.send(new ProducerRecord<>(topic, "idempotent-" + isIdempotent)).get();
            }
        }
        try (KafkaProducer<String, String> one = producer(settings, "transactional.id", topic)) {
            one.initTransactions();
            one.beginTransaction();
            one.send(new ProducerRecord<>(topic, "aborted")).get();
            one.abortTransaction();
            one.beginTransaction();
            one.send(new ProducerRecord<>(topic, "committed")).get();
            one.commitTransaction();
        }
    }

    static void compress(Properties settings, String topic, int count, String codec) throws Exception {
        try (KafkaProducer<String, String> one = producer(settings, "compression.type", codec)) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int number = 0; number < count; number++) {
                sent.add(one.send(new ProducerRecord<>(topic, "" + number)));
            }
            for (Future<RecordMetadata> record : sent) {
                record.get();
            }
        }
    }

    /** poll(long) was removed in 4.0, and poll(Duration) was added in 2.0. */
    @SuppressWarnings("unchecked")
    static ConsumerRecords<String, String> poll(KafkaConsumer<String, String> consumer) throws Exception {
        try {
            Method poll = KafkaConsumer.class.getMethod("poll", Duration.class);
            return (ConsumerRecords<String, String>) poll.invoke(consumer, Duration.ofMillis(200));
        } catch (NoSuchMethodException e) {
            return (ConsumerRecords<String, String>) KafkaConsumer.class.getMethod("poll", long.class).invoke(consumer, 200L);
        }
    }

    static void read(Properties settings, String group, String topic, int count) throws Exception {
        settings.put("group.id", group + "-" + topic);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("isolation.level", "read_committed");
        settings.put("key.deserializer", STRING + "Deserializer");
        settings.put("value.deserializer", STRING + "Deserializer");
        TopicPartition partition = new TopicPartition(topic, 0);
        long position;
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.subscribe(Collections.singletonList(topic));
            for (int found = 0; found < count; ) {
                for (ConsumerRecord<String, String> record : poll(consumer)) {
                    System.out.println(topic + " " + record.value());
                    found++;
                }
            }
            consumer.commitSync();
            position = consumer.position(partition);
        }
        // Without a committed offset, this consumer would start at offset 0.
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.assign(Collections.singletonList(partition));
            System.out.println(topic + " committed " + (position > 0 && consumer.position(partition) == position));
        }
    }
}
