"""The tables of the docs are correct: limits, names of other clients, and terms.

docs/limits.md is compared with the constants and settings that it names, and the names
in docs/coming-from.md with the installed clients.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

import logcore
from logcore import aio
from logcore.config import CONFIGS
from logcore.consumer.consumer import Consumer
from logcore.consumer.settings import ConsumerSettings
from logcore.producer.settings import ProducerSettings
from logcore.producer.transactional_producer import TransactionalProducer
from netshim.settings import Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLASSES: dict[str, type] = {
    "ConsumerSettings": ConsumerSettings,
    "Durability": logcore.Durability,
    "ProducerSettings": ProducerSettings,
    "Settings": Settings,
    "MaintenanceConfig": logcore.MaintenanceConfig,
}
#: Required fields, with valid values.
FURTHER_ARGUMENTS: dict[str, dict[str, object]] = {
    "transaction_timeout_ms": {"transactional_id": "t"},
}


def rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables of a page, without headings."""
    for line in (DOCS / page).read_text("utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| limit |"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def whole_number(text: str) -> int:
    return int(text.replace(",", ""))


LIMITS = list(rows("limits.md"))


def default_of(owner: str, name: str) -> Any:
    return getattr(attrs.fields(CLASSES[owner]), name).default


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row[2].strip("`"))
def test_limit_has_the_number_of_the_page(row: list[str]) -> None:
    name = row[2].strip("`")
    owner, _, field = name.rpartition(".")
    if name in CONFIGS:
        number_in_source = CONFIGS[name].default
    elif owner in CLASSES:
        number_in_source = default_of(owner, field)
    elif owner.rpartition(".")[2][:1].isupper():
        module, _, class_ = owner.rpartition(".")
        fields = attrs.fields(getattr(importlib.import_module(module), class_))
        number_in_source = getattr(fields, field).default
    else:
        number_in_source = getattr(importlib.import_module(owner), field)
    assert number_in_source == whole_number(row[1])


@pytest.mark.parametrize(
    "row",
    [row for row in LIMITS if len(row) > 3 and re.match(r"[\d,]+ (to|or)", row[3])],
    ids=lambda row: row[2].strip("`"),
)
def test_limit_can_be_set_to_the_range_of_the_page(row: list[str]) -> None:
    name = row[2].strip("`")
    numbers = [whole_number(number) for number in re.findall(r"[\d,]+", row[3])]
    if name in CONFIGS:
        assert list(CONFIGS[name].metadata["range"]) == numbers
        return
    owner, _, field = name.rpartition(".")
    class_: Any = CLASSES[owner]
    for number in numbers:
        class_(**{field: number}, **FURTHER_ARGUMENTS.get(field, {}))
    with pytest.raises(logcore.InvalidConfigError):
        class_(**{field: numbers[0] - 1}, **FURTHER_ARGUMENTS.get(field, {}))
    if len(numbers) > 1:
        with pytest.raises(logcore.InvalidConfigError):
            class_(**{field: numbers[1] + 1}, **FURTHER_ARGUMENTS.get(field, {}))


def test_topic_names_have_at_most_249_characters(tmp_path: Path) -> None:
    assert "1 to 249 characters" in (DOCS / "limits.md").read_text("utf-8")
    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("t" * 249)
        with pytest.raises(logcore.InvalidNameError):
            directory.create_topic("t" * 250)


def test_topics_have_the_retention_of_kafka_and_logs_keep_all_records(
    tmp_path: Path,
) -> None:
    with logcore.open(tmp_path / "orders-0", create=True) as log:
        assert log.config.retention_ms == log.config.retention_bytes == -1
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("orders")
        assert directory.settings("orders").retention_ms == 7 * 24 * 3_600_000


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_open_log_takes_two_descriptors(tmp_path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with logcore.open_dir(tmp_path, create=True) as directory:
        directory.create_topic("orders", partitions=10)
        before = count()
        for number in range(10):
            directory.append("orders", b"v", partition=number)
        assert count() - before == 20


#: A call of the last columns of docs/coming-from.md: object, method, arguments.
CALL = re.compile(r"\b(producer|consumer|directory|admin)\.(\w+)\(([^`]*)\)")


def calls(column: int) -> Iterator[tuple[str, str, list[str]]]:
    """Yield object, method and keywords of each call in a column of the long table."""
    for row in rows("coming-from.md"):
        if len(row) == 5 and row[0] != "task" and not row[0].startswith("-"):
            for name, method, arguments in CALL.findall(row[column]):
                yield name, method, re.findall(r"\b(\w+)=", arguments)


def check_calls(column: int, kinds: dict[str, type]) -> None:
    calls_in_column = list(calls(column))
    assert len(calls_in_column) > 15
    for name, method, keywords in calls_in_column:
        # An AttributeError shows that the page is wrong.
        called = getattr(kinds[name], method)
        try:
            parameters = inspect.signature(called).parameters
        except ValueError:  # the methods of librdkafka are written in C
            assert not [word for word in keywords if word not in called.__doc__]
            continue
        if not any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
        ):
            assert not [word for word in keywords if word not in parameters], method


