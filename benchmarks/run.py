"""Run the benchmarks, print one table, and write benchmarks/RESULTS.md.

    python benchmarks/run.py [--quick] [--dir DIRECTORY] [NAME ...]

Names: codec append scan topic open growth life shim clients sharing members
transactions groups security fixtures recording schemas lake backup console apache
tansu cluster tails spark connector; all of them by default. Only a whole run that is
not --quick replaces RESULTS.md; --output writes any run's results elsewhere.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import common
from common import Result, Settings

NAMES: Final = (
    "codec",
    "append",
    "scan",
    "topic",
    "open",
    "growth",
    "life",
    "shim",
    "clients",
    "sharing",
    "members",
    "transactions",
    "groups",
    "security",
    "fixtures",
    "recording",
    "schemas",
    "lake",
    "backup",
    "console",
    "apache",
    "tansu",
    "cluster",
    "tails",
    "spark",
    "connector",
)
HEADINGS: Final = ("question", "logcore", "beside", "ratio", "target", "reached")
RESULTS: Final = Path(__file__).resolve().parent / "RESULTS.md"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    settings = Settings(options.dir, options.quick)
    settings.directory.mkdir(parents=True, exist_ok=True)
    kind = common.file_system_of(settings.directory)
    if kind in ("tmpfs", "ramfs"):
        print(
            f"{settings.directory} is on a {kind}, where no sync waits for a disk; give --dir",
            file=sys.stderr,
        )
        return 2
    facts = common.machine(settings.directory)
    for name, value in facts.items():
        print(f"{name + ':':10}{value}")
    results: list[Result] = []
    started = time.monotonic()
    for name in options.names or NAMES:
        print(f"\n{name}: {_question(name)}")
        for result in importlib.import_module(name).run(settings):
            results.append(result)
            question, ours, beside, ratio, target, reached = result.cells()
            print(
                f"  {question}: {ours}, {beside}: {ratio} (target {target}) {reached}",
                flush=True,
            )
    print()
    _show(results)
    print(f"\n{_summary(results)}, {time.monotonic() - started:.0f} s")
    output = options.output
    if output is None and not options.quick and not options.names:
        output = RESULTS
    if output is not None:
        output.write_text(_markdown(results, facts, quick=options.quick), "utf-8")
        print(f"written to {output}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The benchmarks of logcore.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"some of {', '.join(NAMES)}; all by default",
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes and fewer repeats"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=common.ROOT / "build" / "benchmarks",
        help="where files go",
    )
    parser.add_argument("--output", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(
            f"no benchmark is called {unknown[0]!r}; there are {', '.join(NAMES)}"
        )
    return options


def _question(name: str) -> str:
    text = importlib.import_module(name).__doc__ or ""
    return text.strip().splitlines()[0]


def _summary(results: Sequence[Result]) -> str:
    with_target = [result for result in results if result.is_reached is not None]
    return f"{sum(bool(result.is_reached) for result in with_target)} of {len(with_target)} targets reached"


def _show(results: Sequence[Result]) -> None:
    rows = [result.cells() for result in results]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(*HEADINGS)
            for row, result in zip(rows, results, strict=True):
                style = {True: "green", False: "red", None: "dim"}[result.is_reached]
                table.add_row(*row, style=style)
            Console().print(table)
            return
    widths = [
        max(len(row[at]) for row in [HEADINGS, *rows]) for at in range(len(HEADINGS))
    ]
    for row in [HEADINGS, *rows]:
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
        )


def _markdown(results: Sequence[Result], facts: dict[str, str], *, quick: bool) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = ["# Benchmark results", ""]
    lines += [
        f"{'A quick run' if quick else 'Made'} by `make bench` on {today}. {_summary(results)}.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += [
        "",
        "Ratios compare two sides that took turns in one run; other machines' seconds differ.",
    ]
    lines += [
        "In brackets: the ratios of the turns, without the lowest and the highest quarter of them.",
        "",
    ]
    lines += [_table_row(HEADINGS), "|" + "---|" * len(HEADINGS)]
    lines += [_table_row(result.cells()) for result in results]
    lines += ["", "## Work of each side", ""]
    lines += [
        f"- **{result.question}**: {result.method}"
        for result in results
        if result.method
    ]
    return "\n".join(lines) + "\n"


def _table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
