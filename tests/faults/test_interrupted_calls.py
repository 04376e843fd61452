"""Ctrl-C at any line of any public call: records are returned or not committed, no claim is kept, no member stays."""

from __future__ import annotations

from pathlib import Path

import logcore
from logcore import claim, claiming, deletions, fs
from logcore.directory import openlogs
from support.interrupting import interrupted


def test_interrupted_opening_of_a_partition_keeps_no_claim(tmp_path: Path) -> None:
    """A partition whose first use was interrupted could not be used again for the life of the process: the claim was
    taken, and nobody had it who could release it.
    """
    nth = left = 0
    while not left:
        nth += 5
        with logcore.open_dir(tmp_path / str(nth), create=True, durability="os") as data:
            data.create_topic("t")
            left = interrupted(
                lambda: data.partition("t", 0), nth, fs.__file__, claim.__file__, claiming.__file__, openlogs.__file__
            ).left
            data.append("t", b"a", partition=0)
        with logcore.open_dir(tmp_path / str(nth)) as data:
            assert [record.value for record in data.read("t")] == [b"a"]
    assert nth > 40


def test_interrupted_deletion_of_a_topic_keeps_no_claim(tmp_path: Path) -> None:
    nth = left = 0
    while not left:
        nth += 5
        with logcore.open_dir(tmp_path / str(nth), create=True, durability="os") as data:
            data.create_topic("t", 2)
            left = interrupted(lambda: data.delete_topic("t"), nth, fs.__file__, deletions.__file__).left
            data.tick()
            if "t" in data:
                data.append("t", b"a", partition=0)
                data.append("t", b"a", partition=1)
    assert nth > 40
