// A Java client for tests/interop/test_interop_secured_clients.py and test_interop_reauthentication.py.
// Arguments: file of settings, topic, group. Each line of the input is a number of records. The client writes
// them, reads them, and prints "read" with their values. An exception ends the program.

import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.InputStreamReader;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.serialization.*;

public class SecuredClient {
    public static void main(String[] arguments) throws Exception {
        Properties common = new Properties();
        try (FileInputStream file = new FileInputStream(arguments[0])) {
            common.load(file);
        }
        String topic = arguments[1];
        try (Admin admin = Admin.create(common)) {
            admin.createTopics(List.of(new NewTopic(topic, 1, (short) 1))).all().get();
        }
        Properties reading = new Properties();
        reading.putAll(common);
        reading.putAll(Map.of("group.id", arguments[2], "auto.offset.reset", "earliest"));
        try (Producer<String, String> producer = new KafkaProducer<>(common, new StringSerializer(), new StringSerializer());
                Consumer<String, String> consumer = new KafkaConsumer<>(reading, new StringDeserializer(), new StringDeserializer())) {
            consumer.subscribe(List.of(topic));
            BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
            int sent = 0;
            for (String line = input.readLine(); line != null; line = input.readLine()) {
                int count = Integer.parseInt(line);
                List<Future<RecordMetadata>> futures = new ArrayList<>();
                for (int n = 0; n < count; n++) {
                    futures.add(producer.send(new ProducerRecord<>(topic, Integer.toString(sent++))));
                }
                for (Future<RecordMetadata> future : futures) future.get();
                List<String> values = new ArrayList<>();
                while (values.size() < count) {
                    for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(100))) {
                        values.add(record.value());
                    }
                }
                System.out.println("read " + String.join(" ", values));
            }
        }
    }
}
