"""Foreign files, damaged files and files of a newer version: each raises an error that
names the file, and the file is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from logcore.errors import (
    CorruptRegistryError,
    LogNotFoundError,
    NodeNotFoundError,
    StorageReadError,
    StorageWriteError,
    UnsupportedRegistryError,
)
from logcore.registry import FileRegistry, Node, node_file, open_registry
from logcore.registry.node_file import (
    NodeHeader,
    NodeKind,
    Slot,
    new_file,
    read_header,
    read_slot,
)
from logcore.registry.sessions import read_file
from logcore.testing import SimulatedDisk

CREATION = bytes(range(16))
HEAD = NodeHeader(CREATION, NodeKind.PERSISTENT)


def registry_with(
    content: bytes, name: str = "a.node"
) -> tuple[SimulatedDisk, FileRegistry]:
    disk = SimulatedDisk({"data": None})
    registry = open_registry("/data", fs=disk)
    disk.put(f"/data.registry/{name}", content)
    return disk, registry


def refused(content: bytes, kind: type[Exception]) -> None:
    """Check that every call on a node with this file raises, and that the file does not
    change.
    """
    disk, registry = registry_with(content)
    with registry:
        acts: list[Callable[[], object]] = [
            lambda: registry.get("/a"),
            lambda: registry.set("/a", b""),
            lambda: registry.create("/a"),
            lambda: registry.create("/a", ephemeral=True),
            lambda: registry.delete("/a"),
            lambda: registry.update("/a", lambda value: b""),
            lambda: registry.create("/a/b"),
        ]
        for act in acts:
            with pytest.raises(kind):
                act()
        # The damaged file hides no other node.
        assert registry.children("/") == ["a"]
        assert disk.content("/data.registry/a.node") == content
        registry.create("/b", b"others are not harmed")


@pytest.mark.parametrize(
    "content",
    [b"text\n", b"\x7fELF" + bytes(5_000), b"LCNODX1\n" + bytes(100), b"\0\0a"],
)
def test_a_foreign_file_is_kept(content: bytes) -> None:
    refused(content, CorruptRegistryError)


def test_a_newer_version_is_kept() -> None:
    refused(b"LCNODE2\n" + b"x" * 5_000, UnsupportedRegistryError)


@pytest.mark.parametrize("position", [0, 9, 20, 30, 40, 43])
def test_a_damaged_head_of_a_persistent_node_is_an_error(position: int) -> None:
    content = bytearray(new_file(HEAD, Slot(0, b"value")))
    content[position] ^= 0x10
    refused(bytes(content), CorruptRegistryError)


def test_a_persistent_node_without_a_whole_version_is_an_error() -> None:
    content = bytearray(new_file(HEAD, Slot(0, b"value")))
    content[HEAD.place(0) + 40] ^= 1
    refused(bytes(content), CorruptRegistryError)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20, 39, 40, 42])
def test_file_of_a_dead_writer_is_not_a_node(size: int) -> None:
    whole = new_file(
        NodeHeader(CREATION, NodeKind.EPHEMERAL), Slot(0, b"value", "ab" * 16)
    )
    for content in (whole[:size], whole[:size].ljust(4096, b"\0")):
        _, registry = registry_with(content)
        with registry:
            with pytest.raises(NodeNotFoundError):
                registry.get("/a")
            assert registry.children("/") == []
            assert registry.create("/a", b"new") == 0
            assert registry.get("/a") == Node(b"new", 0)


def test_truncated_ephemeral_file_is_not_a_node() -> None:
    head = NodeHeader(CREATION, NodeKind.EPHEMERAL, name="n" * 300)
    whole = new_file(head, Slot(0, b"value", "ab" * 16))
    for size in [*range(400), *range(4090, len(whole) + 1)]:
        found = read_header(whole[:size], "x")
        slot = None if found is None else read_slot(found, whole[:size])
        assert (slot is not None) == (size == len(whole)), size


def test_slot_with_a_changed_bit_is_invalid() -> None:
    whole = new_file(HEAD, Slot(0, b"value", "ab" * 16))
    start = HEAD.place(0)
    for position in range(start, len(whole)):
        for bit in range(8):
            content = bytearray(whole)
            content[position] ^= 1 << bit
            assert read_slot(HEAD, bytes(content)) is None, (position, bit)


def test_slot_of_a_node_that_was_created_again_is_ignored() -> None:
    other = NodeHeader(bytes(16), NodeKind.PERSISTENT)
    assert read_slot(HEAD, HEAD.pack() + Slot(0, b"value").pack(other)) is None


def test_a_torn_read_is_repeated() -> None:
    """While two changes are written, both slots may appear torn to one read; see B61."""
    disk = SimulatedDisk(
        {
            "f": new_file(HEAD, Slot(2, b"two")).ljust(HEAD.place(1), b"\0")
            + Slot(1, b"one").pack(HEAD)
        }
    )
    looks = 0

    class Passing(SimulatedDisk):
        def __init__(self) -> None:
            self.__dict__.update(disk.__dict__)

        def pread(self, handle: int, size: int, position: int) -> bytes:
            nonlocal looks
            looks += 1
            data = bytearray(super().pread(handle, size, position))
            if looks == 1:
                data[HEAD.place(0) + 3] ^= 1
                data[HEAD.place(1) + 3] ^= 1
            return bytes(data)

    passing = Passing()
    found = read_file(passing, passing.open("/f"), "/f")
    assert found is not None
    assert found[1] == Slot(2, b"two")


@pytest.mark.parametrize(
    "path",
    [
        "/controller",
        "/brokers/ids/1",
        "/consumers/g/ids/c",
        "/consumers/g/owners/t/0",
        "/consumers/g/group",
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        b"\x91" * 5_000,
        b"LCNODE1L" + b"\x91" * 5_000,
        bytes(4_096) + b"\x91" * 100,
        HEAD.pack()[:4_000] + b"\x91" * 9_000,
    ],
)
def test_unsynced_node_after_a_power_cut_does_not_exist(
    path: str, content: bytes
) -> None:
    """If the node named the owner of a partition, the group could not acquire the
    partition until the file was deleted.
    """
    disk, registry = registry_with(content, path[1:] + ".node")
    with registry:
        with pytest.raises(NodeNotFoundError):
            registry.get(path)
        registry.create(path, b"again", ephemeral=True)
        assert registry.get(path).value == b"again"
    disk.put(f"/data.registry/{path[1:]}.node", content)
    with open_registry("/data", fs=disk) as registry:
        registry.clean()
        assert not disk.exists(f"/data.registry/{path[1:]}.node")


def test_damaged_node_does_not_prevent_the_end_of_a_session() -> None:
    disk, registry = registry_with(b"text", "a/damaged.node")
    registry.create("/a/e", ephemeral=True)
    registry.close()
    assert not disk.exists("/data.registry/a/e.node")
    assert disk.content("/data.registry/a/damaged.node") == b"text"


def test_truncated_version_leaves_the_previous_version() -> None:
    disk = SimulatedDisk({"data": None})
    with open_registry("/data", fs=disk) as registry:
        registry.create("/a", b"0")
        registry.set("/a", b"1")
        registry.set("/a", b"2" * 100)
        whole = disk.content("/data.registry/a.node")
        start = HEAD.place(2)
        old = new_file(
            NodeHeader(read_header(whole, "a").creation, NodeKind.PERSISTENT),
            Slot(0, b"0"),
        )[start:]  # type: ignore[union-attr]
        for cut in range(start, start + 100, 7):
            torn = whole[:cut] + old[cut - start :] + bytes(136)
            disk.put(
                "/data.registry/a.node", torn[: start + 136] + whole[start + 136 :]
            )
            assert registry.get("/a") == Node(b"1", 1)


# -- the directory ---------------------------------------------------------------------


def test_directory_of_other_files_is_not_a_registry(tmp_path: Path) -> None:
    (tmp_path / "data.registry").mkdir()
    (tmp_path / "data.registry" / "notes.txt").write_text("mine")
    with pytest.raises(CorruptRegistryError, match=r"notes\.txt"):
        open_registry(tmp_path / "data")
    assert [path.name for path in (tmp_path / "data.registry").iterdir()] == [
        "notes.txt"
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("logcore registry 2\n", UnsupportedRegistryError),
        ("other\n", CorruptRegistryError),
    ],
)
def test_another_format_is_refused(
    tmp_path: Path, text: str, kind: type[Exception]
) -> None:
    open_registry(tmp_path / "data").close()
    (tmp_path / "data.registry" / ".format").write_text(text)
    for read_only in (False, True):
        with pytest.raises(kind):
            open_registry(tmp_path / "data", read_only=read_only)


def test_no_registry_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LogNotFoundError):
        open_registry(tmp_path / "data", read_only=True)
    assert not list(tmp_path.iterdir())


def test_other_files_in_a_registry_are_left_alone(tmp_path: Path) -> None:
    with open_registry(tmp_path / "data") as registry:
        registry.create("/a/b")
        (tmp_path / "data.registry" / "a" / "notes.txt").write_text("mine")
        assert registry.children("/a") == ["b"]
        registry.delete("/a/b")
        with pytest.raises(CorruptRegistryError, match=r"notes\.txt"):
            registry.delete("/a")
        registry.clean()
        assert (tmp_path / "data.registry" / "a" / "notes.txt").read_text() == "mine"


def test_a_link_in_the_place_of_a_node_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(new_file(HEAD, Slot(0, b"secret")))
    with open_registry(tmp_path / "data") as registry:
        (tmp_path / "data.registry" / "a.node").symlink_to(tmp_path / "secret")
        with pytest.raises(StorageReadError):
            registry.get("/a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_missing_write_permission_raises_a_named_error(tmp_path: Path) -> None:
    open_registry(tmp_path / "data").close()
    (tmp_path / "data.registry").chmod(0o500)
    (tmp_path / "data.registry" / ".sessions").chmod(0o500)
    try:
        with pytest.raises(StorageWriteError):
            open_registry(tmp_path / "data")
    finally:
        (tmp_path / "data.registry").chmod(0o700)
        (tmp_path / "data.registry" / ".sessions").chmod(0o700)


@pytest.mark.parametrize(
    ("mode", "directory", "file"), [(0o755, 0o700, 0o600), (0o775, 0o770, 0o660)]
)
def test_registry_has_the_permissions_of_the_logs(
    tmp_path: Path, mode: int, directory: int, file: int
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(mode)
    with open_registry(tmp_path / "data") as registry:
        registry.create("/a/b", ephemeral=True)
        registry.create("/a/p")
        for path in (
            tmp_path / "data.registry",
            *(tmp_path / "data.registry").rglob("*"),
        ):
            expected = directory if path.is_dir() else file
            assert path.stat().st_mode & 0o777 == expected, path


def test_file_name_is_converted_back_to_its_node_name() -> None:
    for name in ("a", "a.b", ".a", "..", "%", "a/b", "ä", "x" * 200, "a.node", "a.tmp"):
        file = node_file.file_name(name)
        assert "/" not in file
        assert not file.startswith(".")
        assert not file.endswith((".node", ".tmp"))
        assert node_file.is_hashed(file) or node_file.node_name(file) == name
    assert node_file.node_name("%61") is None, "another name for the file of 'a'"
    assert node_file.node_name("%ff") is None
    assert node_file.node_name("") is None
