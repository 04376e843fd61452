"""The recipe of examples/delivery_postgres.py on a real PostgreSQL server, killed at
every change on disk and every statement. The tests start the server of the system
(apt-get install postgresql) with its data and its socket in a temporary directory. Run
by `make interop`.
"""

from __future__ import annotations

import glob
import os
import pwd
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg")

import logcore  # noqa: E402
from support.real_faults import FaultingFS, PlannedFault, fork  # noqa: E402

pytestmark = pytest.mark.interop

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "delivery_postgres.py"
RECIPE = runpy.run_path(str(EXAMPLE))
COUNT = 20


def program(name: str) -> str:
    """Return a program of the server. Debian does not add them to the PATH."""
    path = shutil.which(name) or next(
        iter(sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)), None
    )
    if path is None:
        pytest.skip(f"needs {name} (Debian: apt-get install postgresql)")
    return path


class Server:
    """A PostgreSQL server. If the tests run as root, it runs as the user of its
    package, because PostgreSQL refuses to run as root.
    """

    def __init__(self, directory: Path) -> None:
        self.place = directory
        self.connection = f"host={directory} dbname=postgres user=postgres"
        self.user: dict[str, Any] = {}
        if os.getuid() == 0:
            try:
                account = pwd.getpwnam("postgres")
            except KeyError:
                pytest.skip(
                    "PostgreSQL does not run as root, and there is no user postgres"
                )
            self.user = {
                "user": account.pw_uid,
                "group": account.pw_gid,
                "extra_groups": [],
            }
            os.chown(directory, account.pw_uid, account.pw_gid)
        command = [
            program("initdb"),
            "-D",
            str(directory / "data"),
            "-U",
            "postgres",
            "-A",
            "trust",
            "--no-locale",
        ]
        subprocess.run(
            command, check=True, capture_output=True, cwd=directory, **self.user
        )
        self.start()

    def start(self) -> None:
        command = [
            program("postgres"),
            "-D",
            str(self.place / "data"),
            "-k",
            str(self.place),
            "-h",
            "",
        ]
        with open(self.place / "out", "ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=self.place, **self.user
            )
        for _ in range(300):
            try:
                psycopg.connect(self.connection).close()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None, (self.place / "out").read_text()[
                    -2000:
                ]
                time.sleep(0.1)
        raise AssertionError("PostgreSQL does not answer")

    def crash(self) -> None:
        """Shut down immediately. As after a power cut, transactions that were not
        committed are lost.
        """
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # The path of a Unix socket has a small limit.
    directory = Path(tempfile.mkdtemp(prefix="logcore-postgres-"))
    server = Server(directory)
    yield server
    server.crash()
    shutil.rmtree(directory)


@pytest.fixture
def data(server: Server, tmp_path: Path) -> Path:
    """Create a topic of two partitions, and tables without rows."""
    with psycopg.connect(server.connection) as database:
        database.execute(RECIPE["TABLES"])
        database.execute("TRUNCATE payments, consumed_offsets")
    with logcore.open_dir(tmp_path / "data", create=True) as directory:
        directory.create_topic("orders", 2)
        for number in range(COUNT):
            directory.partition("orders", number % 2).append(b"%d" % number)
    return tmp_path / "data"


def run(server: Server, data: Path, planned_fault: PlannedFault | None) -> int:
    """Run the recipe. Return the number of changes and statements, or -1 if the process
    was killed.
    """

    def run_recipe(pipe: int) -> int:
        fs = FaultingFS(planned_fault)

        class Connection(psycopg.Connection):  # type: ignore[name-defined, misc]
            """Count a step before each exchange with the server, and one after its
            response.
            """

            def wait(self, *arguments: Any, **named: Any) -> Any:
                with fs._step("sql", str(data)):
                    response = super().wait(*arguments, **named)
                with fs._step("sql answer", str(data)):
                    return response

        with (
            logcore.open_dir(data, fs=fs) as directory,
            Connection.connect(server.connection, autocommit=True) as database,
        ):
            RECIPE["exactly_once"](directory, database)
        os.write(pipe, b"%d" % len(fs.sites))
        return 0

    child, pipe = fork(run_recipe)
    with pipe:
        reported = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGKILL:
        return -1
    assert code == 0, reported
    return int(reported)


