// A client of a schema registry, with @kafkajs/confluent-schema-registry.
// Arguments: the URL of the registry, and values in base64 to decode. Prints JSON.
const { SchemaRegistry, SchemaType, COMPATIBILITY } = require("@kafkajs/confluent-schema-registry");

const order = { type: "record", name: "Order", namespace: "js", fields: [{ name: "amount", type: "int" }] };
const customer = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const shipment = 'syntax = "proto3"; package js; message Shipment { int32 order = 1; message Box { string label = 1; } Box box = 2; }';

async function main([url, ...values]) {
  const registry = new SchemaRegistry({ host: url });
  const found = { encoded: {}, decoded: {} };
  const cases = [
    ["avro", { type: SchemaType.AVRO, schema: JSON.stringify(order) }, { amount: 7 }],
    ["json", { type: SchemaType.JSON, schema: JSON.stringify(customer) }, { name: "anna" }],
    ["protobuf", { type: SchemaType.PROTOBUF, schema: shipment }, { order: 7, box: { label: "x" } }],
  ];
  for (const [name, schema, value] of cases) {
    const { id } = await registry.register(schema, { subject: `js-${name}`, compatibility: COMPATIBILITY.BACKWARD });
    if ((await registry.getLatestSchemaId(`js-${name}`)) !== id) throw new Error(`latest id of ${name}`);
    if ((await registry.getRegistryIdBySchema(`js-${name}`, schema)) !== id) throw new Error(`id of ${name}`);
    const data = await registry.encode(id, value);
    found.encoded[name] = data.toString("base64");
    const again = new SchemaRegistry({ host: url }); // without a cache
    found.decoded[name] = await again.decode(data);
  }
  found.others = [];
  for (const value of values) found.others.push(await registry.decode(Buffer.from(value, "base64")));
  try {
    await registry.getSchema(9999);
  } catch (error) {
    found.unknown = error.message;
  }
  console.log(JSON.stringify(found));
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
