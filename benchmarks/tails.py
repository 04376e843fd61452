"""How long do clients wait while netshim compacts, deletes, rebalances and holds idle
connections?

Method: confluent-kafka produces records of 100 bytes to four partitions at 1,000 and at
10,000 records a second for ten minutes each (40 seconds with --quick), acks=all,
durability="os". At the same time another process writes a compacted topic and a topic
of small segments with retention, a third one runs a group whose members change every
few seconds, and 200 connections are idle.
- A latency is the time from produce() to the delivery report, measured by librdkafka.
- The broker runs as `netshim serve`, and also records the callbacks of its event loop
  and timers that run late. The broker does not cause the time for which the loop's
  thread waits for a processor that other processes use. It also does not cause the
  time for which another of its threads does so while the loop's thread is blocked,
  because that thread may hold the interpreter's lock. Both times are from
  /proc/PID/task/TID/schedstat (Linux). The same applies to the time for which the
  host of a virtual machine took its processors away, from /proc/stat.
- An idle process with a timer of 1 ms shows the pauses of the machine at the same time.
  Another process writes 100 bytes to a file beside the log directory every 5 ms, and
  never syncs. Its long writes show the stalls of the file system, which holds up writes
  while any process syncs. The broker does not cause the time for which its loop's
  thread is blocked during such a write.

Not shown: Apache Kafka under the same load.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import common
from common import Result, Settings

_RATES: Final = (1_000, 10_000)
_PARTITIONS: Final = 4
_IDLE_CONNECTIONS: Final = 200
_MAX_STEP_S: Final = 0.05
_WRITE_S: Final = 0.005
#: Shorter steps, pauses and latencies are not kept one by one.
_LONG_S: Final = 0.01
#: The functions of the threads are recorded if the event loop is busy for longer.
_SHOWN_S: Final = 0.02
_TIMER_S: Final = 0.005
#: Number of steps that the report describes.
_DESCRIBED: Final = 5
#: The time that a thread waited for a processor is read again after this time.
_READ_S: Final = 0.002
#: The compacted topic and the topic with retention: bytes a second of each.
_OTHER_BYTES_PER_S: Final = 1 << 20
_KEYS: Final = 2_000
_TOPICS: Final = {
    "compacted": {
        "cleanup.policy": "compact",
        "segment.bytes": str(4 << 20),
        "min.cleanable.dirty.ratio": "0.1",
    },
    "short": {
        "segment.bytes": str(1 << 20),
        "retention.bytes": str(4 << 20),
    },
}
_REBALANCE_S: Final = 4.0
#: Key for the time that the machine took from all threads. The other keys are ids of
#: threads.
_STOLEN: Final = "stolen"


def run(settings: Settings) -> Iterator[Result]:
    if common.peer("confluent_kafka", "confluent-kafka") is None:
        return
    seconds = 40 if settings.quick else 600
    for rate in _RATES:
        with common.scratch(settings, "tails") as path:
            yield from _rows(rate, _measure(path, rate, seconds))


@attrs.frozen(kw_only=True)
class _Outcome:
    """The measurements of one run."""

    #: Seconds of each record, sorted.
    latencies: Sequence[float]
    #: Seconds of the slow records, with the time of their delivery report.
    slow: Sequence[tuple[float, float]]
    #: The long steps of the broker, see _Recorder.
    steps: Sequence[dict[str, Any]]
    #: Long pauses of the idle process: when they ended, and their seconds.
    pauses: Sequence[tuple[float, float]]
    #: Long writes of the other process, in the same form.
    stalls: Sequence[tuple[float, float]]
    #: Facts that show that the other work was done.
    facts: dict[str, float]


def _rows(rate: int, outcome: _Outcome) -> Iterator[Result]:
    title = f"{rate:,} records a second beside maintenance"
    caused = sorted(
        ((_caused_s(step, outcome.stalls), step) for step in outcome.steps),
        key=lambda each: each[0],
        reverse=True,
    )
    longest = caused[0][0] if caused else 0.0
    blocked = sorted(outcome.steps, key=_blocked_s, reverse=True)
    pause = max((seconds for _, seconds in outcome.pauses), default=0.0)
    stall = max((seconds for _, seconds in outcome.stalls), default=0.0)
    described = "; ".join(
        _described(step, outcome.stalls) for _, step in caused[:_DESCRIBED]
    )
    facts = ", ".join(
        f"{name} {common.figure(value)}" for name, value in outcome.facts.items()
    )
    yield Result(
        question=f"{title}, longest step that the broker causes",
        unit="ms",
        ours=longest * 1e3,
        peer_name="pause of an idle process",
        peer=pause * 1e3,
        ratio=longest * 1e3,
        ratio_unit=" ms",
        target=_MAX_STEP_S * 1e3,
        bound="at most",
        method=f"{facts}. The longest: {described}.",
    )
    described = "; ".join(
        _described(step, outcome.stalls) for step in blocked[:_DESCRIBED]
    )
    longest = _blocked_s(blocked[0]) if blocked else 0.0
    yield Result(
        question=f"{title}, longest step with stalls of the file system",
        unit="ms",
        ours=longest * 1e3,
        peer_name="write of another process",
        peer=stall * 1e3,
        ratio=longest * 1e3,
        ratio_unit=" ms",
        method=f"The longest: {described}.",
    )
    latencies = outcome.latencies
    p50, p99, p999 = (
        latencies[int(len(latencies) * share)] for share in (0.5, 0.99, 0.999)
    )
    slow = _attributed(outcome)
    for name, seconds in (("p99", p99), ("p99.9", p999), ("longest", latencies[-1])):
        yield Result(
            question=f"{title}, {name}",
            unit="ms",
            ours=seconds * 1e3,
            peer_name="p50",
            peer=p50 * 1e3,
            ratio=seconds / p50,
            method=f"Records by time: {_histogram(latencies)}. Above {_MAX_STEP_S * 1e3:g} ms: {slow}."
            if name == "longest"
            else "",
        )


def _blocked_s(step: dict[str, Any]) -> float:
    """Return the seconds of a step, without the waits for a processor."""
    blocked: float = step["seconds"] - step["waited"] - step["cpu"]
    cpu: float = step["cpu"]
    return cpu + max(0.0, blocked - step["others"] - step["stolen"])


def _caused_s(step: dict[str, Any], stalls: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of a step, also without the stalls of the file system."""
    cpu: float = step["cpu"]
    return cpu + max(0.0, _blocked_s(step) - cpu - _stalled_s(step, stalls))


