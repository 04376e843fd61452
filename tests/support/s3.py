"""An S3 server on this machine, for tests of object stores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

SECRET = "hush-hush"


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Run the server, and yield the options with which Spark reads from it."""
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {
            "store.endpoint": f"http://{host}:{port}",
            "store.region": "us-east-1",
            "store.accessKey": "test",
            "store.secretKey": SECRET,
        }
    finally:
        server.stop()


def upload(options: Mapping[str, str], directory: Path, target: str) -> Any:
    """Copy a directory to bucket/path, and return the file system of pyarrow that
    contains it.
    """
    from pyarrow import fs

    system = fs.S3FileSystem(
        endpoint_override=options["store.endpoint"].removeprefix("http://"),
        scheme="http",
        region=options["store.region"],
        access_key=options["store.accessKey"],
        secret_key=options["store.secretKey"],
        allow_bucket_creation=True,
    )
    system.create_dir(target.split("/", maxsplit=1)[0])
    fs.copy_files(str(directory), target, destination_filesystem=system)
    return system
