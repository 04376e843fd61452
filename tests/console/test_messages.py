"""Pages of messages: positions, searches, single messages and exports."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet
import pytest

import logcore
from netshim.console.access import ConsoleViewer
from netshim.console.directory import DirectoryView, TimeBudget
from netshim.console.messages import MessagePage, MessageQuery, read_page
from support.consoles import ConsoleClient

START_MS = 1_700_000_000_000


def offsets(client: ConsoleClient, path: str) -> list[int]:
    return [int(row[1]) for row in client.page(path).rows()]


@pytest.fixture
def orders(logdir: logcore.LogDir) -> logcore.LogDir:
    """Append 100,000 records to three partitions, one record every 10 ms, in small
    segments.
    """
    logdir.create_topic("orders", 3, {"segment.bytes": 500_000})
    for number in range(3):
        rows = [
            (b"k%d" % index, b'{"n": %d}' % index, (), START_MS + index * 10)
            for index in range(number, 99_999, 3)
        ]
        logdir.partition("orders", number).append_many(rows)
    logdir.append("orders", b"last", partition=0, timestamp_ms=START_MS + 10**7)
    return logdir


def test_newest_messages_of_all_partitions_are_merged_by_time(
    orders: logcore.LogDir, console: ConsoleClient
) -> None:
    page = console.page("/topics/orders/messages")
    rows = page.rows()
    assert len(rows) == 50
    assert rows[0][4] == "last"
    assert [row[4] for row in rows[1:4]] == [
        '{"n": 99998}',
        '{"n": 99997}',
        '{"n": 99996}',
    ]
    older = console.page(page.link("older →")).rows()
    assert older[0][4] == '{"n": 99949}'


def test_links_walk_through_all_messages_in_both_directions(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 2)
    for number in range(130):
        time_ms = START_MS + number
        value = b"%d" % number
        logdir.append("orders", value, partition=number % 2, timestamp_ms=time_ms)
    values: list[str] = []
    path = "/topics/orders/messages"
    while True:
        page = console.page(path)
        values += [row[4] for row in page.rows()]
        if "older →" not in page.text:
            break
        path = page.link("older →")
    assert values == [str(number) for number in reversed(range(130))]
    back: list[str] = []
    path = "/topics/orders/messages?from=oldest"
    while True:
        page = console.page(path)
        back += [row[4] for row in page.rows()]
        if "later →" not in page.text:
            break
        path = page.link("later →")
    assert back == [str(number) for number in range(130)]
    assert console.page(page.link("← older")).rows()[0][4] == "99"


@pytest.mark.long
@pytest.mark.parametrize(
    ("position", "first"),
    [
        ("33333", 33_333),
        ("0", 0),
        ("oldest", 0),
        ("2023-11-14T22:13:40.300", 10),
        ("2023-11-14T22:13:40.301Z", 11),
        ("1970-01-01", 0),
        ("9223372036854775807", None),
        ("2100-01-01", None),
    ],
)
def test_page_begins_at_an_offset_or_a_time(
    orders: logcore.LogDir, console: ConsoleClient, position: str, first: int | None
) -> None:
    shown_offsets = (
        offsets(console, f"/topics/orders/messages?partition=0&from={position}")[:1]
        if (first is not None)
        else []
    )
    assert shown_offsets == [] if first is None else [first]
    if first is None:
        text = console.page(f"/topics/orders/messages?partition=0&from={position}").text
        assert "There are no messages here" in text


def test_page_and_log_find_the_same_offset_for_a_time(
    orders: logcore.LogDir, data: Path
) -> None:
    """The search by the time index of the console does not check CRCs. It must find the
    same offset as the log.
    """
    log = orders.partition("orders", 1)
    view = DirectoryView(str(data))
    rng = random.Random(4)
    with view.open_directory(ConsoleViewer()) as directory:
        for _ in range(50):
            time_ms = START_MS + rng.randrange(-10, 1_000_100)
            query = MessageQuery(
                partitions=(1,), is_backward=False, time_ms=time_ms, count=1
            )
            page = read_page(directory, "orders", query, budget_of(view))
            offsets_of_page = [message.record.offset for message in page.messages]
            expected = log.offset_for_timestamp(time_ms)
            assert offsets_of_page == ([] if expected is None else [expected])


def budget_of(view: DirectoryView, seconds: float = 60.0) -> TimeBudget:
    return TimeBudget.of(view.fs, seconds)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_search_finds_text_in_keys_values_and_headers(
    logdir: logcore.LogDir, console: ConsoleClient, codec: str
) -> None:
    logdir.create_topic("orders", 1, {"compression.type": codec})
    log = logdir.partition("orders", 0)
    for number in range(300):
        log.append(b"nothing %d" % number, key=b"k")
    log.append(b"v", key="a Kraków key".encode())
    log.append("value of Kraków".encode(), key=b"k")
    log.append(b"v", headers=[("Kraków", b"1")])
    log.append(b"v", headers=[("h", "Kraków".encode())])
    log.append(b"krakow")
    path = "/topics/orders/messages?q=Krak%C3%B3w"
    page = console.page(path)
    assert [int(row[1]) for row in page.rows()] == [303, 302, 301, 300]
    assert "Searched to the end. 4 found" in page.text
    assert "<mark>Kraków</mark>" in page.source
    assert offsets(console, f"{path}&from=301") == [301, 302, 303]


@pytest.mark.long
@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("key=k4", [4]),
        ("key!=k4", [9, 8, 7, 6, 5, 3, 2, 1, 0]),
        ("!key", [9, 7, 5, 3, 1]),
        ("value=v8", [8]),
        ("value=", [0]),
        ("header.h=x", [9, 6, 3, 0]),
        ("header.h", [9, 6, 3, 0]),
        ("key=v4", []),
    ],
)
def test_search_finds_messages_that_fulfil_a_condition(
    logdir: logcore.LogDir,
    console: ConsoleClient,
    condition: str,
    expected: list[int],
    codec: str,
) -> None:
    logdir.create_topic("orders", 1, {"compression.type": codec})
    logdir.partition("orders", 0).append_many(
        [
            (
                None if number % 2 else b"k%d" % number,
                b"v%d" % number if number else b"",
                () if number % 3 else [("h", b"x")],
            )
            for number in range(10)
        ]
    )
    path = f"/topics/orders/messages?where={quote(condition)}"
    page = console.page(path)
    assert [int(row[1]) for row in page.rows()] == expected
    assert f"Searched to the end. {len(expected)} found" in page.text
    both = console.page(f"{path}&q=v8")
    assert [int(row[1]) for row in both.rows()] == [8] * (8 in expected)
    exported = console.get(path.replace("messages", "messages.ndjson")).source
    assert [json.loads(line)["offset"] for line in exported.splitlines()] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ("nokey=1", "expected key, value or header.NAME"),
        ("header=1", "a header has a name"),
        ("!key=1", "write != for the opposite"),
        ("value~(a+)+b", "does not search for regular expressions"),
        ("value~(", "not a regular expression"),
        ("key=" + "x" * 1_000, "expected at most 1000 characters"),
        ("key=\u202e", "expected visible characters"),
    ],
)
def test_invalid_condition_is_refused(
    orders: logcore.LogDir, console: ConsoleClient, condition: str, reason: str
) -> None:
    page = console.get(f"/topics/orders/messages?where={quote(condition)}")
    assert page.status == 400
    assert "where: " in page.text and reason in page.text


def test_condition_remains_in_links(
    orders: logcore.LogDir, console: ConsoleClient
) -> None:
    page = console.page("/topics/orders/messages?where=key!%3Dk5&partition=0")
    assert "The page is full." in page.text
    older = console.page(page.link("Continue with older messages"))
    assert "where" in page.link("Continue with older messages")
    assert int(older.rows()[0][1]) < int(page.rows()[-1][1])


def test_search_reports_its_position_and_continues(
    orders: logcore.LogDir, console: ConsoleClient
) -> None:
    console.view.search_s = 0.0
    path = "/topics/orders/messages?q=%7B%22n%22%3A+7%7D"
    pages = 0
    values: list[str] = []
    while True:
        page = console.page(path)
        pages += 1
        values += [row[4] for row in page.rows()]
        if "The search is not finished" not in page.text:
            break
        path = page.link("Continue with older messages")
    assert pages > 1
    assert values == ['{"n": 7}']


@pytest.mark.long
def test_full_page_of_a_search_continues_without_loss(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 3)
    for number in range(400):
        text = b"yes" if number % 3 else b"no"
        logdir.append("orders", b"%s %d" % (text, number), partition=number % 2)
    for start in ("newest", "oldest"):
        values: list[str] = []
        path = f"/topics/orders/messages?q=yes&from={start}"
        while True:
            page = console.page(path)
            values += [row[4] for row in page.rows()] if "Offset" in page.text else []
            if "Continue" not in page.text:
                break
            older = start == "newest"
            path = page.link(f"Continue with {'older' if older else 'later'} messages")
        found_numbers = [int(name.split()[1]) for name in values]
        assert sorted(found_numbers) == [number for number in range(400) if number % 3]
        assert len(set(found_numbers)) == len(found_numbers)


def test_search_shows_the_text_of_a_long_value(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    logdir.append("orders", "ü".encode() * 400_001 + b"needle" + b"x" * 100_000)
    page = console.page("/topics/orders/messages?q=needle")
    assert "needlexxx" in "".join(page.rows()[0][4].split())
    assert len(page.body) < 20_000


def test_message_page_shows_its_batch_and_position(
    logdir: logcore.LogDir, console: ConsoleClient, data: Path
) -> None:
    logdir.create_topic("orders", 1, {"compression.type": "zstd"})
    with logdir.producer(enable_idempotence=True) as producer:
        for _number in range(3):
            producer.send("orders", b'{"a": [1.50, {"b": null}], "a": 1e400}', key=b"k")
    log = logdir.partition("orders", 0)
    (batch,) = log.batches(0)
    page = console.page("/topics/orders/messages/0/1")
    for expected_text in (
        "Offsets 0 to 2",
        "Codec zstd",
        f"CRC-32C {batch.crc:#010x}",
        f"id {batch.producer_id}, epoch 0",
        "Sequence 0 to 2",
        "Segment 00000000000000000000.log",
        "Position byte 0",
        "Transaction none",
    ):
        assert expected_text in page.text, expected_text
    # The page shows numbers as they are written, and all keys.
    assert "a : [2] 0 1.50" in page.text.replace("a [2]", "a : [2]")
    assert "a 1e400" in page.text
    assert page.link("← 0") == "/topics/orders/messages/0/0"
    assert page.link("2 →") == "/topics/orders/messages/0/2"
    assert f"logcore.open({str(data / 'orders-0')!r}, read_only=True)" in page.text
    assert "kcat" not in page.text  # there is no broker
    assert console.get("/topics/orders/messages/0/1/key").body == b"k"


def test_page_of_a_missing_message_links_to_the_next_one(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    with logdir.producer(transactional_id="t") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("orders", b"v")
        producer.commit_transaction()
    logdir.append("orders", b"w")
    page = console.get("/topics/orders/messages/0/1")  # the marker
    assert page.status == 404
    assert "There is no message at offset 1; the next one is at offset 2." in page.text
    page = console.get("/topics/orders/messages/0/3")
    assert page.status == 404
    assert "and none after it" in page.text


def test_export_contains_the_messages_of_the_page(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("orders", 1)
    values = ["plain", 'quote " comma , line\n', "=1+1", "\u202e", "ü"]
    for value in values:
        logdir.append("orders", value.encode(), key=b"\xff", headers=[("h", None)])
    exported = console.get("/topics/orders/messages.ndjson?from=1&count=3")
    assert exported.headers["content-type"] == "application/x-ndjson"
    assert exported.headers["content-disposition"].startswith("attachment")
    rows = [json.loads(line) for line in exported.source.splitlines()]
    assert [row["value"] for row in rows] == [*values[1:3], {"hex": "e280ae"}]
    assert rows[0]["key"] == {"hex": "ff"}
    assert rows[0]["topic"] == "orders"
    table = list(
        csv.DictReader(
            io.StringIO(console.get("/topics/orders/messages.csv?from=0").source)
        )
    )
    assert [row["value"] for row in table][:3] == values[:3]
    assert table[0]["key"] == "hex:ff"
    page = console.get("/topics/orders/messages.parquet?from=1&count=2")
    assert page.headers["content-type"] == "application/vnd.apache.parquet"
    columns = pyarrow.parquet.read_table(io.BytesIO(page.body)).to_pydict()
    assert columns["value"] == [value.encode() for value in values[1:3]]
    assert columns["key"] == [b"\xff", b"\xff"]
    assert columns["offset"] == [1, 2]
    assert columns["headers"] == [[{"key": "h", "value": None}]] * 2
    assert columns["timestamp"][0].tzinfo is not None


def test_page_of_compacted_records_crosses_gaps(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    from logcore.cleaner import clean

    logdir.create_topic("t", 1, {"cleanup.policy": "compact", "segment.bytes": 10_000})
    log = logdir.partition("t", 0)
    log.append(b"first", key=b"a")
    for _ in range(40):
        log.append_many([(b"b", b"x" * 100)] * 50)
    clean(log, force=True)
    rows = console.page("/topics/t/messages?count=1000").rows()
    assert rows[-1][4] == "first"
    assert [int(row[1]) for row in rows] == sorted(
        (record.offset for record in log), reverse=True
    )


def test_deleted_records_are_not_shown(
    logdir: logcore.LogDir, console: ConsoleClient
) -> None:
    logdir.create_topic("t", 1)
    log = logdir.partition("t", 0)
    log.append_many([(None, b"%d" % number) for number in range(10)])
    log.delete_records(7)
    assert [row[4] for row in console.page("/topics/t/messages").rows()] == [
        "9",
        "8",
        "7",
    ]
    assert offsets(console, "/topics/t/messages?from=2") == [7, 8, 9]
    assert console.get("/topics/t/messages/0/3").status == 404


def test_page_reads_few_batches_of_a_large_partition(
    orders: logcore.LogDir, data: Path
) -> None:
    view = DirectoryView(str(data))
    with view.open_directory(ConsoleViewer()) as directory:
        for query in (
            MessageQuery(partitions=(1,)),
            MessageQuery(partitions=(1,), is_backward=False, start_offsets={1: 20_000}),
            MessageQuery(partitions=(1,), is_backward=False, time_ms=START_MS + 10**5),
        ):
            page: MessagePage = read_page(directory, "orders", query, budget_of(view))
            assert len(page.messages) == 50
            assert page.searched_bytes < 100_000
