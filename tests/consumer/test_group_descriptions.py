"""LogDir.groups(): members, committed offsets and lag."""

from __future__ import annotations

import os
from pathlib import Path

import logcore


def test_groups_have_offsets_and_lag(tmp_path: Path) -> None:
    with logcore.open_dir(tmp_path, create=True, durability="os") as directory:
        assert directory.groups() == {}
        directory.create_topic("t", 2)
        for number in range(10):
            directory.partition("t", number % 2).append(b"%d" % number)
        with directory.consumer(
            group_id="audit",
            client_id="auditor",
            auto_offset_reset="earliest",
            max_poll_records=4,
        ) as consumer:
            consumer.subscribe(["t"])
            assert consumer.poll().count == 4
            consumer.commit()
            (group,) = directory.groups().values()
            assert [member.client_id for member in group.members] == ["auditor"]
            assert group.members[0].partitions == (("t", 0), ("t", 1))
        (group,) = directory.groups().values()
        assert (group.group_id, group.members, group.lag) == ("audit", (), 6)
        assert sum(offset.committed for offset in group.offsets) == 4
        assert all(offset.end == 5 and offset.commit_ms > 0 for offset in group.offsets)
        with logcore.open_dir(tmp_path, read_only=True) as reader:
            assert reader.groups() == {"audit": group}
        directory.delete_topic("t")
        assert directory.groups() == {}


def test_members_that_share_a_directory_have_a_process_and_partitions(
    tmp_path: Path,
) -> None:
    with logcore.open_dir(tmp_path, create=True, shared=True) as directory:
        directory.create_topic("t", 2)
        directory.append("t", b"1")
        with directory.consumer(
            group_id="audit", auto_offset_reset="earliest"
        ) as consumer:
            consumer.subscribe(["t"])
            consumer.poll(1)
            with logcore.open_dir(tmp_path, read_only=True) as reader:
                (group,) = reader.groups().values()
            (member,) = group.members
            assert (member.pid, member.is_alive) == (os.getpid(), True)
            assert member.partitions == (("t", 0), ("t", 1))
            assert group.offsets == ()
        assert directory.groups()["audit"].members == ()
