"""The part of a driver: begins a write, publishes its manifest, asks for its outcome, and removes old files.

Rules:
- After publish() all of a write will be carried out; nothing of it is visible yet.
- Files that no manifest names are garbage after a day: of attempts that lost, or came late. They are removed when two
  looks a day apart found them old, so that one jump of the wall clock removes nothing.

This module takes no lock and gives out no offset: applying.py does, for the holder of the directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Sequence
from typing import Final, Literal

from logcore import checkpoint
from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
)
from logcore.fs import FS, opened
from logcore.kernels.checksum import crc32c
from logcore.names import ASSIGNED, LOG, STATE, staging_path
from logcore.staging.manifest import (
    CARRIED,
    CLAIM,
    DAMAGED,
    READY,
    REFUSED,
    Carried,
    Manifest,
    StagedFile,
    app_name,
    check_directory,
    check_txid,
    manifest_name,
    names_in,
    read_manifest,
    read_state,
    remove_tree,
)

_MARKS: Final = "logcore.garbage"
#: Staged files that no manifest names, and the state of applications that write no more, are removed at these ages.
GARBAGE_MS: Final = 24 * 3_600_000
STATE_MS: Final = 30 * 24 * 3_600_000
MANIFEST_BYTES: Final = 32 << 20


class Staging:
    """The staging directory of one log directory, for the driver of tasks that write into it."""

    def __init__(self, fs: FS, directory: str) -> None:
        self._fs = fs
        self.directory = fs.real_path(directory)
        self.path = staging_path(self.directory)

    def begin(self, txid: str) -> None:
        """Makes the directory that tasks stage in. Raises InvalidConfigError when its files could not be moved into the
        log directory, because that lies on another file system.
        """
        fs = self._fs
        check_directory(fs, self.path)
        checkpoint.ensure_directory(fs, self.path)
        # The name of the inner directory is synced with that of the manifest beside it.
        path = os.path.join(self.path, check_txid(txid))
        with contextlib.suppress(FileExistsError):
            fs.mkdir(path)
        check_directory(fs, path)
        if fs.identity(self.path)[0] != fs.identity(self.directory)[0]:
            raise InvalidConfigError(
                "the log directory is the root of a file system of its own, so segments staged beside it cannot be "
                f"moved into it; use a directory inside it, such as {os.path.join(self.directory, 'data')}"
            )

    def is_begun(self, txid: str) -> bool:
        """Whether the directory that begin() made is seen here."""
        return self._fs.is_directory(os.path.join(self.path, check_txid(txid)))

    def store(self, txid: str, pieces: Sequence[Carried]) -> list[StagedFile]:
        """Stores pieces that tasks have sent to the driver, all in one file, durably; to be published with the rest.

        Raises CorruptLogError for a piece that is not what its task sent.
        """
        if not pieces:
            return []
        fs = self._fs
        directory = os.path.join(self.path, check_txid(txid))
        files = []
        at = 0
        with opened(fs, os.path.join(directory, CARRIED + LOG), write=True, create=True) as handle:
            for piece in pieces:
                if crc32c(piece.data) != piece.crc:
                    raise CorruptLogError("a carried piece is not what its task sent", path=directory, position=at)
                fs.pwrite(handle, piece.data, at)
                size = len(piece.data)
                facts = (piece.count, size, piece.batches, piece.max_timestamp, piece.crc)
                files.append(StagedFile(piece.topic, piece.partition, f"{txid}/{CARRIED}", *facts, position=at))
                at += size
            fs.fsync(handle)
        fs.sync_dir(directory)
        return files

    def publish(self, manifest: Manifest) -> None:
        """Decides that the write will be carried out. Durable when this returns; nothing of it is visible yet."""
        check_directory(self._fs, self.path)
        self._check_undamaged(manifest.app_id, manifest.version)
        # Other drivers may clean up at the same time. A write must not fail because of garbage.
        with contextlib.suppress(LogcoreError, OSError):
            self._collect_garbage(manifest.txid)
        content = manifest.pack()
        if len(content) > MANIFEST_BYTES:
            raise InvalidConfigError(
                "too many staged files for one write; use fewer tasks or partitions",
                expected=f"a manifest of at most {MANIFEST_BYTES} bytes",
                found=len(content),
            )
        # The refusal of an earlier attempt, whose driver did not ask for it, is not that of this one.
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self.path, manifest_name(manifest.app_id, manifest.version, REFUSED)))
        # Two drivers of one query may come here at once, one of them given up for dead.
        name = manifest_name(manifest.app_id, manifest.version, READY)
        temporary = os.path.join(self.path, manifest.txid, name + ".tmp")
        checkpoint.write(self._fs, self.path, name, content, temporary=temporary)

    def is_done(self, app_id: str, version: int) -> bool:
        """Whether a write need not be published any more. The refusal of an earlier attempt is ignored. Raises
        CorruptLogError when the manifest of one was damaged after offsets had been given out.
        """
        self._check_undamaged(app_id, version)
        state = read_state(self._fs, self.path, app_id)
        return state is not None and version <= state["version"]

    def outcome(self, app_id: str, version: int) -> Literal["done", "pending", "unknown"]:
        """The outcome of a write. Raises CorruptLogError when it was refused, once: asking removes the refusal. Raises
        it each time when the manifest was damaged after offsets had been given out.
        """
        found = self._outcome(app_id, version)
        if found != "refused":
            return found
        name = manifest_name(app_id, version, REFUSED)
        reason = checkpoint.read(self._fs, self.path, name) or b""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self.path, name))
        raise CorruptLogError(f"the write was refused: {reason.decode(errors='replace')}", path=self.path)

    def _outcome(self, app_id: str, version: int) -> Literal["done", "pending", "refused", "unknown"]:
        self._check_undamaged(app_id, version)
        # Looked for before the state is read: the owner writes the state first, and removes the manifest then.
        pending = any(
            self._fs.exists(os.path.join(self.path, manifest_name(app_id, version, suffix)))
            for suffix in (READY, CLAIM, ASSIGNED)
        )
        state = read_state(self._fs, self.path, app_id)
        if state is not None and version <= state["version"]:
            return "done"
        if pending:
            return "pending"
        if self._fs.exists(os.path.join(self.path, manifest_name(app_id, version, REFUSED))):
            return "refused"
        return "unknown"

    def withdraw(self, app_id: str, version: int, txid: str) -> bool:
        """Takes a manifest back, as if it had never been published; False when a writer has claimed it, or is done, or
        when another job has published one of that name.
        """
        name = manifest_name(app_id, version, READY)
        path = os.path.join(self.path, name)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rename(path, path + ".withdrawn")
            found = read_manifest(self._fs, self.path, name + ".withdrawn")
            if found is not None and found.txid != txid:
                self._fs.rename(path + ".withdrawn", path)
                return False
            self._fs.sync_dir(self.path)
            self._fs.unlink(path + ".withdrawn")
            return True
        return False

    def abort(self, app_id: str, version: int, txid: str) -> None:
        """Removes all files that were staged for a write, unless it has been published. What was refused is not."""
        damaged = os.path.join(self.path, manifest_name(app_id, version, DAMAGED))
        if not self._fs.exists(damaged) and self._outcome(app_id, version) in ("refused", "unknown"):
            self.abort_files(txid)

    def abort_files(self, txid: str) -> None:
        """Removes the files that were staged for a write that will not be published."""
        remove_tree(self._fs, os.path.join(self.path, check_txid(txid)))

    def forget(self, app_id: str) -> None:
        """Removes the state of an application that will not come again, unless a manifest of it still exists: without
        the state that would be carried out once more, and its files do not exist any more.
        """
        mine = app_name(app_id) + "@"
        if any(name.startswith(mine) for name in names_in(self._fs, self.path, "")):
            return
        # The removed names of manifests, durably: a power cut must not bring one back when the state is gone.
        with contextlib.suppress(FileNotFoundError):
            self._fs.sync_dir(self.path)
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self.path, app_name(app_id) + STATE))

    def _check_undamaged(self, app_id: str, version: int) -> None:
        """Raises CorruptLogError when part of a write may be in place and no file says which."""
        path = os.path.join(self.path, manifest_name(app_id, version, DAMAGED))
        if self._fs.exists(path):
            raise CorruptLogError(
                f"the manifest of version {version} of {app_id!r} was damaged when offsets had been given out; parts "
                "of the write may be in the log. Look there, then remove this file to write that version again",
                path=path,
            )

    def _collect_garbage(self, txid: str) -> None:
        """Removes files that no manifest names and that were found old a day ago already; never those of txid."""
        fs = self._fs
        now_ms = self._fs.now_ms()
        names = fs.listdir(self.path)
        old = [name for name in names if name != txid and self._is_old(name, now_ms)]
        if any(fs.is_directory(os.path.join(self.path, name)) for name in old):
            kept = {manifest.txid for manifest in self._manifests(names)}
            old = [name for name in old if name not in kept]
        before = checkpoint.unpack_checked(checkpoint.read(fs, self.path, _MARKS) or b"") or {}
        marks = {}
        for name in old:
            since = before.get(name)
            # A mark in the future was made by a wrong clock: it begins again.
            if not isinstance(since, int) or since > now_ms:
                since = now_ms
            if now_ms - since > GARBAGE_MS:
                self._remove(name)
            else:
                marks[name] = since
        if marks != before:
            checkpoint.write(fs, self.path, _MARKS, checkpoint.pack_checked(marks))

    def _is_old(self, name: str, now_ms: int) -> bool:
        fs = self._fs
        path = os.path.join(self.path, name)
        if name.endswith((READY, CLAIM, ASSIGNED, DAMAGED)) or name == _MARKS:
            return False
        try:
            newest = fs.modified_ms(path)
            if fs.is_directory(path):
                inside = (fs.modified_ms(os.path.join(path, one)) for one in fs.listdir(path))
                newest = max(newest, *inside, 0)
        except FileNotFoundError:
            return False  # others clean up too
        if name.endswith(STATE):
            return now_ms - newest > STATE_MS and _is_unnamed(fs, self.path, name)
        return now_ms - newest > GARBAGE_MS

    def _remove(self, name: str) -> None:
        path = os.path.join(self.path, name)
        if self._fs.is_directory(path):
            remove_tree(self._fs, path)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(path)

    def _manifests(self, names: Iterable[str]) -> Generator[Manifest, None, None]:
        """Raises CorruptLogError when one is damaged: the files that it names are not known then."""
        for name in names:
            if name.endswith((READY, CLAIM, ASSIGNED, DAMAGED)):
                found = read_manifest(self._fs, self.path, name)
                if found is not None:
                    yield found


def _is_unnamed(fs: FS, path: str, name: str) -> bool:
    """Whether a state belongs to a write without a name, which cannot be repeated; the state of a named one is kept for
    ever.
    """
    state = checkpoint.unpack_checked(checkpoint.read(fs, path, name) or b"") or {}
    return state.get("app_id") is not None and state.get("app_id") == state.get("txid")
