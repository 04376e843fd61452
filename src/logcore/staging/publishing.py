"""The driver's part: begins a write, publishes its manifest, gets its outcome, and
removes old files.

Rules:
- After publish() the whole write will be carried out; none of it is visible yet.
- Files that no manifest names are garbage after a day. They belong to attempts that
  lost or came late. They are removed when two checks a day apart found them old, so
  that one jump of the wall clock removes nothing.

This module takes no lock and assigns no offsets: applying.py does, for the owner of the
directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Sequence
from typing import Final, Literal

from logcore.errors import (
    CorruptLogError,
    InvalidConfigError,
    LogcoreError,
)
from logcore.fs import FS, opened
from logcore.kernels.checksum import crc32c
from logcore.metadata import checkpoint
from logcore.metadata.filenames import ASSIGNED, LOG, STATE, staging_path
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

_GARBAGE_MARKS: Final = "logcore.garbage"
#: Age at which staged files without a manifest, and states of inactive applications,
#: are removed.
GARBAGE_MS: Final = 24 * 3_600_000
STATE_MS: Final = 30 * 24 * 3_600_000
MANIFEST_BYTES: Final = 32 << 20


class Staging:
    """The staging directory of one log directory, for the driver of tasks that write
    into it.
    """

    def __init__(self, fs: FS, directory: str) -> None:
        self._fs = fs
        self.directory = fs.real_path(directory)
        self.path = staging_path(self.directory)

    def begin(self, txid: str) -> None:
        """Create the directory for the tasks' files.

        Raises:
            InvalidConfigError: its files could not be moved into the log directory,
                because that is on another file system.
        """
        fs = self._fs
        check_directory(fs, self.path)
        checkpoint.ensure_directory(fs, self.path)
        # The name of the inner directory is synced together with the name of the
        # manifest.
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
        """Return whether the directory from begin() is visible here."""
        return self._fs.is_directory(os.path.join(self.path, check_txid(txid)))

    def store(self, txid: str, pieces: Sequence[Carried]) -> list[StagedFile]:
        """Store pieces that tasks sent to the driver in one file, durably.

        Publish the returned files with the others.

        Raises:
            CorruptLogError: a piece differs from the data that its task sent.
        """
        if not pieces:
            return []
        fs = self._fs
        directory = os.path.join(self.path, check_txid(txid))
        files = []
        at = 0
        with opened(
            fs, os.path.join(directory, CARRIED + LOG), write=True, create=True
        ) as handle:
            for piece in pieces:
                if crc32c(piece.data) != piece.crc:
                    raise CorruptLogError(
                        "a carried piece differs from the one that its task sent",
                        path=directory,
                        position=at,
                    )
                fs.pwrite(handle, piece.data, at)
                size = len(piece.data)
                facts = (
                    piece.count,
                    size,
                    piece.batches,
                    piece.max_timestamp,
                    piece.crc,
                )
                files.append(
                    StagedFile(
                        piece.topic,
                        piece.partition,
                        f"{txid}/{CARRIED}",
                        *facts,
                        position=at,
                    )
                )
                at += size
            fs.fsync(handle)
        fs.sync_dir(directory)
        return files

    def publish(self, manifest: Manifest) -> None:
        """Commit the write, durably. None of it is visible yet."""
        check_directory(self._fs, self.path)
        self._check_undamaged(manifest.app_id, manifest.version)
        # Other drivers may clean up concurrently. A write must not fail because of
        # garbage.
        with contextlib.suppress(LogcoreError, OSError):
            self._collect_garbage(manifest.txid)
        content = manifest.pack()
        if len(content) > MANIFEST_BYTES:
            raise InvalidConfigError(
                "too many staged files for one write; use fewer tasks or partitions",
                expected=f"a manifest of at most {MANIFEST_BYTES} bytes",
                found=len(content),
            )
        # An earlier attempt was refused and its driver did not fetch the outcome. That
        # refusal does not apply to this attempt.
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(
                os.path.join(
                    self.path, manifest_name(manifest.app_id, manifest.version, REFUSED)
                )
            )
        # Two drivers of one query may run this concurrently, if one was assumed dead.
        name = manifest_name(manifest.app_id, manifest.version, READY)
        temporary = os.path.join(self.path, manifest.txid, name + ".tmp")
        checkpoint.write(self._fs, self.path, name, content, temporary=temporary)

    def is_done(self, app_id: str, version: int) -> bool:
        """Return whether a write needs no publishing. Refusals of earlier attempts are
        ignored.

        Raises:
            CorruptLogError: a manifest was damaged after offsets had been assigned.
        """
        self._check_undamaged(app_id, version)
        state = read_state(self._fs, self.path, app_id)
        return state is not None and version <= state["version"]

    def outcome(
        self, app_id: str, version: int
    ) -> Literal["done", "pending", "unknown"]:
        """Return the outcome of a write.

        Raises:
            CorruptLogError: the write was refused; this removes the refusal, so it is
                raised once. Or its manifest was damaged after offsets had been
                assigned; this is raised each time.
        """
        found = self._outcome(app_id, version)
        if found != "refused":
            return found
        name = manifest_name(app_id, version, REFUSED)
        reason = checkpoint.read(self._fs, self.path, name) or b""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self.path, name))
        raise CorruptLogError(
            f"the write was refused: {reason.decode(errors='replace')}", path=self.path
        )

    def _outcome(
        self, app_id: str, version: int
    ) -> Literal["done", "pending", "refused", "unknown"]:
        self._check_undamaged(app_id, version)
        # Checked before the state is read: the owner first writes the state and then
        # removes the manifest.
        pending = any(
            self._fs.exists(
                os.path.join(self.path, manifest_name(app_id, version, suffix))
            )
            for suffix in (READY, CLAIM, ASSIGNED)
        )
        state = read_state(self._fs, self.path, app_id)
        if state is not None and version <= state["version"]:
            return "done"
        if pending:
            return "pending"
        if self._fs.exists(
            os.path.join(self.path, manifest_name(app_id, version, REFUSED))
        ):
            return "refused"
        return "unknown"

    def withdraw(self, app_id: str, version: int, txid: str) -> bool:
        """Withdraw a published manifest.

        Returns False if a writer has claimed or completed it, or if another job has
        published one with that name.
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
        """Remove all staged files of a write, unless it is published. A refused write
        is not.
        """
        damaged = os.path.join(self.path, manifest_name(app_id, version, DAMAGED))
        if not self._fs.exists(damaged) and self._outcome(app_id, version) in (
            "refused",
            "unknown",
        ):
            self.abort_files(txid)

    def abort_files(self, txid: str) -> None:
        """Remove the staged files of a write that will not be published."""
        remove_tree(self._fs, os.path.join(self.path, check_txid(txid)))

    def forget(self, app_id: str) -> None:
        """Remove the state of an application that will not write again.

        If a manifest of the application still exists, the state is kept. Without it the
        manifest would be carried out again, and its files no longer exist.
        """
        mine = app_name(app_id) + "@"
        if any(name.startswith(mine) for name in names_in(self._fs, self.path, "")):
            return
        # Makes the removal of manifests durable: a power failure must not restore one
        # after the state was removed.
        with contextlib.suppress(FileNotFoundError):
            self._fs.sync_dir(self.path)
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self.path, app_name(app_id) + STATE))

    def _check_undamaged(self, app_id: str, version: int) -> None:
        """Raise CorruptLogError if an unknown part of a write may be in place."""
        path = os.path.join(self.path, manifest_name(app_id, version, DAMAGED))
        if self._fs.exists(path):
            raise CorruptLogError(
                f"the manifest of version {version} of {app_id!r} was damaged when offsets had been given out; parts "
                "of the write may be in the log. Look there, then remove this file to write that version again",
                path=path,
            )

    def _collect_garbage(self, txid: str) -> None:
        """Remove files without a manifest that were already old a day ago, except those
        of txid.
        """
        fs = self._fs
        now_ms = self._fs.now_ms()
        names = fs.listdir(self.path)
        old = [name for name in names if name != txid and self._is_old(name, now_ms)]
        if any(fs.is_directory(os.path.join(self.path, name)) for name in old):
            kept = {manifest.txid for manifest in self._manifests(names)}
            old = [name for name in old if name not in kept]
        before = (
            checkpoint.unpack_checked(
                checkpoint.read(fs, self.path, _GARBAGE_MARKS) or b""
            )
            or {}
        )
        marks = {}
        for name in old:
            since = before.get(name)
            # A mark in the future was made with a wrong clock and is replaced.
            if not isinstance(since, int) or since > now_ms:
                since = now_ms
            if now_ms - since > GARBAGE_MS:
                self._remove(name)
            else:
                marks[name] = since
        if marks != before:
            checkpoint.write(
                fs, self.path, _GARBAGE_MARKS, checkpoint.pack_checked(marks)
            )

    def _is_old(self, name: str, now_ms: int) -> bool:
        fs = self._fs
        path = os.path.join(self.path, name)
        if name.endswith((READY, CLAIM, ASSIGNED, DAMAGED)) or name == _GARBAGE_MARKS:
            return False
        try:
            newest = fs.modified_ms(path)
            if fs.is_directory(path):
                inside = (
                    fs.modified_ms(os.path.join(path, name))
                    for name in fs.listdir(path)
                )
                newest = max(newest, *inside, 0)
        except FileNotFoundError:
            # Other processes clean up too.
            return False
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
        """Yield all manifests.

        Raises:
            CorruptLogError: a manifest is damaged, so the files that it names are unknown.
        """
        for name in names:
            if name.endswith((READY, CLAIM, ASSIGNED, DAMAGED)):
                found = read_manifest(self._fs, self.path, name)
                if found is not None:
                    yield found


def _is_unnamed(fs: FS, path: str, name: str) -> bool:
    """Return whether a state belongs to a write without a name, which cannot be
    repeated.

    The state of a named write is kept indefinitely.
    """
    state = checkpoint.unpack_checked(checkpoint.read(fs, path, name) or b"") or {}
    return state.get("app_id") is not None and state.get("app_id") == state.get("txid")