def _stalled_s(step: dict[str, Any], stalls: Sequence[tuple[float, float]]) -> float:
    """Return for how long another process was in a long write during a step."""
    began = step["ended"] - step["seconds"]
    return sum(
        max(0.0, min(ended, step["ended"]) - max(ended - seconds, began))
        for ended, seconds in stalls
    )


def _described(step: dict[str, Any], stalls: Sequence[tuple[float, float]]) -> str:
    other = step["seconds"] - step["waited"] - step["cpu"]
    text = f"{step['what']} {step['seconds'] * 1e3:.1f} ms at {step['at']:.0f} s"
    text += f" (running {step['cpu'] * 1e3:.1f}, without a processor"
    text += f" {step['waited'] * 1e3:.1f}, blocked {other * 1e3:.1f}, another thread"
    text += f" without a processor {step['others'] * 1e3:.1f}, processors taken away"
    text += f" {step['stolen'] * 1e3:.0f}, write of another"
    text += f" process {_stalled_s(step, stalls) * 1e3:.1f})"
    if step["where"]:
        text += f" in {step['where']}"
    return text


def _histogram(latencies: Sequence[float]) -> str:
    """Return the number of latencies in each bucket; a bound is twice the one before."""
    counts = collections.Counter(
        math.ceil(math.log2(max(latency, 1e-9) * 1e3)) for latency in latencies
    )
    return ", ".join(
        f"to {2.0**power:g} ms {counts[power]:,}" for power in sorted(counts)
    )


