"""Take the pictures of the console for the documentation.

    python tools/console_pictures.py docs/pictures

It fills a directory with sample topics, serves its console, and takes screenshots with
Chromium through playwright.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import logcore
from logcore.cleaner import clean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.consoles import ConsoleClient, opened_console

HOUR_MS = 3_600_000
SEARCH = "/topics/orders/messages?where=header.source%3Dweb&q=Krak%C3%B3w"
#: File, page, height in pixels, color scheme.
PICTURES = (
    ("console-segments", "/segments", 960, "light"),
    ("console-search", SEARCH, 620, "light"),
    ("console-message", "/topics/orders/messages/1/117", 860, "dark"),
    ("console-lag", "/group?name=billing", 620, "light"),
)


def order(choice: random.Random) -> bytes:
    items = [
        {
            "product": choice.choice(["espresso", "chai", "cake", "water"]),
            "qty": choice.randint(1, 4),
            "price": choice.randrange(150, 700) / 100,
        }
        for _ in range(choice.randint(1, 3))
    ]
    found = {
        "id": str(uuid.UUID(int=choice.getrandbits(128))),
        "customer": f"c{choice.randrange(10_000)}",
        "items": items,
        "store": choice.choice(["Oslo", "Porto", "Kraków", "Genève"]),
        "paid": choice.random() < 0.9,
    }
    return json.dumps(found, ensure_ascii=False).encode()


def fill(
    log: logcore.Log, count: int, choice: random.Random, *, keys: int = 1_000_000
) -> None:
    """Append orders of the last two hours."""
    start_ms = int(time.time() * 1000) - 2 * HOUR_MS
    rows = [
        (
            b"order-%06d" % choice.randrange(keys),
            order(choice),
            [
                ("trace", b"%032x" % choice.getrandbits(128)),
                ("source", choice.choice([b"web", b"shop"])),
            ],
            start_ms + at * 2 * HOUR_MS // count,
        )
        for at in range(count)
    ]
    for at in range(0, count, 60):
        log.append_many(rows[at : at + 60])


def fill_directory(data: Path, choice: random.Random) -> None:
    """Write topics in each state that the segment map shows."""
    shop = {"compression.type": "gzip", "segment.bytes": 150_000}
    topics: dict[str, tuple[int, int, dict[str, str | int]]] = {
        "alerts": (1, 4_000, {}),
        "clickstream": (
            4,
            9_000,
            {"compression.type": "zstd", "segment.bytes": 700_000},
        ),
        "customers": (
            2,
            4_000,
            {
                "compression.type": "zstd",
                "cleanup.policy": "compact",
                "segment.bytes": 200_000,
            },
        ),
        "orders": (3, 5_000, {**shop, "retention.bytes": 260_000}),
        "payments": (2, 8_000, {"compression.type": "lz4", "segment.bytes": 300_000}),
    }
    with logcore.open_dir(data, create=True, durability="os") as logdir:
        for topic, (partitions, count, config) in topics.items():
            logdir.create_topic(topic, partitions, config)
            for number in range(partitions):
                log = logdir.partition(topic, number)
                fill(log, count * (number + 2) // 3, choice, keys=2_000)
                if (topic, number) == ("customers", 0):
                    clean(log, force=True)
    path = sorted((data / "clickstream-2").glob("*.log"))[-1]
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size * 2 // 3)
        file.write(bytes(40_000))


def sample_lag(client: ConsoleClient, lags: dict[int, int]) -> None:
    """Add ten minutes of samples that end with the present lags."""
    now_ms = int(time.time() * 1000)
    for sample in range(61):
        moment = {}
        for partition, lag in lags.items():
            wave = 1 + math.sin((sample + 9 * partition) / 7) * (60 - sample) / 60
            moment["billing", "orders", partition] = int(lag * wave)
        client.view.lags.add(now_ms - (60 - sample) * 10_000, moment)


def reduce_colors(path: Path) -> None:
    """Store the picture with 256 colors, which needs a third of the bytes."""
    with Image.open(path) as image:
        reduced = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    reduced.save(path, optimize=True)


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        # A relative path, because the pages show it.
        target = target.resolve()
        os.chdir(folder)
        data = Path("shop")
        fill_directory(data, random.Random(45))
        executable = running.chromium.executable_path
        if not Path(executable).exists():
            executable = shutil.which("chromium") or executable
        browser = running.chromium.launch(
            executable_path=executable, args=["--no-sandbox"]
        )
        with (
            logcore.open_dir(data, durability="os") as logdir,
            logdir.producer(transactional_id="payments-1") as producer,
        ):
            lags = {0: 40, 1: 260, 2: 1_200}
            ends = {
                number: logdir.partition("orders", number).high_watermark
                for number in lags
            }
            logdir.alter_group_offsets(
                "billing",
                {("orders", number): ends[number] - lags[number] for number in lags},
            )
            producer.init_transactions()
            producer.begin_transaction()
            for number in range(400):
                producer.send("payments", order(random.Random(number)))
            producer.flush()
            with opened_console(data) as client:
                sample_lag(client, lags)
                for name, path, height, scheme in PICTURES:
                    page = browser.new_page(
                        viewport={"width": 1240, "height": height}, color_scheme=scheme
                    )
                    page.goto(client.url + path)
                    picture = target / f"{name}.png"
                    page.screenshot(path=picture)
                    reduce_colors(picture)
                    page.close()
            producer.abort_transaction()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
