"""Records that the serializers of confluent-kafka have written, one topic for each type."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Self

import pytest

from netshim.testing import Kafka

confluent_kafka = pytest.importorskip("confluent_kafka")
pytest.importorskip("google.protobuf")
pytest.importorskip("confluent_kafka.schema_registry.avro")

from confluent_kafka.schema_registry import (  # noqa: E402
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import (  # noqa: E402
    AvroDeserializer,
    AvroSerializer,
)
from confluent_kafka.schema_registry.json_schema import (  # noqa: E402
    JSONDeserializer,
    JSONSerializer,
)
from confluent_kafka.schema_registry.protobuf import (  # noqa: E402
    ProtobufDeserializer,
    ProtobufSerializer,
)
from confluent_kafka.serialization import (  # noqa: E402
    MessageField,
    SerializationContext,
)
from google.protobuf import (  # noqa: E402
    descriptor_pb2,
    descriptor_pool,
    json_format,
    message_factory,
    timestamp_pb2,
)

MONEY = {
    "type": "record",
    "name": "Money",
    "namespace": "shop",
    "fields": [{"name": "cents", "type": "long"}],
}
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "price", "type": "Money"},
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
CUSTOMER = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Customer",
    "type": "object",
    "properties": {"id": {"type": "integer"}, "name": {"type": "string"}},
}
#: The values of each topic, as JSON.
VALUES: dict[str, list[Any]] = {
    "orders": [
        {
            "id": number,
            "price": {"cents": 100 * number},
            "note": "ä" if number % 2 else None,
            "at": f"2023-11-14T22:13:2{number}.000Z",
        }
        for number in range(5)
    ],
    "customers": [{"id": number, "name": f"c{number}"} for number in range(5)],
    "shipments": [
        {
            "order": number + 1,
            "weight": {"grams": str(number + 1)},
            "sent": f"2023-11-14T22:13:2{number}Z",
        }
        for number in range(5)
    ],
}


@functools.cache
def shipment_class() -> Any:
    """Return the message class Shipment.Sea, whose file imports two other files."""
    file_type = descriptor_pb2.FieldDescriptorProto
    weight = descriptor_pb2.FileDescriptorProto(
        name="shop/weight.proto", package="shop", syntax="proto3"
    )
    message = weight.message_type.add(name="Weight")
    message.field.add(
        name="grams",
        number=1,
        type=file_type.TYPE_INT64,
        label=file_type.LABEL_OPTIONAL,
    )
    shipment = descriptor_pb2.FileDescriptorProto(
        name="shop/shipment.proto",
        package="shop",
        syntax="proto3",
        dependency=["shop/weight.proto", "google/protobuf/timestamp.proto"],
    )
    shipment.message_type.add(name="Other")
    outer = shipment.message_type.add(name="Shipment")
    outer.nested_type.add(name="Air")
    sea = outer.nested_type.add(name="Sea")
    sea.field.add(
        name="order",
        number=1,
        type=file_type.TYPE_INT32,
        label=file_type.LABEL_OPTIONAL,
    )
    for number, name, kind in (
        (2, "weight", ".shop.Weight"),
        (3, "sent", ".google.protobuf.Timestamp"),
    ):
        sea.field.add(
            name=name,
            number=number,
            type=file_type.TYPE_MESSAGE,
            type_name=kind,
            label=file_type.LABEL_OPTIONAL,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for entry in (weight, shipment):
        pool.AddSerializedFile(entry.SerializeToString())
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("shop.Shipment.Sea")
    )


class SerializedTopics:
    """Topics with records that the serializers of confluent-kafka encode."""

    def __init__(self, kafka: Kafka, *, in_headers: bool = False) -> None:
        self.kafka = kafka
        self.client = SchemaRegistryClient({"url": kafka.schema_registry_url})
        self._settings: dict[str, Any] = {}
        if in_headers:
            self._settings = {"schema.id.serializer": header_schema_id_serializer}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def serializer(self, topic: str) -> Callable[..., Any]:
        """Return the serializer of a topic."""
        if topic == "customers":
            return JSONSerializer(  # type: ignore[no-any-return]
                json.dumps(CUSTOMER), self.client, conf=self._settings
            )
        if topic == "shipments":
            settings = {"use.deprecated.format": False, **self._settings}
            return ProtobufSerializer(shipment_class(), self.client, settings)  # type: ignore[no-any-return]
        self.client.register_schema("money", Schema(json.dumps(MONEY), "AVRO"))
        references = [SchemaReference("shop.Money", "money", 1)]
        schema = Schema(json.dumps(ORDER), "AVRO", references)
        return AvroSerializer(self.client, schema, conf=self._settings)  # type: ignore[no-any-return]

    def deserializer(self, topic: str) -> Callable[..., Any]:
        """Return the deserializer of a topic."""
        if topic == "customers":
            return JSONDeserializer(  # type: ignore[no-any-return]
                None, schema_registry_client=self.client
            )
        if topic == "shipments":
            return ProtobufDeserializer(  # type: ignore[no-any-return]
                shipment_class(), {"use.deprecated.format": False}, self.client
            )
        return AvroDeserializer(self.client)  # type: ignore[no-any-return]

    def produce(self, topic: str) -> None:
        """Write VALUES of a topic."""
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.kafka.bootstrap_servers, "linger.ms": 0}
        )
        serialize = self.serializer(topic)
        for value in VALUES[topic]:
            headers: list[tuple[str, bytes]] = []
            context = SerializationContext(topic, MessageField.VALUE, headers)
            given = value
            if topic == "shipments":
                given = json_format.ParseDict(value, shipment_class()())
            elif topic == "orders":
                given = {**value, "at": 1_700_000_000_000 + 1_000 * value["id"]}
            data = serialize(given, context)
            producer.produce(topic, data, str(value.get("id")), headers=headers)
        assert producer.flush(60) == 0