def _attributed(outcome: _Outcome) -> str:
    """Return how many slow records overlap a pause of the machine or a long step."""
    pauses = [
        (end - seconds, end) for end, seconds in (*outcome.pauses, *outcome.stalls)
    ]
    waits = [(step["ended"] - step["seconds"], step["ended"]) for step in outcome.steps]
    counts: collections.Counter[str] = collections.Counter()
    for ended, seconds in outcome.slow:
        if seconds < _MAX_STEP_S:
            continue
        if _overlaps(waits, ended - seconds, ended):
            counts["beside a long step"] += 1
        elif _overlaps(pauses, ended - seconds, ended):
            counts["beside a pause of the machine only"] += 1
        else:
            counts["beside neither"] += 1
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _overlaps(spans: Sequence[tuple[float, float]], began: float, ended: float) -> bool:
    return any(first < ended and other > began for first, other in spans)


# -- the load --------------------------------------------------------------------------


def _measure(path: Path, rate: int, seconds: float) -> _Outcome:
    context = multiprocessing.get_context("spawn")
    report = path / "steps.json"
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_broker(path / "data", report))
        _create_topics(address)
        stack.enter_context(_idle_connections(address))
        helpers = [
            _Helper.start(context, target, address, str(path))
            for target in (
                _write_others,
                _change_members,
                _record_pauses,
                _record_stalls,
            )
        ]
        for helper in helpers:
            stack.callback(helper.process.kill)
        for helper in helpers:
            helper.pipe.recv()  # it has begun
        began = time.perf_counter()
        latencies, slow = _produce(address, rate, seconds)
        lasted = time.perf_counter() - began
        others, members, pauses, stalls = (helper.stop() for helper in helpers)
        sizes = {name: _size_of(path / "data" / f"{name}-0") for name in _TOPICS}
    steps = [
        {**load, "at": load["ended"] - began}
        for load in json.loads(report.read_text())
        if load["ended"] >= began
    ]
    # The sizes show that retention and compaction have deleted records.
    return _Outcome(
        latencies=sorted(latencies),
        slow=slow,
        steps=steps,
        pauses=[pause for pause in pauses if pause[0] >= began],
        stalls=[stall for stall in stalls if stall[0] >= began],
        facts={
            "records/s": len(latencies) / lasted,
            "MiB written to each other topic": others / (1 << 20),
            "MiB left of the compacted one": sizes["compacted"] / (1 << 20),
            "MiB left of the one with retention": sizes["short"] / (1 << 20),
            "rebalances": members,
        },
    )


@contextlib.contextmanager
def _broker(path: Path, report: Path) -> Iterator[str]:
    words = [sys.executable, __file__, str(report), "serve", str(path)]
    words += ["--port", "0", "--durability", "os"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)


def _create_topics(address: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    topics = [NewTopic("paced", _PARTITIONS, 1)]
    topics += [NewTopic(name, 1, 1, config=config) for name, config in _TOPICS.items()]
    for future in admin.create_topics(topics).values():
        future.result(30)


@contextlib.contextmanager
def _idle_connections(address: str) -> Iterator[None]:
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(_IDLE_CONNECTIONS):
            stack.enter_context(socket.create_connection((host, int(port)), 10))
        yield


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.log"))


def _produce(
    address: str, rate: int, seconds: float
) -> tuple[list[float], list[tuple[float, float]]]:
    """Produce at a fixed rate; return all latencies, and the long ones with their times."""
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address,
            "log_level": 0,
            "acks": "all",
            "linger.ms": 0,
            # Of 100 s. The default is full after a wait of 10 s.
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    latencies: list[float] = []
    slow: list[tuple[float, float]] = []

    def delivered(error: Any, message: Any) -> None:
        assert error is None, error
        latency = message.latency()
        latencies.append(latency)
        if latency > _LONG_S:
            slow.append((time.perf_counter(), latency))

    for partition in range(_PARTITIONS):
        producer.produce("paced", b"0", partition=partition)
    producer.flush(30)
    value = b"." * common.VALUE_SIZE
    with common.collector_off():
        started = time.perf_counter()
        for number in range(int(rate * seconds)):
            while time.perf_counter() < started + number / rate:
                producer.poll(0.0002)
            producer.produce(
                "paced", value, partition=number % _PARTITIONS, on_delivery=delivered
            )
        producer.flush(30)
    return latencies, slow


@attrs.frozen
class _Helper:
    """A process beside the measurement. It sends one object when it has begun, and its
    result after stop().
    """

    process: Any
    pipe: Any

    @classmethod
    def start(
        cls, context: Any, target: Callable[[Any, str, str], None], *arguments: str
    ) -> _Helper:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        return cls(process, ours)

    def stop(self) -> Any:
        self.pipe.send(None)
        result = self.pipe.recv()
        self.process.join(30)
        return result


def _write_others(pipe: Any, address: str, path: str) -> None:
    """Write the other topics until the parent asks to stop; send the bytes for each."""
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "log_level": 0, "acks": 1, "linger.ms": 20}
    )
    pipe.send(None)
    value = os.urandom(1_000)
    started = time.perf_counter()
    for number in itertools.count():
        if number % 100 == 0 and pipe.poll():
            break
        while time.perf_counter() < started + number * len(value) / _OTHER_BYTES_PER_S:
            producer.poll(0.005)
        for name in _TOPICS:
            producer.produce(name, value, key=b"%d" % (number % _KEYS), partition=0)
    producer.flush(30)
    pipe.send(number * len(value))


