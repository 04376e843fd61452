"""The distribution that contains this library, for error texts with an install command.

The import names are logcore, netshim and pyspark_logcore. The name `logcore` on PyPI
belongs to an unrelated logging library, so the distribution has another name.

Each command of a shell waits for this module. It imports neither typing nor
importlib.util, which take as long as an empty Python process.
"""

from __future__ import annotations

import os
from importlib.machinery import PathFinder

#: What pip installs. setup.py and pyproject.toml use the same name; a test compares
#: them.
NAME = "logcore-db"
#: A module that only the unrelated distribution `logcore` has.
_FOREIGN_MODULE = "logcore.logger"


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the clone, if this is an editable
    installation of one.
    """
    import importlib.metadata  # late, like json: only an error text needs them
    import json

    try:
        found = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        found = None
    source = json.loads(found or "{}")
    if source.get("dir_info", {}).get("editable"):
        return f"pip install -e '{source['url'].removeprefix('file://')}[{extra}]'"
    return f"pip install '{NAME}[{extra}]'"


def check_package() -> None:
    """Warn if the unrelated distribution `logcore` has been installed into the same
    directory as this library.
    """
    if PathFinder.find_spec(_FOREIGN_MODULE, [os.path.dirname(__file__)]) is not None:
        import warnings

        warnings.warn(
            f"the distribution 'logcore', an unrelated logging library, is installed in the same place as {NAME}, and "
            f"both are imported as 'logcore'. Run: pip uninstall -y logcore {NAME}; pip install {NAME}",
            RuntimeWarning,
            stacklevel=3,
        )
