"""Measure whether tests detect changes: change one place of the core at a time, and run
the tests that reach it.

    python tests/mutants.py [--modules segment partition/recovery ...] [--count 100] [--seed 1]

Prints a line of JSON for each mutant, and at the end how many were killed: a test
failed or hung. A mutant that survives shows a missing test, needless code, or a change
without an effect.

- No file is changed. Tests are collected once; each mutant is a forked child in which
  one function has other code.
- Only tests that reach the changed lines run, the fastest first. A first run of all
  tests records the lines that each test reaches.
- Mutants change bodies of functions: comparisons, conditions, numbers, calls and
  returned values. They do not change asserts, the code of errors and of repr(), and
  code that runs during an import.
- Tests that start programs are not used, because programs run the code in the files.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import gc
import itertools
import json
import os
import pickle
import random
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple

import hypothesis
import pytest

SOURCE: Final = Path(__file__).resolve().parents[1] / "src" / "logcore"
CORE: Final = (
    "recordbatch", "segment", "index", "partition/recovery", "partition/segment_files",
    "partition/producer_state", "claim", "log",
)  # fmt: skip
CHAIN: Final = (
    "log", "partition", "directory", "inspect",
    *(f"format/test_{name}.py" for name in ("recordbatch", "legacy")),
    "kernels/test_appending.py", "faults/test_disk_errors.py", "staging/test_staging.py",
    *(f"faults/test_crash_explorer.py::test_{name}" for name in (
        "crash_after_any_short_program_keeps_promises", "crash_after_random_programs_keeps_promises",
        "log_opens_after_unsynced_records_were_deleted", "batch_torn_inside_its_offset_field_is_recovered",
        "truncation_into_compacted_gap_survives_crash",
        "opening_succeeds_on_a_disk_without_space_for_a_file_name",
    )),
    "testing/test_testing.py::test_log_equals_a_list_after_random_calls_and_crashes",
)  # fmt: skip
#: Tests that repeat a case very often, and tests that damage the log themselves.
LEFT_OUT: Final = "every_bit or flipped_bit or corrupted_digit or later_changes or seeded_bug or duckdb"
#: Fewer rounds of the tests that have a setting for it.
ROUNDS: Final = {"LOGCORE_EXPLORE_STATES": "3000", "LOGCORE_MACHINES": "120"}
SWAPS: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
#: A test hangs if it takes at least this many seconds, and this many times as long as in
#: the first run.
HANG_SECONDS: Final = 10
HANG_FACTOR: Final = 10
#: Maximum time of the tests of one mutant. If it is not enough for all tests, the
#: longest ones are left out.
BUDGET_SECONDS: Final = 60
MEMORY_BYTES: Final = 12 << 30


class Mutant(NamedTuple):
    """The place of a node in the tree of a module, and its replacement."""

    path: str
    tree: ast.Module
    function: tuple[str, int]  # name and first line of the outermost function around it
    lines: tuple[int, int]  # first and last line of the statement
    place: list[Any] | dict[str, Any]  # contains the node at `key`
    key: Any
    new: ast.AST
    change: str

    def code(self) -> CodeType:
        """Return the code of the function with the change."""
        old, self.place[self.key] = self.place[self.key], self.new
        try:
            return dict(
                functions_in(
                    compile(ast.fix_missing_locations(self.tree), self.path, "exec")
                )
            )[self.function]
        finally:
            self.place[self.key] = old


def functions_in(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield (const.co_name, const.co_firstlineno), const
            yield from functions_in(const)


def alternatives(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Return the replacements of a node, each with a description. Removed code is kept
    as dead code, so that a closure refers to the same names.
    """
    if type(node) in SWAPS:
        new = SWAPS[type(node)]()
        yield f"{type(node).__name__} to {type(new).__name__}", new
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without not", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} to {not node.value}", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        for value in (node.value + 1, node.value - 1):
            yield f"{node.value} to {value}", ast.Constant(value)
    elif isinstance(node, (ast.If, ast.IfExp)):
        for choice, op in ((True, ast.Or()), (False, ast.And())):
            fields = {
                **dict(ast.iter_fields(node)),
                "test": ast.BoolOp(op, [node.test, ast.Constant(choice)]),
            }
            yield f"if {choice}", ast.copy_location(type(node)(**fields), node)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield (
            "no call",
            ast.copy_location(ast.If(ast.Constant(False), [node], []), node),
        )
    elif (
        isinstance(node, ast.Return)
        and node.value is not None
        and ast.unparse(node.value) != "None"
    ):
        dead = ast.IfExp(ast.Constant(True), ast.Constant(None), node.value)
        yield "return None", ast.copy_location(ast.Return(dead), node)
    elif isinstance(node, ast.Name) and node.id in ("min", "max"):
        other = "max" if node.id == "min" else "min"
        yield f"{node.id} to {other}", ast.Name(other, ast.Load())


