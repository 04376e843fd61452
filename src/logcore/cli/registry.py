"""`logcore registry`: show the nodes of a registry of files, read-only."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

import click

from logcore.cli.options import CommandGroup, json_option, log_directory_argument
from logcore.cli.terminal import Lines, print_table, to_json, wants_json
from logcore.errors import NodeNotFoundError
from logcore.registry import FileRegistry, Node, open_registry

#: Maximum number of columns of a value in the tree.
_MAX_SHOWN: Final = 120

_path_argument = click.argument("path", metavar="[PATH]", default="/")


@click.group(cls=CommandGroup)
def registry() -> None:
    """Show the registry of a log directory: members of groups, owners, brokers."""


@registry.command("ls")
@log_directory_argument
@_path_argument
@json_option
def registry_ls(directory: str, path: str, as_json: bool) -> None:
    """List the child nodes of PATH; the registry is the directory DIR.registry."""
    with open_registry(directory, read_only=True) as opened:
        above = ""
        if path != "/":
            above = path
        rows = []
        for name in opened.children(path):
            try:
                node = opened.get(f"{above}/{name}")
            except NodeNotFoundError:  # deleted since the listing
                continue
            rows.append((name, node, len(opened.children(f"{above}/{name}"))))
    if wants_json(as_json):
        with Lines() as out:
            for name, node, children in rows:
                facts = {
                    "path": f"{above}/{name}",
                    "version": node.version,
                    "session": node.session,
                }
                out.write(
                    to_json(
                        {**facts, "size_bytes": len(node.value), "children": children}
                    )
                )
        return
    cells = [
        (name, children or "", len(node.value), node.version, node.session)
        for name, node, children in rows
    ]
    print_table(
        ("name", "children", "bytes", "version", "session"), cells, right=(1, 2, 3)
    )


@registry.command("tree")
@log_directory_argument
@_path_argument
@json_option
def registry_tree(directory: str, path: str, as_json: bool) -> None:
    """List all nodes below PATH with their values; a terminal shortens long values."""
    with open_registry(directory, read_only=True) as opened:
        rows = list(_below(opened, path, 0))
    if wants_json(as_json):
        with Lines() as out:
            for place, _, node in rows:
                facts = {
                    "path": place,
                    "version": node.version,
                    "session": node.session,
                }
                out.write(to_json({**facts, "value": _shown(node.value)}))
        return
    for place, depth, node in rows:
        shown = _shown(node.value)
        if isinstance(shown, str):
            text = shown
        else:
            text = json.dumps(shown, ensure_ascii=False)
        if len(text) > _MAX_SHOWN:
            text = f"{text[:_MAX_SHOWN]}..."
        of = ""
        if node.session:
            of = " (ephemeral)"
        click.echo(f"{'  ' * depth}{place.rpartition('/')[2]}{of}  {text}".rstrip())


def _below(
    opened: FileRegistry, path: str, depth: int
) -> Iterator[tuple[str, int, Node]]:
    """Yield path, depth and node of all descendants of a path, parents first."""
    above = ""
    if path != "/":
        above = path
    for name in opened.children(path):
        place = f"{above}/{name}"
        with contextlib.suppress(NodeNotFoundError):  # deleted since the listing
            yield place, depth, opened.get(place)
            yield from _below(opened, place, depth + 1)


@registry.command("get")
@log_directory_argument
@click.argument("path", metavar="PATH")
@json_option
def registry_get(directory: str, path: str, as_json: bool) -> None:
    """Show the value and version of the node PATH, and its owner if it is ephemeral."""
    with open_registry(directory, read_only=True) as opened:
        node = opened.get(path)
        owner = _owner(opened, node)
    if wants_json(as_json):
        facts = {
            "path": path,
            "version": node.version,
            "session": node.session,
            **owner,
            "value": _shown(node.value),
        }
        with Lines() as out:
            out.write(to_json(facts))
        return
    of = ""
    if node.session:
        of = f", session {node.session}, process {owner['pid']}"
    click.echo(f"{path}  version {node.version}{of}")
    shown = _shown(node.value)
    click.echo(
        shown
        if isinstance(shown, str)
        else json.dumps(shown, indent=2, ensure_ascii=False)
    )


def _owner(opened: FileRegistry, node: Node) -> dict[str, int | None]:
    if node.session is None:
        return {}
    for info in opened.sessions():
        if info.id == node.session and info.record is not None:
            return {"pid": info.record.pid}
    return {"pid": None}


def _shown(value: bytes) -> Any:
    """Return JSON as values, other text as text, and other bytes in hex."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    try:
        found = json.loads(text)
    except ValueError:
        return text
    if isinstance(found, dict | list):
        return found
    return text