def _change_members(pipe: Any, address: str, path: str) -> None:
    """Run two members of a group, and a third one that joins and leaves."""
    import confluent_kafka

    rebalances = 0

    def assigned(consumer: Any, partitions: Any) -> None:
        nonlocal rebalances
        rebalances += 1

    def join() -> Any:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": address,
                "log_level": 0,
                "group.id": "readers",
                "auto.offset.reset": "earliest",
            }
        )
        consumer.subscribe(["paced"], on_assign=assigned)
        return consumer

    members = [join(), join()]
    pipe.send(None)
    changes_s = time.monotonic() + _REBALANCE_S
    while not pipe.poll():
        for member in members:
            member.consume(5_000, 0.02)
        if time.monotonic() > changes_s:
            changes_s += _REBALANCE_S
            if len(members) == 2:
                members.append(join())
            else:
                members.pop().close()
    for member in members:
        member.close()
    pipe.send(rebalances)


def _record_pauses(pipe: Any, address: str, path: str) -> None:
    """Sleep for 1 ms repeatedly, and send the long pauses at the end."""
    pauses: list[tuple[float, float]] = []
    gc.disable()
    pipe.send(None)
    while not pipe.poll():
        for _ in range(100):
            began = time.perf_counter()
            time.sleep(0.001)
            ended = time.perf_counter()
            if ended - began > _LONG_S:
                pauses.append((ended, ended - began))
    pipe.send(pauses)


def _record_stalls(pipe: Any, address: str, path: str) -> None:
    """Write some bytes again and again; send the long writes at the end."""
    stalls: list[tuple[float, float]] = []
    gc.disable()
    pipe.send(None)
    with open(Path(path) / "written", "wb", buffering=0) as file:
        while not pipe.poll(_WRITE_S):
            began = time.perf_counter()
            file.write(b"." * 100)
            ended = time.perf_counter()
            if ended - began > _LONG_S:
                stalls.append((ended, ended - began))
    pipe.send(stalls)


# -- the broker's process --------------------------------------------------------------


