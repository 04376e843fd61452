"""The program `logcore`, also `python -m logcore`: it starts the command line in
cli/commands.py.

`logcore info` does not need click, so it works without the extra `cli`. All other
commands then print the command that installs it. This module has no commands of its
own.
"""

from __future__ import annotations

import os
import sys

from logcore import __version__


def main() -> None:
    """The entry point. Exit codes are those of cli/options.py."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        # click would take twice the time of an empty Python process.
        print(f"logcore, version {__version__}")
        return
    if arguments in (["--help"], ["-h"], []):
        text = _without_click(arguments)
        if text is not None:
            print(text)
            return
    if arguments in (["info"], ["info", "--json"]):
        import json

        from logcore.cli.packages import installation, installation_text

        print(
            json.dumps(installation()) if "--json" in arguments else installation_text()
        )
        return
    from importlib.util import find_spec

    if find_spec("click") is None:
        from logcore.distribution import install_command

        print(
            f"error: the command line needs click: {install_command('cli')}",
            file=sys.stderr,
        )
        print(
            "next:  without it, `logcore info` and the Python library work",
            file=sys.stderr,
        )
        raise SystemExit(2)
    from logcore.cli.commands import main as cli

    cli(prog_name="logcore")


def _without_click(arguments: list[str]) -> str | None:
    """Return the help of the program, or the completion of a command's name.

    Returns None if click prints something else.
    """
    from logcore.cli.command_list import completion, help_text

    if "_LOGCORE_COMPLETE" in os.environ:
        return completion(os.environ)
    if arguments:
        return help_text()
    return None


if __name__ == "__main__":
    main()