def places_in(path: Path) -> Iterator[list[Mutant]]:
    """Return the possible changes of each place in a module."""
    tree = ast.parse(path.read_text("utf-8"))

    def visit(
        node: ast.AST, function: tuple[str, int] | None, lines: tuple[int, int]
    ) -> Iterator[list[Mutant]]:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if not isinstance(child, ast.AST) or isinstance(
                    child, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)
                ):
                    continue
                child_function = function
                child_lines = lines
                if isinstance(child, (ast.stmt, ast.ExceptHandler)):
                    # The lines of an if or a loop are those before its body.
                    body = getattr(child, "body", None)
                    end = body[0].lineno - 1 if body else child.end_lineno or 0
                    child_lines = child.lineno, max(child.lineno, end)
                if isinstance(child, ast.FunctionDef):
                    if child.name.startswith("__") and child.name != "__init__":
                        continue
                    child_function = child_function or (
                        child.name,
                        min(
                            [
                                child.lineno,
                                *(expr.lineno for expr in child.decorator_list),
                            ]
                        ),
                    )
                if child_function is not None:
                    place, key = (
                        (value, index)
                        if isinstance(value, list)
                        else (vars(node), field)
                    )
                    yield [
                        Mutant(
                            str(path),
                            tree,
                            child_function,
                            child_lines,
                            place,
                            key,
                            new,
                            change,
                        )
                        for change, new in alternatives(child)
                    ]
                yield from visit(child, child_function, child_lines)

    yield from filter(None, visit(tree, None, (0, 0)))


