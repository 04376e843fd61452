// Produces each line of the input, or consumes in a group, while brokers fail, with kafkajs.
// Arguments: role, address, topic, group. tests/interop/test_interop_failover.py describes the output.
const readline = require("readline");
const { Kafka, logLevel } = require("kafkajs");

async function produce(kafka, topic) {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  // kafkajs acknowledges the records of a request to several leaders although one of them has moved. So each
  // request contains the records of one partition.
  let partition = 0;
  let waiting = [];
  let isOver = false;
  let wake = () => {};
  readline
    .createInterface({ input: process.stdin })
    .on("line", (line) => (waiting.push(line), wake()))
    .on("close", () => ((isOver = true), wake()));
  for (;;) {
    if (!waiting.length) {
      if (isOver) break;
      await new Promise((resolve) => (wake = resolve));
      continue;
    }
    const values = waiting;
    waiting = [];
    partition = 1 - partition;
    await producer.send({ topic, acks: -1, messages: values.map((value) => ({ value, partition })) });
    values.forEach((value) => console.log(`acked ${value}`));
  }
  await producer.disconnect();
}

async function consume(kafka, topic, groupId) {
  const consumer = kafka.consumer({ groupId, sessionTimeout: 10000 });
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  await consumer.run({
    autoCommitInterval: 200,
    eachMessage: async ({ partition, message }) => console.log(`read ${partition} ${message.offset} ${message.value}`),
  });
}

async function main([role, address, topic, group]) {
  const retry = { retries: 1000, initialRetryTime: 100, maxRetryTime: 1000 };
  const kafka = new Kafka({ brokers: address.split(","), logLevel: logLevel.ERROR, retry });
  if (role === "produce") await produce(kafka, topic);
  else await consume(kafka, topic, group);
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
