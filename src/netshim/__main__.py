"""The program `netshim`, also `python -m netshim`: it starts the command line in
command.py, or prints the command that installs it.
"""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """The entry point. Exit codes are those of logcore/cli/options.py."""
    if importlib.util.find_spec("click") is None:
        from logcore.distribution import install_command

        print(
            f"error: the command line needs click: {install_command('cli')}",
            file=sys.stderr,
        )
        print(
            "next:  without it, netshim.serve() and netshim.Server work",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from netshim.command import main as command

    command(prog_name="netshim")


if __name__ == "__main__":
    main()
