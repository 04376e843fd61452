import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Produces a record to the topic t, or reads it until its last record, and commits. Arguments: address,
 * job, timeout of requests in ms. Prints the result, and the values that were read. The settings are
 * those of tests/support/faulted_clients.py.
 */
public class FaultedClient {
    public static void main(String[] arguments) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("request.timeout.ms", arguments[2]);
        switch (arguments[1]) {
            case "produce" -> produce(settings, false);
            case "produce-idempotent" -> produce(settings, true);
            case "consume" -> consume(settings);
            default -> throw new IllegalArgumentException(arguments[1]);
        }
    }

    private static void produce(Properties settings, boolean isIdempotent) {
        settings.put("enable.idempotence", String.valueOf(isIdempotent));
        settings.put("delivery.timeout.ms", "120000");
        settings.put("max.block.ms", "120000");
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer())) {
            producer.send(new ProducerRecord<>("t", 0, null, "new")).get();
            System.out.println("acknowledged");
        } catch (ExecutionException error) {
            System.out.println(error.getCause().getClass().getSimpleName());
        } catch (Exception error) {
            System.out.println(error.getClass().getSimpleName());
        }
    }

    private static void consume(Properties settings) {
        settings.put("group.id", "g");
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        List<String> found = new ArrayList<>();
        String result = "committed";
        try (var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of("t"));
            long end = System.currentTimeMillis() + 60_000;
            while (!found.contains("c") && System.currentTimeMillis() < end) {
                consumer.poll(Duration.ofMillis(200)).forEach(record -> found.add(record.value()));
            }
            consumer.commitSync(Duration.ofSeconds(120));
        } catch (Exception error) {
            result = error.getClass().getSimpleName();
        }
        System.out.println(result + " " + String.join(",", found));
    }
}
