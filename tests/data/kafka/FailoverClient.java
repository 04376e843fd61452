import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Produces each line of the input, or consumes in a group, while brokers fail. Arguments: role, address, topic,
 * group. tests/interop/test_interop_failover.py describes the output.
 */
public class FailoverClient {
    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[1]);
        if (arguments[0].equals("produce")) {
            produce(settings, arguments[2]);
        } else {
            consume(settings, arguments[2], arguments[3]);
        }
    }

    private static void produce(Properties settings, String topic) throws Exception {
        settings.put("acks", "all");
        settings.put("enable.idempotence", "true");
        settings.put("delivery.timeout.ms", "180000");
        settings.put("max.block.ms", "180000");
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                String value = line;
                producer.send(new ProducerRecord<>(topic, value), (place, error) ->
                    System.out.println(error == null ? "acked " + value : "failed " + value + " " + error));
            }
        }
    }

    private static void consume(Properties settings, String topic, String group) {
        settings.put("group.id", group);
        settings.put("auto.offset.reset", "earliest");
        settings.put("auto.commit.interval.ms", "200");
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            while (true) {
                consumer.poll(Duration.ofMillis(200)).forEach(record -> System.out.println(
                    "read " + record.partition() + " " + record.offset() + " " + record.value()));
            }
        }
    }
}
