"""Facts about the installation: versions, active kernels, codecs and extras.

This module needs neither click nor rich.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from typing import Any, Final

#: Import names that each codec and each extra of pyproject.toml needs.
CODECS: Final = {"gzip": "zlib", "snappy": "cramjam", "lz4": "lz4", "zstd": "zstandard"}
EXTRAS: Final = {
    "arrow": ("pyarrow",),
    "cli": ("click", "rich"),
    "sql": ("click", "duckdb", "pyarrow"),
    "spark": ("pyspark", "pyarrow"),
    "testing": ("pytest", "hypothesis"),
}


def installation() -> dict[str, Any]:
    """Return the installed and active parts as values for JSON."""
    import logcore

    return {
        "logcore": logcore.__version__,
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "kernels": kernels(),
        "codecs": {codec: _is_installed(module) for codec, module in CODECS.items()},
        "extras": {
            extra: all(map(_is_installed, modules)) for extra, modules in EXTRAS.items()
        },
    }


def kernels() -> str:
    """Name the active kernels, with the reason if they are the slow plain ones."""
    from logcore.kernels import kernel

    if kernel.NAME != "plain":
        return kernel.NAME
    try:
        importlib.import_module("logcore.kernels._compiled")
    except ImportError as error:
        return f"plain, much slower (no compiled module: {error})"
    return "plain, much slower (selected by LOGCORE_KERNELS=plain)"


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def installation_text() -> str:
    """Return the facts of installation() as three lines of text."""
    facts = installation()
    codecs = ", ".join(
        name if there else f"{name} (not installed)"
        for name, there in facts["codecs"].items()
    )
    extras = (
        ", ".join(name for name, there in facts["extras"].items() if there) or "none"
    )
    missing = ", ".join(name for name, there in facts["extras"].items() if not there)
    return (
        f"logcore {facts['logcore']}, Python {facts['python']}, numpy {facts['numpy']}, kernels: {facts['kernels']}\n"
        f"codecs: {codecs}\n"
        f"extras: {extras}" + (f"; not installed: {missing}" if missing else "")
    )