class Trial:
    """A pytest plugin that replaces the run: it records the lines that each test
    reaches, then tries the mutants.
    """

    def __init__(self, modules: list[str], count: int, seed: int) -> None:
        paths = [SOURCE / f"{module}.py" for module in modules]
        self.lines = {str(path): path.read_text("utf-8").splitlines() for path in paths}
        places = [place for path in paths for place in places_in(path)]
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(
            list
        )
        rng = random.Random(seed)
        self.mutants = [
            rng.choice(place) for place in rng.sample(places, min(count, len(places)))
        ]
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for function in [
            found for found in gc.get_objects() if isinstance(found, FunctionType)
        ]:
            code = function.__code__
            self.functions[code.co_filename, code.co_name, code.co_firstlineno].append(
                function
            )
        start = time.monotonic()
        first_run = in_child(functools.partial(self.reach, session.items), 7200)
        assert first_run is not None, "the first run died or took too long"
        reached: dict[tuple[str, int], set[int]] = first_run[0]
        seconds: dict[int, float] = first_run[1]
        write_line(
            f"{len(seconds)} of {len(session.items)} tests in {time.monotonic() - start:.0f} s"
        )
        tally: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for mutant in self.mutants:
            lines = range(mutant.lines[0], mutant.lines[1] + 1)
            numbers = {
                number
                for line in lines
                for number in reached.get((mutant.path, line), ())
            }
            # The fastest tests first, in groups whose times differ by a factor of up to
            # four. In a group, the tests of a file are together, because they share
            # fixtures.
            order = sorted(
                numbers,
                key=lambda number: (
                    int(seconds[number] * 50).bit_length() // 2,
                    number,
                ),
            )
            totals = itertools.accumulate(seconds[number] for number in order)
            order = [
                number
                for number, total in zip(order, totals)
                if total <= BUDGET_SECONDS
            ]
            items = [session.items[number] for number in order]
            limits = [
                max(HANG_FACTOR * seconds[number], HANG_SECONDS) for number in order
            ]
            code = mutant.code()
            for function in self.functions[mutant.path, *mutant.function]:
                assert function.__code__.co_freevars == code.co_freevars, mutant
            killer = (
                in_child(
                    functools.partial(self.kill, mutant, code, items, limits),
                    sum(limits) + 60,
                )
                if items
                else ""
            )
            killer = "hung or died" if killer is None else killer
            name = Path(mutant.path).name
            tally[name][0] += bool(killer)
            tally[name][1] += 1
            source = self.lines[mutant.path][mutant.lines[0] - 1].strip()
            location = {
                "at": f"{name}:{mutant.lines[0]}",
                "change": mutant.change,
                "source": source,
            }
            write_line(
                json.dumps(
                    {
                        "killed": bool(killer),
                        **location,
                        "by": killer,
                        "tests": len(items),
                    }
                )
            )
        for name, (killed, count) in [
            *tally.items(),
            ("all", [sum(counts) for counts in zip(*tally.values())]),
        ]:
            write_line(
                f"{name}: killed {killed} of {count} ({100 * killed / count:.0f} %)"
            )
        return True

    def reach(
        self, items: list[pytest.Item]
    ) -> tuple[dict[tuple[str, int], set[int]], dict[int, float]]:
        """Return the numbers of the tests that reach each line, and the time of each
        test. Tests that fail without a change are left out.
        """
        lines: dict[tuple[str, int], set[int]] = defaultdict(set)
        seconds: dict[int, float] = {}
        seen: set[tuple[str, int]] = set()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in self.lines:
                return None
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return trace

        threading.settrace(trace)
        for number, item in enumerate(items):
            seen.clear()
            # Set for each test, because a test that interrupts at any line sets another
            # tracer.
            sys.settrace(trace)
            start = time.monotonic()
            item.config.hook.pytest_runtest_protocol(
                item=item, nextitem=[*items, None][number + 1]
            )
            if item.nodeid in self.failed:
                write_line(f"{item.nodeid} fails without a change")
                continue
            seconds[number] = time.monotonic() - start
            for line in seen.copy():  # a finalizer may add lines during the loop
                lines[line].add(number)
        return dict(lines), seconds

    def kill(
        self,
        mutant: Mutant,
        code: CodeType,
        items: list[pytest.Item],
        limits: list[float],
    ) -> str:
        """Return the first test that fails, or ""."""
        for function in self.functions[mutant.path, *mutant.function]:
            function.__code__ = code
        gc.freeze()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        for item, next_item, limit in zip(items, [*items[1:], None], limits):
            item.add_marker(pytest.mark.timeout(limit), append=False)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if self.failed:
                return self.failed[0]
        return ""


def in_child(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of `work` in a forked process, or None if the process dies or
    takes too long.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        with open(writing, "wb") as pipe:
            try:
                pipe.write(pickle.dumps(work()))
            except BaseException:
                traceback.print_exc()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], seconds)
        content = pipe.read() if ready else b""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return pickle.loads(content) if content else None


def write_line(text: str) -> None:
    os.write(OUTPUT, text.encode() + b"\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Change one place of the core at a time, and report whether tests fail."
    )
    parser.add_argument("--modules", nargs="+", choices=CORE, default=CORE)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ.update(ROUNDS, HYPOTHESIS_PROFILE="mutants")
    # Without Phase.shrink: failing examples are not made smaller.
    phases = (
        hypothesis.Phase.explicit,
        hypothesis.Phase.generate,
    )
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=phases,
    )
    OUTPUT = os.dup(1)
    chain = [str(Path(__file__).parent / name) for name in CHAIN]
    flags = ["-s", "-q", "-p", "no:cacheprovider", "-k", f"not ({LEFT_OUT})"]
    flags += ["-m", "not slow"]
    sys.exit(
        pytest.main(
            [*chain, *flags],
            plugins=[Trial(options.modules, options.count, options.seed)],
        )
    )
