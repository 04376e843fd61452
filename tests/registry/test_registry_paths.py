"""Layout of a registry: paths, values, the election of a controller."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logcore.errors import CorruptRegistryError, InvalidNodeError
from logcore.registry import open_registry, paths
from logcore.registry.protocol import node_names
from logcore.testing import SimulatedDisk
from logcore.testing.processes import Chances, Machine


def test_layout_matches_the_documentation_of_kafka() -> None:
    assert paths.broker(0) == "/brokers/ids/0"
    assert paths.topic("orders") == "/brokers/topics/orders"
    assert (
        paths.partition_state("orders", 3)
        == "/brokers/topics/orders/partitions/3/state"
    )
    assert paths.member("g", "host:1-2") == "/consumers/g/ids/host:1-2"
    assert paths.owner("g", "orders", 3) == "/consumers/g/owners/orders/3"
    assert paths.offset("g", "orders", 3) == "/consumers/g/offsets/orders/3"
    assert paths.group_state("g") == "/consumers/g/group"
    assert paths.topic_config("orders") == "/config/topics/orders"
    assert paths.deletion("orders") == "/admin/delete_topics/orders"


def test_values_are_kafkas_json() -> None:
    assert paths.pack_cluster_id("abc_-1") == b'{"version":"1","id":"abc_-1"}'
    assert paths.pack_broker(
        "h", 9092, endpoints=["PLAINTEXT://h:9092"], timestamp_ms=5
    ) == (
        b'{"version":5,"host":"h","port":9092,"endpoints":["PLAINTEXT://h:9092"],"timestamp":"5"}'
    )
    assert (
        paths.pack_topic({1: [1], 0: [1, 2]})
        == b'{"version":2,"partitions":{"0":[1,2],"1":[1]},"topic_id":null}'
    )
    assert paths.pack_partition_state(
        leader=1, leader_epoch=0, isr=[1], controller_epoch=1
    ) == (b'{"controller_epoch":1,"leader":1,"version":1,"leader_epoch":0,"isr":[1]}')
    assert paths.pack_controller(1, 7) == b'{"version":1,"brokerid":1,"timestamp":"7"}'
    assert (
        paths.pack_config({"b": "2", "a": "1"})
        == b'{"version":1,"config":{"a":"1","b":"2"}}'
    )
    assert paths.pack_number(-1) == b"-1"
    assert paths.pack_consumer(
        {"b": 1, "a": 3}, pattern="static", timestamp_ms=9, members={1: "n", 0: "m"}
    ) == (
        b'{"version":1,"subscription":{"a":3,"b":1},"pattern":"static","timestamp":"9","members":{"0":"m","1":"n"}}'
    )
    assert paths.pack_owner("host-41-8f", 2) == b"host-41-8f-2"


def test_values_are_read_as_they_were_written() -> None:
    assert paths.unpack_cluster_id(paths.pack_cluster_id("x" * 22)) == "x" * 22
    assert paths.unpack_topic(paths.pack_topic({0: [1, 2], 5: []}), "/t") == {
        0: [1, 2],
        5: [],
    }
    assert paths.unpack_controller(paths.pack_controller(3, 1)) == 3
    assert paths.unpack_config(paths.pack_config({"a": "1"}), "/c") == {"a": "1"}
    assert paths.unpack_number(paths.pack_number(1 << 62), "/o") == 1 << 62
    consumer = paths.ConsumerNode({"o.*": 2}, "white_list", 7, {0: "m"})
    packed = paths.pack_consumer(
        {"o.*": 2}, pattern="white_list", timestamp_ms=7, members={0: "m"}
    )
    assert paths.unpack_consumer(packed, "/c") == consumer
    kafkas = b'{"version":1,"subscription":{"t":1},"pattern":"static","timestamp":"1416333333333"}'
    assert paths.unpack_consumer(kafkas, "/c") == paths.ConsumerNode(
        {"t": 1}, "static", 1416333333333, {}
    )
    assert paths.unpack_owner(paths.pack_owner("host-41-8f", 12)) == ("host-41-8f", 12)


@given(
    st.text(min_size=1).filter(
        lambda text: not any("\ud800" <= sign <= "\udfff" for sign in text)
    )
)
def test_any_group_name_is_one_path_element(name: str) -> None:
    element = paths.element(name)
    assert paths.element_name(element) == name
    if len(element.encode()) <= 32_000:
        assert node_names(paths.group(name)) == ("consumers", element)


@pytest.mark.parametrize(
    "act",
    [
        lambda: paths.topic(""),
        lambda: paths.broker(-1),
        lambda: paths.owner("g", "t", True),
        lambda: paths.offset("g", "t", "0"),  # type: ignore[arg-type]
        lambda: paths.pack_cluster_id("x" * 23),
        lambda: paths.pack_cluster_id("a/b"),
    ],
)
def test_invalid_paths_are_refused(act) -> None:
    with pytest.raises(InvalidNodeError):
        act()


@given(
    st.binary(max_size=40)
    | st.sampled_from(
        [
            b"{}",
            b"[]",
            b'{"partitions":3}',
            b'{"partitions":{"x":[1]}}',
            b"1",
            b'{"subscription":1}',
        ]
    )
)
def test_foreign_value_raises_a_named_error(data: bytes) -> None:
    for act in (
        lambda: paths.unpack_cluster_id(data),
        lambda: paths.unpack_topic(data, "/t"),
        lambda: paths.unpack_controller(data),
        lambda: paths.unpack_config(data, "/c"),
        lambda: paths.unpack_number(data, "/o"),
        lambda: paths.unpack_consumer(data, "/i"),
        lambda: paths.unpack_owner(data),
    ):
        try:
            act()
        except CorruptRegistryError:
            pass


def test_each_controller_epoch_has_one_controller() -> None:
    disk = SimulatedDisk({"data": None})
    with (
        open_registry("/data", fs=disk) as first,
        open_registry("/data", fs=disk) as other,
    ):
        assert paths.elect(first, 1, 0) == 1
        assert paths.elect(other, 2, 0) is None
        assert paths.elect(first, 1, 0) is None
        first.close()
        assert paths.elect(other, 2, 0) == 2
        assert paths.unpack_controller(other.get(paths.CONTROLLER).value) == 2
        assert other.get(paths.CONTROLLER_EPOCH).value == b"2"


@pytest.mark.long
@pytest.mark.parametrize(
    "chances",
    [Chances(switch=0.4), Chances(switch=0.3, kill=0.003)],
    ids=["quiet", "kills"],
)
def test_no_two_controllers_share_an_epoch(chances: Chances) -> None:
    for seed in range(25):
        machine = Machine(
            SimulatedDisk({"data": None}, seed=seed), seed=seed, chances=chances
        )
        epochs: list[int] = []

        def run(fs, epochs=epochs) -> None:
            for _ in range(3):
                with open_registry("/data", fs=fs) as registry:
                    epoch = paths.elect(registry, 1, fs.now_ms())
                    if epoch is not None:
                        epochs.append(epoch)

        for _ in range(3):
            machine.start(run)
        machine.run()
        assert len(epochs) == len(set(epochs)), f"seed {seed}"
