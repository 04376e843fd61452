// Transactions of one record each of Kafka's Java producer, for tests/interop/test_interop_transactions.py and
// benchmarks/apache.py. Arguments: address, transactional id, number of transactions for warming up, number of
// measured transactions. Prints "requests N", the number of requests that the producer sent for each, and "p50 N",
// the microseconds from begin to commit.

import java.util.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.Metric;
import org.apache.kafka.common.MetricName;
import org.apache.kafka.common.serialization.*;

public class SmallTransactions {
    static double requests(Producer<String, String> producer) {
        for (Map.Entry<MetricName, ? extends Metric> each : producer.metrics().entrySet()) {
            MetricName name = each.getKey();
            if (name.name().equals("request-total") && name.group().equals("producer-metrics"))
                return (Double) each.getValue().metricValue();
        }
        throw new IllegalStateException("the producer does not count its requests");
    }

    public static void main(String[] arguments) throws Exception {
        int warm = Integer.parseInt(arguments[2]);
        int count = Integer.parseInt(arguments[3]);
        Map<String, Object> options = Map.of("bootstrap.servers", arguments[0], "transactional.id", arguments[1]);
        try (Producer<String, String> producer = new KafkaProducer<>(options, new StringSerializer(), new StringSerializer())) {
            producer.initTransactions();
            long[] times = new long[count];
            double before = 0;
            for (int turn = -warm; turn < count; turn++) {
                if (turn == 0) before = requests(producer);
                long began = System.nanoTime();
                producer.beginTransaction();
                producer.send(new ProducerRecord<>("small", 0, null, "record " + turn));
                producer.commitTransaction();
                if (turn >= 0) times[turn] = System.nanoTime() - began;
            }
            double spent = requests(producer) - before;
            Arrays.sort(times);
            System.out.println("requests " + spent / count);
            System.out.println("p50 " + times[count / 2] / 1000.0);
        }
    }
}