def test_names_of_kafka_python_exist() -> None:
    kafka = pytest.importorskip("kafka")
    check_calls(
        1,
        {
            "producer": kafka.KafkaProducer,
            "consumer": kafka.KafkaConsumer,
            "admin": kafka.KafkaAdminClient,
        },
    )


def test_names_of_confluent_kafka_exist() -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    from confluent_kafka.admin import AdminClient

    check_calls(
        2,
        {
            "producer": confluent_kafka.Producer,
            "consumer": confluent_kafka.Consumer,
            "admin": AdminClient,
        },
    )


def test_names_of_aiokafka_exist() -> None:
    aiokafka = pytest.importorskip("aiokafka")
    from aiokafka.admin import AIOKafkaAdminClient

    check_calls(
        3,
        {
            "producer": aiokafka.AIOKafkaProducer,
            "consumer": aiokafka.AIOKafkaConsumer,
            "admin": AIOKafkaAdminClient,
        },
    )


def test_names_of_logcore_exist() -> None:
    check_calls(
        4,
        {
            "producer": TransactionalProducer,
            "consumer": Consumer,
            "directory": logcore.LogDir,
        },
    )


def test_asyncio_has_the_same_methods() -> None:
    class_pairs = {
        "producer": aio.TransactionalProducer,
        "consumer": aio.Consumer,
        "directory": aio.LogDir,
    }
    missing = {
        method for name, method, _ in calls(4) if not hasattr(class_pairs[name], method)
    }
    assert not missing


#: Figures of docs/compared.md, and the row of benchmarks/RESULTS.md with each of them.
FIGURES = {
    "58 appends": r"64 threads appending, level disk \|.*\| 58\.\d+ a sync",
    "0.38 ms (median)": r"noticed in another process, p50 \| 0\.375\ ms",
    "3.6 times": r"append, 1 a call, level os \|.*lmdb \| 3\.57x",
    "5.0\ntimes": r"append_many, 1,000 a call, level os \|.*lmdb \| 5\.01x",
    "1.48 times": r"append, 1 a call, beside lmdb with writemap \|.*\| 1\.48x",
    "1.9 times": r"read at a random offset \|.*lmdb \| 1\.89x",
    "48 ms": r"serve to first delivery acknowledged \| 48\ ms",
    "56 MB": r"memory of an idle broker's process \| 56\ MB",
}


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_of_the_comparison_is_in_the_results(figure: str) -> None:
    page = (DOCS / "compared.md").read_text("utf-8").replace("\n  ", "\n")
    assert figure in page
    results = (DOCS.parent / "benchmarks" / "RESULTS.md").read_text("utf-8")
    assert re.search(FIGURES[figure], results)


def test_readme_counts_the_compared_requests() -> None:
    conformance = (DOCS / "conformance.md").read_text("utf-8")
    counts = re.search(r"The same ([\d,]+) raw requests", conformance)
    assert counts is not None
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    assert f"{counts[1]} answers of the broker are compared" in readme


def test_terms_are_sorted_and_unique() -> None:
    terms = [row[0].strip("`*").lower() for row in rows("glossary.md")]
    assert terms[0] == "term" and len(terms) > 50
    assert terms[1:] == sorted(set(terms[1:]), key=lambda term: term.replace("-", ""))


def test_guide_names_each_extra() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))
    # snappy is empty, and java is in the row of spark.
    extras = set(project["project"]["optional-dependencies"]) - {"snappy", "java"}
    listed_extras = {row[0].strip("`") for row in rows("guide.md")}
    assert not extras - listed_extras
