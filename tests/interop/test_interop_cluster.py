"""Spark on two machines: a standalone cluster whose second worker has a separate mount
namespace with other files. The machine without the log directory can write, because its
tasks send rows to the driver, and can read through a broker. Reading the directory or
another directory on that machine is an error that contains host and path.

Needs root, for the namespace, and Java 17. Run by `make interop`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyspark

import logcore
import netshim
import pyspark_logcore

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]
TESTS = Path(__file__).resolve().parents[1]
ROWS = 400


class Cluster:
    """A master and two workers with one slot each. In the second worker,
    `mounted_instead` is mounted at the path `hidden`.
    """

    def __init__(self, folder: Path, hidden: Path, mounted_instead: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        master = self._start(
            "master",
            "master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--webui-port",
            "0",
        )
        self.url = self._wait(master, r"Starting Spark master at (spark://\S+)")
        mount = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'mount --bind "{mounted_instead}" "{hidden}" && exec "$@"',
            "sh",
        ]
        for number, before in enumerate(([], mount)):
            options = [
                "--host",
                "127.0.0.1",
                "--cores",
                "1",
                "--memory",
                "1g",
                "--webui-port",
                "0",
            ]
            options += ["--work-dir", str(folder / f"work{number}"), self.url]
            worker = self._start(
                f"worker{number}", "worker.Worker", *options, before=before
            )
            self._wait(worker, r"Successfully registered with master")

    def _start(
        self, name: str, class_name: str, *options: str, before: list[str] | None = None
    ) -> Path:
        log_file = self.folder / f"{name}.log"
        command = [
            *(before or []),
            self._program,
            f"org.apache.spark.deploy.{class_name}",
            *options,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        environment["PYSPARK_PYTHON"] = sys.executable
        with log_file.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )
        return log_file

    def _wait(self, log_file: Path, pattern: str) -> str:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            match = re.search(pattern, log_file.read_text())
            if match:
                return match[match.lastindex or 0]
            time.sleep(0.1)
        pytest.fail(f"no {pattern!r}: {log_file.read_text()[-2000:]}")

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait()

    def run(self, step: str, *args: str) -> dict[str, Any]:
        """Return the output of a job in this file: see main()."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        command = [sys.executable, __file__, self.url, step, *args]
        result = subprocess.run(
            command,
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        observed: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return observed


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the log directory, and the directory that is mounted at its path on the
    second machine.
    """
    folder = tmp_path_factory.mktemp("cluster")
    return folder / "here", folder / "elsewhere"


@pytest.fixture(scope="module")
def cluster(
    directories: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    if (
        os.geteuid()
        or shutil.which("unshare") is None
        or subprocess.call(["unshare", "--mount", "true"])
    ):
        pytest.skip("needs root and unshare, for a mount namespace")
    try:
        pyspark_logcore.ensure_java()
    except pyspark_logcore.JavaNotFoundError as error:
        pytest.skip(str(error))
    for directory in directories:
        directory.mkdir()
    cluster = Cluster(tmp_path_factory.mktemp("spark"), *directories)
    try:
        yield cluster
    finally:
        cluster.stop()


def fill(path: Path, rows: int) -> None:
    with logcore.open_dir(path, create=True) as directory:
        directory.create_topic("orders", 4)
        for partition in range(4):
            directory.partition("orders", partition).append_many(
                [(None, b"%d-%d" % (partition, number)) for number in range(rows)]
            )


def test_machine_without_the_directory_writes_and_reads_through_a_broker(
    cluster: Cluster, directories: tuple[Path, Path]
) -> None:
    path = directories[0] / "data"
    fill(path, ROWS)
    observed = cluster.run("write", str(path))
    assert len(observed["hosts"]) == 2, "both machines had tasks"
    assert sorted(observed["seen"]) == [False, True]
    with logcore.open_dir(path, read_only=True) as directory:
        written = [
            record.value
            for partition in range(4)
            for record in directory.partition("written", partition).read(0)
        ]
    assert sorted(written) == sorted(b"%d" % number for number in range(4 * ROWS))

    with netshim.serve(str(path)) as broker:
        observed = cluster.run("through", broker.bootstrap_servers)
    assert (observed["rows"], observed["distinct"]) == (4 * ROWS, 4 * ROWS)


def test_reading_without_access_to_the_directory_raises(
    cluster: Cluster, directories: tuple[Path, Path]
) -> None:
    path = directories[0] / "other"
    fill(path, ROWS)
    for fail_on_data_loss in ("true", "false"):
        error = cluster.run("read", str(path), fail_on_data_loss)["error"]
        assert (
            "does not see the log directory" in error
            and str(path) in error
            and os.uname().nodename in error
        )
    fill(directories[1] / "other", ROWS + 1)
    for fail_on_data_loss in ("true", "false"):
        error = cluster.run("read", str(path), fail_on_data_loss)["error"]
        assert (
            "directory_id" in error
            and str(path) in error
            and os.uname().nodename in error
        )


def main(url: str, step: str, *args: str) -> None:
    """Run the jobs. Tasks sleep for a short time, so that both machines get some."""
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master(url)
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "OFF")
    )
    builder = builder.config("spark.driver.host", "127.0.0.1").config(
        "spark.executor.memory", "512m"
    )
    builder = builder.config("spark.locality.wait", "0").config(
        "spark.task.maxFailures", "1"
    )
    spark = pyspark_logcore.tune(builder).getOrCreate()
    observed: dict[str, Any] = {}
    if step == "write":
        path = args[0]
        rows = spark.range(4 * ROWS).repartition(8)
        slow = rows.mapInArrow(after_a_pause, rows.schema).selectExpr(
            "cast(id as string) as value"
        )
        slow.write.format("logcore").mode("append").option("topic", "written").option(
            "numPartitions", 4
        ).save(path)
        seen = (
            spark.sparkContext.parallelize(range(8), 8)
            .map(lambda _: mount_namespace(path))
            .distinct()
            .collect()
        )
        observed = {
            "hosts": sorted({host for host, _ in seen}),
            "seen": [is_there for _, is_there in seen],
        }
    elif step == "through":
        reader = (
            spark.read.format("logcore")
            .option("kafka.bootstrap.servers", args[0])
            .option("subscribe", "orders")
        )
        rows = reader.option("minPartitions", 8).load()
        values = [
            row["value"]
            for row in rows.mapInArrow(after_a_pause, rows.schema).collect()
        ]
        observed = {"rows": len(values), "distinct": len(set(values))}
    else:
        reader = (
            spark.read.format("logcore")
            .option("subscribe", "orders")
            .option("packBytes", 0)
        )
        rows = reader.option("failOnDataLoss", args[1]).load(args[0])
        try:
            observed = {
                "rows": len(rows.mapInArrow(after_a_pause, rows.schema).collect())
            }
        except Exception as error:
            observed = {"error": str(error)}
    spark.stop()
    print(json.dumps(observed))


def after_a_pause(batches: Any) -> Any:
    for batch in batches:
        time.sleep(0.3)
        yield batch


def mount_namespace(path: str) -> tuple[str, bool]:
    time.sleep(0.5)
    with open("/proc/self/mountinfo") as mounts:
        namespace = str(os.stat("/proc/self/ns/mnt").st_ino) + str(len(mounts.read()))
    return namespace, os.path.isdir(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