class _Recorder:
    """Records long callbacks of the event loop, and late timers.

    A step has these facts: when it `ended`, by time.perf_counter(); its `seconds`, of
    which the thread was running (`cpu`) or waited for a processor (`waited`); the
    longest such wait of another thread (`others`); the time without processors of the
    machine (`stolen`); `what` was called, and `where` it was after some time.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._run = asyncio.events.Handle._run  # type: ignore[attr-defined]
        self._loop_thread = threading.get_ident()
        self._loop_task = str(threading.get_native_id())
        self._schedstat = -1
        with contextlib.suppress(OSError):
            self._schedstat = os.open(_schedstat(self._loop_task), os.O_RDONLY)
        self._waited = self._read_waited()
        self._read_at = time.perf_counter()
        #: How long each other thread had waited for a processor, as of the last reading.
        self._others = self._read_others()
        #: When the last step began or ended.
        self._moved = time.perf_counter()
        #: When the functions of the threads were recorded, and their names.
        self._seen = 0.0, ""
        self._has_timer = False

    def install(self) -> None:
        recorder = self

        def timed(handle: asyncio.Handle) -> None:
            recorder.step(handle)

        asyncio.events.Handle._run = timed  # type: ignore[attr-defined]
        threading.Thread(target=self._watch, daemon=True).start()

    def step(self, handle: asyncio.Handle) -> None:
        if not self._has_timer:
            self._has_timer = True
            self._restart_timer(handle._loop)  # type: ignore[attr-defined]
        began = time.perf_counter()
        if began - self._read_at > _READ_S:
            earlier = self._waited
            self._waited = self._read_waited()
            self._read_at = began
            if isinstance(handle, asyncio.TimerHandle):
                late = began - handle.when()
                if late > _LONG_S:
                    self._add("late timer", began, late, 0.0, self._waited - earlier)
        cpu = time.thread_time()
        self._moved = began
        try:
            self._run(handle)
        finally:
            self._moved = ended = time.perf_counter()
            if ended - began > _LONG_S:
                cpu = time.thread_time() - cpu
                earlier = self._waited
                self._waited = self._read_waited()
                self._read_at = ended
                what = _name_of(handle)
                self._add(what, ended, ended - began, cpu, self._waited - earlier)

    def _add(
        self, what: str, ended: float, seconds: float, cpu: float, waited: float
    ) -> None:
        seen, where = self._seen
        others = self._others
        grown = {
            task: now - others.get(task, now)
            for task, now in self._read_others().items()
        }
        stolen = grown.pop(_STOLEN)
        self.steps.append(
            {
                "what": what,
                "ended": ended,
                "seconds": seconds,
                "cpu": cpu,
                "waited": min(waited, seconds - cpu),
                "others": max(grown.values(), default=0.0),
                "stolen": stolen,
                "where": where if seen > ended - seconds else "",
            }
        )

    def _read_waited(self) -> float:
        """Return how long the loop's thread has waited for a processor, in seconds."""
        if self._schedstat < 0:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _read_others(self) -> dict[str, float]:
        """Return how long each other thread has waited for a processor.

        The entry _STOLEN is how long the machine's processors were taken away.
        """
        found = {_STOLEN: 0.0}
        with contextlib.suppress(OSError):
            fields = Path("/proc/stat").read_bytes().split(maxsplit=9)
            found[_STOLEN] = int(fields[8]) / os.sysconf("SC_CLK_TCK")
            for task in os.listdir("/proc/self/task"):
                # A thread may have ended.
                with contextlib.suppress(OSError):
                    if task != self._loop_task:
                        fields = Path(_schedstat(task)).read_bytes().split()
                        found[task] = int(fields[1]) / 1e9
        return found

    def _restart_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run a timer often, because a late one shows a wait outside of callbacks."""
        loop.call_later(_TIMER_S, self._restart_timer, loop)

    def _watch(self) -> None:
        """Record the functions of all threads while the event loop is busy for long."""
        own = threading.get_ident()
        while True:
            time.sleep(_SHOWN_S / 2)
            if time.perf_counter() - self._moved < _SHOWN_S:
                self._others = self._read_others()
                continue
            frames = sys._current_frames()
            texts = [_place_of(frames.pop(self._loop_thread))]
            texts += [
                _place_of(frame) for thread, frame in frames.items() if thread != own
            ]
            self._seen = time.perf_counter(), ", beside ".join(filter(None, texts))


def _schedstat(task: str) -> str:
    return f"/proc/self/task/{task}/schedstat"


def _place_of(frame: Any) -> str:
    """Return the innermost three functions of a thread, unless it waits for work."""
    calls = traceback.extract_stack(frame)[-3:]
    if calls[-1].name in ("_worker", "wait", "get", "_run"):
        return ""
    return " > ".join(f"{Path(call.filename).stem}.{call.name}" for call in calls)


def _name_of(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    return getattr(callback, "__qualname__", type(callback).__name__)


def _serve(report: str, arguments: Sequence[str]) -> None:
    from netshim.command import main

    recorder = _Recorder()
    recorder.install()
    try:
        main(arguments, standalone_mode=False)
    finally:
        Path(report).write_text(json.dumps(recorder.steps))


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
