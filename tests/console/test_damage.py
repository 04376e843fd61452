"""Directories that are damaged, foreign or incompletely copied: the console shows their
intact parts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logcore
from support.consoles import ConsoleClient

Consoles = Callable[[Path], ConsoleClient]
PAGES = (
    "/",
    "/topics/orders",
    "/topics/orders/messages",
    "/topics/orders/messages?from=0",
    "/topics/orders/messages?q=v",
    "/topics/orders/live",
    "/segments",
    "/topics/orders/segments/0",
    "/topics/orders/segments/0?check=1",
    "/groups",
    "/transactions",
)


@pytest.fixture
def orders(data: Path) -> Path:
    """Create two partitions with some segments of 20 batches, and close them
    cleanly.
    """
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 2, {"segment.bytes": 10_000})
        for number in range(2):
            log = logdir.partition("orders", number)
            for batch in range(80):
                rows = [(b"k", b"value %d.%d" % (batch, index)) for index in range(20)]
                log.append_many(rows)
    return data


def logs(data: Path, number: int = 0) -> list[Path]:
    return sorted((data / f"orders-{number}").glob("*.log"))


def write_at(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


@pytest.mark.long
def test_damaged_batch_is_reported_and_other_batches_are_shown(
    orders: Path, consoles: Consoles
) -> None:
    path = logs(orders)[1]
    write_at(path, path.stat().st_size - 5, b"?")
    client = consoles(orders)
    page = client.page("/topics/orders/messages?partition=0&from=0&count=1000")
    assert "Not everything can be read" in page.text
    assert "CRC" in page.text
    assert path.name in page.text
    shown_offsets = {int(row[1]) for row in page.rows()}
    with logcore.open(orders / "orders-0", read_only=True) as log:
        batches = list(log.batches(0, 1_000))
    damaged_batch = [batch for batch in batches if batch.path == str(path)][-1]
    lost_offsets = set(range(damaged_batch.base_offset, damaged_batch.next_offset))
    assert shown_offsets == set(range(1_000 + len(lost_offsets))) - lost_offsets
    page = client.page("/topics/orders/segments/0?check=1")
    assert "CRC does not match at byte" in page.text
    assert "logcore recover" in page.text
    assert 'class="damage"' in page.source
    # Only the check of the page reads all bytes.
    assert 'class="damage"' not in client.page("/topics/orders/segments/0").source


@pytest.mark.long
def test_estimate_of_a_compaction(data: Path, consoles: Consoles) -> None:
    config = {"cleanup.policy": "compact", "segment.bytes": 5_000}
    path = "/topics/orders/segments/0"
    estimate = f"{path}?estimate=1"
    with logcore.open_dir(data, create=True) as logdir:
        logdir.create_topic("orders", 1, config)
        logdir.create_topic("plain", 1)
        log = logdir.partition("orders", 0)
        assert "nothing to compact" in consoles(data).page(estimate).text
        log.append_many([(b"k%d" % (number % 7), b"v" * 100) for number in range(500)])
        page = consoles(data).page(estimate)
    assert "Compaction removes about" in page.text
    assert (
        consoles(data).page(path).link("Estimate what compaction removes") == estimate
    )
    assert "Estimate" not in consoles(data).page("/topics/plain/segments/0").text
    last = logs(data)[-2]
    write_at(last, last.stat().st_size - 5, b"?")
    page = consoles(data).page(estimate)
    assert "Compaction removes" not in page.text
    assert last.name in page.text and "CRC" in page.text


@pytest.mark.long
def test_changed_batch_header_is_damage_on_the_map_without_a_check(
    orders: Path, consoles: Consoles
) -> None:
    write_at(logs(orders)[1], 16, b"\x07")  # the magic of the first batch
    page = consoles(orders).page("/segments")
    assert "unknown magic at byte 0" in page.text
    assert "damaged" in page.source
    for path in PAGES:
        consoles(orders).page(path)


@pytest.mark.long
def test_missing_segments_are_reported_with_their_offsets(
    orders: Path, consoles: Consoles
) -> None:
    first, middle = logs(orders)[:2]
    last = logs(orders, 1)[-1]
    for path in (first, middle, last):
        path.unlink()
    page = consoles(orders).page("/segments")
    assert "the first segments are missing: the log begins at offset 0" in page.text
    assert "the log had reached offset 1600" in page.text
    for path in PAGES:
        consoles(orders).page(path)


@pytest.mark.long
def test_segment_missing_in_the_middle_is_a_loss(
    orders: Path, consoles: Consoles
) -> None:
    logs(orders)[1].unlink()
    page = consoles(orders).page("/topics/orders/segments/0")
    assert "are missing" in page.text
    messages = consoles(orders).page("/topics/orders/messages?from=oldest&count=1000")
    assert len(messages.rows()) == 1_000


@pytest.mark.long
@pytest.mark.parametrize("size", [0, 1, 12, 61, 100, 5_000])
def test_truncated_segments_are_shown(
    orders: Path, consoles: Consoles, size: int
) -> None:
    full_size = logs(orders)[-1].stat().st_size
    os.truncate(logs(orders)[-1], min(size, full_size - 1))
    os.truncate(logs(orders, 1)[1], size)
    client = consoles(orders)
    for path in PAGES:
        client.page(path)
    assert "reached offset 1600" in client.page("/segments").text


def test_damaged_file_of_topics_leaves_the_partitions_readable(
    orders: Path, consoles: Consoles
) -> None:
    write_at(orders / "logcore.topics", 30, b"????")
    client = consoles(orders)
    page = client.page("/")
    assert "The directory is damaged" in page.text
    assert page.rows()[0][:3] == ["orders", "2", "3,200"]
    for path in PAGES:
        client.page(path)
    assert len(client.page("/topics/orders/messages").rows()) == 50


def test_console_opens_the_directory_of_a_partition(
    orders: Path, consoles: Consoles
) -> None:
    client = consoles(orders / "orders-0")
    assert client.page("/").rows()[0][:3] == ["orders", "1", "1,600"]
    assert len(client.page("/topics/orders/messages").rows()) == 50


def test_incompletely_copied_directory_is_shown(
    orders: Path, consoles: Consoles, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    (copy / "orders-0").mkdir(parents=True)
    for path in logs(orders)[1:3]:
        shutil.copy(path, copy / "orders-0")
    (copy / "orders-1").mkdir()
    (copy / "notes.txt").write_text("a note")
    client = consoles(copy)
    assert client.page("/").rows()[0][:2] == ["orders", "2"]
    assert len(client.page("/topics/orders/messages?partition=0").rows()) == 50
    for path in PAGES:
        client.page(path)


def test_directory_of_other_files_shows_no_traceback(
    tmp_path: Path, consoles: Consoles
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("hello")
    page = consoles(tmp_path / "home").get("/")
    assert "Traceback" not in page.source
    assert page.status in (200, 503)
    page = consoles(tmp_path / "missing").get("/")
    assert page.status == 503
    assert "The directory cannot be read" in page.text


def test_directory_that_vanishes_is_an_error_page(
    orders: Path, consoles: Consoles
) -> None:
    client = consoles(orders)
    client.page("/")
    shutil.rmtree(orders)
    for path in PAGES:
        page = client.get(path)
        assert page.status in (404, 503)
        assert "bug" not in page.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_partition_without_permissions_is_reported(
    orders: Path, consoles: Consoles
) -> None:
    (orders / "orders-0").chmod(0)
    client = consoles(orders)
    try:
        for path in PAGES:
            assert client.get(path).status == 200
        assert "Permission denied" in client.page("/topics/orders").text
    finally:
        (orders / "orders-0").chmod(0o755)


@pytest.mark.long
def test_changed_byte_never_causes_a_traceback(
    orders: Path, consoles: Consoles
) -> None:
    path = logs(orders)[1]
    content = path.read_bytes()
    client = consoles(orders)
    for position in [*range(8, 70, 4), *range(70, len(content), 2_003)]:
        write_at(path, position, bytes([content[position] ^ 0xFF]))
        client.page("/topics/orders/messages?partition=0&from=300")
        client.page("/topics/orders/segments/0?check=1")
        write_at(path, position, content[position : position + 1])