def stored(server: Server) -> Counter[bytes]:
    with psycopg.connect(server.connection) as database:
        return Counter(
            bytes(value) for (value,) in database.execute("SELECT value FROM payments")
        )


EACH_ROW_ONCE = Counter(b"%d" % number for number in range(COUNT))


def test_kill_at_each_step_stores_each_row_once(
    server: Server, data: Path, tmp_path: Path
) -> None:
    shutil.copytree(data, tmp_path / "calm")
    steps = run(server, tmp_path / "calm", None)
    assert stored(server) == EACH_ROW_ONCE
    partial_count = 0
    for number in range(steps):
        path = tmp_path / str(number)
        shutil.copytree(data, path)
        with psycopg.connect(server.connection) as database:
            database.execute("TRUNCATE payments, consumed_offsets")
        assert run(server, path, PlannedFault(number)) == -1, (
            f"step {number} of {steps}"
        )
        partial_count += 0 < stored(server).total() < COUNT
        run(server, path, None)
        assert stored(server) == EACH_ROW_ONCE, f"killed at step {number} of {steps}"
        shutil.rmtree(path)
    assert partial_count, "some kills must be between two transactions"


def test_database_crash_between_rows_and_commit_stores_each_row_once(
    server: Server, data: Path
) -> None:
    """The server loses the rows of a transaction that was not committed. The next run
    stores them.
    """
    with logcore.open_dir(data, shared=True) as directory:
        database = psycopg.connect(server.connection, autocommit=True)
        move = RECIPE["StoredOffsets"].move

        def crash(self: Any, listener: Any, after: int) -> None:
            move(self, listener, after)
            server.crash()

        RECIPE["StoredOffsets"].move = crash
        try:
            with pytest.raises(psycopg.OperationalError):
                RECIPE["exactly_once"](directory, database)
        finally:
            RECIPE["StoredOffsets"].move = move
            server.start()
        assert stored(server) == Counter()
        with psycopg.connect(server.connection, autocommit=True) as database_:
            RECIPE["exactly_once"](directory, database_)
    assert stored(server) == EACH_ROW_ONCE


def test_suspended_worker_stores_no_row_twice(server: Server, data: Path) -> None:
    """The worker is in the middle of a transaction when its partitions are assigned to
    another worker, which waits for a row lock.
    """
    with (
        logcore.open_dir(data, shared=True) as directory,
        psycopg.connect(server.connection, autocommit=True) as first,
        psycopg.connect(server.connection, autocommit=True) as other,
        directory.consumer() as consumer,
    ):
        consumer.assign([("orders", 0), ("orders", 1)])
        late_callback = RECIPE["StoredOffsets"](consumer, first)
        late_callback.on_partitions_assigned(consumer.assignment())
        RECIPE["exactly_once"](directory, other)
        with pytest.raises(RuntimeError, match="another owner"), first.transaction():
            first.execute(RECIPE["INSERT"], ("orders", 0, 0, b"0"))
            late_callback.move(next(iter(consumer.assignment())), 7)
    assert stored(server) == EACH_ROW_ONCE


def test_two_workers_divide_the_partitions_and_store_each_row_once(
    server: Server, data: Path
) -> None:
    command = [sys.executable, str(EXAMPLE), str(data), server.connection]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for worker in workers:
        _, reported = worker.communicate(timeout=60)
        assert worker.returncode == 0 or b"another owner" in reported, reported.decode()
    # Files of a worker that ended before the other worker joined.
    subprocess.run(command, check=True, timeout=60)
    assert stored(server) == EACH_ROW_ONCE
