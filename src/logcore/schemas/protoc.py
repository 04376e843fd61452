"""Runs protoc of grpcio-tools in a process of its own, with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Final

from logcore.errors import InvalidSchemaError

_LIMIT_S: Final = 20


def compiled(text: str, known: bytes) -> bytes:
    """Return the FileDescriptorSet of a Protobuf text.

    `known` is the FileDescriptorSet of the files that the text may import.

    Raises:
        InvalidSchemaError: protoc refused the text, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="logcore-protoc-") as folder:
        source, before, after = (
            os.path.join(folder, name)
            for name in ("schema.proto", "imports.bin", "schema.bin")
        )
        with open(source, "w", encoding="utf-8") as file:
            file.write(text)
        with open(before, "wb") as binary:
            binary.write(known)
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{folder}",
            f"--descriptor_set_in={before}",
            f"--descriptor_set_out={after}",
            source,
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, check=False, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired as error:
            raise InvalidSchemaError("protoc takes too long") from error
        if done.returncode:
            reason = done.stderr.decode("utf-8", "replace").replace(folder + os.sep, "")
            raise InvalidSchemaError(
                f"the Protobuf schema is invalid: {reason.strip()[:300]}"
            )
        with open(after, "rb") as binary:
            return binary.read()
