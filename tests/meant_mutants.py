"""Measure whether tests detect mistakes that a developer could make: a missing sync, two
steps in the wrong order, a stale cache, a limit that is read twice.

    python tests/meant_mutants.py [NAME ...]

mutants.py makes small random changes. Each mistake here would lose data, return wrong
data, block other processes, or keep data that should be deleted. The program prints a
line of JSON for each mistake, and at the end how many were detected.

- No file of the repository is changed: the tests run in a copy, whose sources are first on
  PYTHONPATH.
- The old text of a mistake must occur exactly once. If it does not, this program reports
  an error instead of skipping the mistake.
- A mistake is detected if a test fails or hangs with it and passes without it.
- For each mistake, only the tests that it names run. A mistake that they do not detect
  needs a new test, or must be replaced by another mistake.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
#: Maximum time of the tests of one mistake.
LIMIT_SECONDS: Final = 90
ROUNDS: Final = {
    "LOGCORE_EXPLORE_STATES": "3000",
    "LOGCORE_REGISTRY_ROUNDS": "60",
    "LOGCORE_SHARING_ROUNDS": "30",
    "LOGCORE_GROUP_ROUNDS": "20",
    "LOGCORE_TRANSACTION_ROUNDS": "60",
    "LOGCORE_SHIPPING_ROUNDS": "100",
}


class Mistake(NamedTuple):
    """A replacement of a text in a file below src/. `tests` are arguments of pytest, which
    runs in tests/.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MISTAKES: Final = (
    # -- records that readers see
    Mistake(
        "bound_is_read_without_a_check_for_new_segments", "logcore/partition/state.py",
        "            if segments is self.segments:\n",
        "            if segments is not None:\n",
        "log/test_concurrent_reads.py::test_read_returns_the_log_as_of_one_moment",
    ),
    Mistake(
        "own_transactions_are_not_scanned", "logcore/partition/writer.py",
        "            state.no_transactions_from = last_offset + 1\n",
        "            pass\n",
        "log/test_concurrent_reads.py log/test_log.py",
    ),
    Mistake(
        "transactions_of_other_processes_are_not_scanned", "logcore/partition/writer.py",
        "        self.state.no_transactions_from = end\n",
        "",
        "partition/test_sharing.py",
    ),
    Mistake(
        "end_of_a_scan_is_read_again", "logcore/reader.py",
        "lambda first, last: log._stretch(first, last, isolation),",
        "lambda first, last: log._stretch(first, end, isolation),",
        "log/test_concurrent_reads.py::test_end_of_a_read_is_fixed_when_it_begins",
    ),
    Mistake(
        "committed_bound_is_read_later", "logcore/reader.py",
        "committed, bound, segments = self._scan_transactions()\n",
        "committed, bound, segments = self._scan_transactions()\n            bound = self._state.visible\n",
        "log/test_concurrent_reads.py::test_read_returns_the_log_as_of_one_moment",
    ),
    Mistake(
        "log_start_is_checked_before_the_refresh", "logcore/reader.py",
        "            segments, bound = self._visible_segments()\n"
        "        # Checked after the segments were read, because a deletion moves the start\n"
        "        # before it removes segments.\n"
        "        if not self._state.log_start <= start",
        "            log_start = self._state.log_start\n            segments, bound = self._visible_segments()\n"
        "        if not (self._state.log_start if committed else log_start) <= start",
        "log/test_concurrent_reads.py::test_read_returns_the_log_as_of_one_moment",
    ),
    Mistake(
        "durable_end_read_before_the_size", "logcore/partition/file_view.py",
        "        last.refresh()\n        self._state.publish(end=max(log_start, last.next_offset()))\n"
        "        # Read after the size. A writer creates this file before its first write, so if\n"
        "        # there were unsynced bytes, the file exists.\n"
        "        shown = None\n"
        "        if self._has_visible_end or not has_same_names:\n"
        "            shown = checkpoint.read_visible_end(self._fs, self._path)\n",
        "        shown = None\n"
        "        if self._has_visible_end or not has_same_names:\n"
        "            shown = checkpoint.read_visible_end(self._fs, self._path)\n"
        "        last.refresh()\n        self._state.publish(end=max(log_start, last.next_offset()))\n",
        "log/test_concurrent_reads.py::test_unsynced_record_is_hidden_at_any_step_of_a_refresh",
    ),
    Mistake(
        "directory_listed_once", "logcore/partition/file_view.py",
        "again = list_names(self._fs, self._path)", "again = names",
        "log/test_concurrent_reads.py::test_directory_listing_during_a_rename_is_repeated",
    ),
    Mistake(
        "tail_of_a_truncated_log_continues", "logcore/reader.py",
        "return lowest_truncation < self.offset or state.visible", "return state.visible",
        "log/test_log.py::test_tail_does_not_continue_with_records_that_replaced_its_own",
    ),
    Mistake(
        "control_bit_is_trusted_without_its_crc", "logcore/partition/scan.py",
        "                item.verify()  # only a valid CRC proves that it is one\n                continue\n"
        "            yield item",
        "                continue\n            yield item",
        "faults/test_bit_rot.py::test_flipped_control_bit_hides_no_record",
    ),
    # -- the active segment
    Mistake(
        "sealed_segment_is_not_synced", "logcore/segment.py",
        "        # the next segment.\n"
        "        self.fs.fsync(self.handle)",
        "        # the next segment.",
        "log/test_segments_of_logs.py::test_each_call_does_only_the_expected_disk_operations",
    ),
    Mistake(
        "reopen_closes_the_new_handle", "logcore/segment.py",
        "        close = self._closing\n        self.held = None\n"
        "        self._keep_open(self.fs.open(self.path, write=True))\n        close()",
        "        self.held = None\n"
        "        self._keep_open(self.fs.open(self.path, write=True))\n        self._closing()",
        "partition/test_recovery.py::test_log_truncated_at_every_byte_opens_with_the_longest_whole_prefix",
    ),
    # -- files that are deleted and created
    Mistake(
        "batches_of_other_processes_are_not_checked", "logcore/segment.py",
        "        self._own_from = size\n        self.held = None\n",
        "        self.held = None\n",
        "kernels/test_getting.py",
    ),
    Mistake(
        "batches_found_at_opening_need_no_check", "logcore/segment.py",
        "        self._own_from = self._size\n        self.limit_offset",
        "        self._own_from = 0\n        self.limit_offset",
        "kernels/test_getting.py",
    ),
    Mistake(
        "fast_append_skips_a_simulated_disk", "logcore/partition/writer.py",
        "self.sharing is None and offers_descriptors(self.fs)",
        "self.sharing is None",
        "kernels/test_appending.py",
    ),
    Mistake(
        "failed_fast_append_is_not_undone", "logcore/partition/writer.py",
        "            self.active.undo_write()\n        except StorageWriteError",
        "            pass\n        except StorageWriteError",
        "kernels/test_appending.py",
    ),
    Mistake(
        "fast_send_skips_a_clock_that_is_set", "logcore/producer/producer.py",
        "        self._uses_fast_path = is_plain and offers_descriptors(fs)",
        "        self._uses_fast_path = is_plain",
        "kernels/test_sending.py",
    ),
    Mistake(
        "fast_send_skips_the_transaction", "logcore/producer/producer.py",
        "            coordinator is None\n            and not self._has_callbacks",
        "            not self._has_callbacks",
        "kernels/test_sending.py",
    ),
    Mistake(
        "fast_send_hashes_for_every_partitioner", "logcore/producer/routing.py",
        "        self.uses_murmur2 = partitioner.uses_murmur2",
        "        self.uses_murmur2 = True",
        "kernels/test_sending.py",
    ),
    Mistake(
        "newest_retired_segment_not_kept", "logcore/partition/truncation.py",
        "    for segment in old:\n        segment.keep()\n    writer.replace_segments_locked(list(remaining))",
        "    for segment in old[:-1]:\n        segment.keep()\n    writer.replace_segments_locked(list(remaining))",
        "log/test_concurrent_reads.py::test_reader_keeps_segments_that_are_deleted_during_the_read",
    ),
    Mistake(
        "indexes_are_retired_before_their_log", "logcore/partition/segment_files.py",
        "sorted(names, key=lambda name: not name.endswith(LOG))", "sorted(names)",
        "log/test_segments_of_logs.py::test_log_file_is_deleted_before_its_indexes",
    ),
    Mistake(
        "checksum_file_stores_another_size", "logcore/partition/checksum_file.py",
        "            size_bytes=segment.size_bytes,\n            modified_ms=fs.modified_ms(segment.path),",
        "            size_bytes=segment.start_position(end_offset),\n"
        "            modified_ms=fs.modified_ms(segment.path),",
        "partition/test_checksum_files.py::test_roll_writes_a_checksum_file_for_the_sealed_segment",
    ),
    Mistake(
        "scrub_trusts_an_old_position", "logcore/partition/checksum_file.py",
        "            is_same = (\n"
        "                after == place\n"
        "                and segment.is_current()\n"
        "                and fs.size(segment.handle) >= size\n"
        "            )", "            is_same = segment.is_current() and fs.size(segment.handle) >= size",
        "partition/test_checksum_files.py::test_change_at_any_step_of_a_scrub_is_not_damage",
    ),
    # -- the log
    Mistake(
        "epochs_above_the_end_are_kept", "logcore/partition/opening.py",
        "cut = epochs.truncate_end_keeping_epoch(known, end) or epochs.walked(", "cut = known or epochs.walked(",
        "partition/test_recovery.py::test_epochs_above_the_log_end_are_moved_to_the_end",
    ),
    Mistake(
        "new_segment_without_its_name_on_disk", "logcore/partition/writer.py",
        "        self.fs.sync_dir(self.path)\n        return new\n",
        "        return new\n",
        "log/test_segments_of_logs.py::test_each_call_does_only_the_expected_disk_operations",
    ),
    Mistake(
        "recovery_point_is_above_a_truncation", "logcore/partition/truncation.py",
        "        writer.progress.set_recovery_point(offset)\n", "        pass\n",
        "directory/test_logdir.py::test_stale_recovery_point_is_not_saved_above_the_end",
    ),
    Mistake(
        "temporary_file_is_not_synced_before_its_rename", "logcore/metadata/checkpoint.py",
        "            fs.pwrite(handle, content, 0)\n            fs.fsync(handle)\n    except DiskFullError:",
        "            fs.pwrite(handle, content, 0)\n    except DiskFullError:",
        "log/test_segments_of_logs.py::test_each_call_does_only_the_expected_disk_operations",
    ),
    Mistake(
        "checkpoint_without_its_name_on_disk", "logcore/metadata/checkpoint.py",
        "    fs.rename(temporary, path)\n    fs.sync_dir(directory)\n    # The reserve was used",
        "    fs.rename(temporary, path)\n    # The reserve was used",
        "log/test_segments_of_logs.py::test_each_call_does_only_the_expected_disk_operations",
    ),
    Mistake(
        "other_partitions_lose_their_entries", "logcore/metadata/checkpoint.py",
        "offsets = dict(before)", "offsets: dict[Key, int] = {}",
        "faults/test_disk_errors.py::test_partitions_of_one_directory_share_their_checkpoints_safely",
    ),
    Mistake(
        "forked_child_keeps_the_locks_of_its_parent", "logcore/fs/__init__.py",
        "            held.close()\n        self._locks.clear()",
        "            pass\n        self._locks.clear()",
        "faults/test_processes.py::test_forked_child_does_not_hold_the_lock_of_a_killed_parent",
    ),
    Mistake(
        "producers_are_not_forgotten_after_a_truncation", "logcore/partition/writer.py",
        "        self.state.transactions = None\n        self.producers.forget()",
        "        self.state.transactions = None",
        "partition/test_producers.py::test_P50_producer_state_survives_reopening",
    ),
    Mistake(
        "snapshot_is_written_during_an_append", "logcore/partition/producer_state.py",
        "            if has_unfinished_write:\n                return self._looked_up()\n", "",
        "partition/test_producers.py::test_roll_during_an_append_leaves_no_partial_snapshot",
    ),
    Mistake(
        "append_that_rolls_saves_no_producers", "logcore/partition/producer_state.py",
        "            return self.if_any()\n", "            return None\n",
        "partition/test_producers.py::test_batch_sent_twice_is_stored_once_through_any_history",
    ),
    Mistake(
        "only_the_newest_batch_is_known_after_a_kill", "logcore/partition/producer_state.py",
        "            producers.fill(_last_below(segments, producers.next_offset))\n", "            pass\n",
        "partition/test_producers.py::test_batch_sent_twice_is_stored_once_through_any_history",
    ),
    Mistake(
        "metadata_is_saved_before_the_high_watermark", "logcore/partition/writer.py",
        "        self._open_watermark_file()\n"
        "        self._save_locked(opened.initial_metadata)\n",
        "        self._save_locked(opened.initial_metadata)\n"
        "        self._open_watermark_file()\n",
        "partition/test_following.py::test_crash_during_first_replicated_open_keeps_the_high_watermark",
    ),
    Mistake(
        "watermark_inside_a_recent_batch", "logcore/segment.py",
        "        return self.find_recent(offset) > self.find_recent(offset - 1) >= 0\n",
        "        return self.find_recent(offset) >= 0\n",
        "partition/test_following.py::test_high_watermark_is_lowered_to_the_end_of_a_batch",
    ),
    # -- recovery
    Mistake(
        "tail_is_copied_after_the_truncation", "logcore/partition/recovery.py",
        "    if action is Action.QUARANTINE_AND_CUT:\n        quarantine = _copy_tail(fs, segment, bad)\n"
        "    if is_on_disk:\n        segment.cut(bad)\n    else:\n        _rewrite_start(fs, segment, bad)\n",
        "    if is_on_disk:\n        segment.cut(bad)\n    else:\n        _rewrite_start(fs, segment, bad)\n"
        "    if action is Action.QUARANTINE_AND_CUT:\n        quarantine = _copy_tail(fs, segment, bad)\n",
        "partition/test_recovery.py::test_log_truncated_at_every_byte_opens_with_the_longest_whole_prefix",
    ),
    # -- compaction
    Mistake(
        "tombstone_expires_by_the_age_of_its_record", "logcore/cleaner.py",
        '        is_over = (facts["attributes"] & DELETE_HORIZON_BIT != 0) & (\n'
        '            facts["base_timestamp"] <= self.now_ms',
        "        is_over = (\n"
        '            facts["max_timestamp"] + self.config.delete_retention_ms <= self.now_ms',
        "log/test_cleaner.py::test_P39_tombstone_of_an_old_record_is_kept_for_its_full_time",
    ),
    Mistake(
        "deletion_horizon_moves_with_each_cleaning", "logcore/cleaner.py",
        "sets_horizon = kept_records.has_tombstone & ~has_horizon",
        "sets_horizon = kept_records.has_tombstone",
        "log/test_cleaner.py::test_P39_tombstone_is_kept_for_its_retention_time",
    ),
    Mistake(
        "key_bits_count_aborted_records", "logcore/cleaner.py",
        "        is_plain = not (\n"
        '            facts["attributes"] & (TRANSACTIONAL_BIT | DELETE_HORIZON_BIT)\n'
        "        ).any()", '        is_plain = not (facts["attributes"] & DELETE_HORIZON_BIT).any()',
        "log/test_cleaner.py",
    ),
    Mistake(
        "key_bits_keep_tombstones_forever", "logcore/cleaner.py",
        "        is_plain = not (\n"
        '            facts["attributes"] & (TRANSACTIONAL_BIT | DELETE_HORIZON_BIT)\n'
        "        ).any()", '        is_plain = not (facts["attributes"] & TRANSACTIONAL_BIT).any()',
        "log/test_cleaner.py",
    ),
    Mistake(
        "key_bits_count_records_cleaned_before", "logcore/cleaner.py",
        "        return (\n"
        "            newest.has_bits\n"
        "            and is_plain\n"
        '            and int(facts["base_offset"][0]) >= self.plan.first_dirty\n'
        "        )", "        return newest.has_bits and is_plain",
        "log/test_cleaner.py",
    ),
    # -- staged writes
    Mistake(
        "job_withdraws_the_write_of_another_job", "logcore/staging/publishing.py",
        "if found is not None and found.txid != txid:", "if found is None:",
        "staging/test_staging.py::test_withdrawn_write_has_no_effect",
    ),
    Mistake(
        "state_is_written_before_the_files", "logcore/staging/applying.py",
        "    _place_all(fs, directory, path, assigned)\n    # Like the assigned",
        "    write_state(fs, path, assigned)\n    _place_all(fs, directory, path, assigned)\n    # Like the assigned",
        "staging/test_staging_crashes.py::test_crash_during_roll_forward_is_rolled_forward",
    ),
    Mistake(
        "state_is_written_before_the_parts", "logcore/staging/applying.py",
        "            placed = _place_all(",
        "            write_state(fs, path, assigned)\n            placed = _place_all(",
        "spark/test_sink_crashes.py",
    ),
    Mistake(
        "carried_parts_are_not_synced", "logcore/staging/publishing.py",
        "                at += size\n            fs.fsync(handle)\n", "                at += size\n",
        "staging/test_staging_crashes.py::test_a_crash_at_any_operation_leaves_all_or_nothing",
    ),
    Mistake(
        "name_of_a_carried_file_is_not_synced", "logcore/staging/publishing.py",
        "        fs.sync_dir(directory)\n        return files",
        "        return files",
        "spark/test_sink_crashes.py",
    ),
    Mistake(
        "carried_file_is_deleted_before_the_state", "logcore/staging/applying.py",
        "            save_recovery_points(writers.values())\n",
        "            save_recovery_points(writers.values())\n"
        "            remove_tree(fs, os.path.join(path, manifest.txid))\n",
        "spark/test_sink_crashes.py",
    ),
    Mistake(
        "completed_append_is_not_synced", "logcore/staging/applying.py",
        "        fs.pwrite(handle, ours, position)\n        fs.fsync(handle)\n",
        "        fs.pwrite(handle, ours, position)\n",
        "staging/test_staging_crashes.py::test_a_crash_at_any_operation_leaves_all_or_nothing",
    ),
    Mistake(
        "repeated_placement_appends_again", "logcore/staging/applying.py",
        "        if size > position:\n            found = ",
        "        if size > position + len(ours):\n            found = ",
        "spark/test_sink_crashes.py",
    ),
    Mistake(
        "names_of_new_segments_are_not_synced", "logcore/staging/applying.py",
        "            fs.sync_dir(target)\n        else:", "            pass\n        else:",
        "staging/test_staging_crashes.py::test_a_crash_at_any_operation_leaves_all_or_nothing",
    ),
    Mistake(
        "changed_batch_headers_are_not_synced", "logcore/staging/applying.py",
        "fs.pwrite(handle, head[start:stop], position + start)\n        fs.fsync(handle)\n",
        "fs.pwrite(handle, head[start:stop], position + start)\n",
        "spark/test_sink_crashes.py",
    ),
    Mistake(
        "staged_names_are_not_synced", "logcore/staging/writing.py",
        "        if self._done:\n            self._fs.sync_dir(self._directory)\n",
        "",
        "spark/test_sink_crashes.py",
    ),
    Mistake(
        "finished_version_is_applied_again", "logcore/staging/applying.py",
        "    return state is not None and bool(manifest.version <= state",
        "    return state is not None and bool(manifest.version < state",
        "staging/test_staging.py::test_manifest_restored_by_a_power_cut_is_not_applied_again",
    ),
    Mistake(
        "retry_trusts_the_page_cache", "logcore/staging/applying.py",
        "        fs.pwrite(handle, ours, position)\n        fs.fsync(handle)\n",
        "        if fs.size(handle) == position:\n"
        "            fs.pwrite(handle, ours, position)\n        fs.fsync(handle)\n",
        "staging/test_staging_crashes.py -k failed_sync",
    ),
    Mistake(
        "unfinished_version_is_skipped", "logcore/staging/applying.py",
        "    waiting = _with_unfinished(fs, directory, path)\n", "    waiting = set[str]()\n",
        "staging/test_staging_crashes.py -k 'published_again or later_version'",
    ),
    Mistake(
        "empty_directory_counts_as_durable", "logcore/metadata/checkpoint.py",
        "    if not fs.is_directory(path) or not fs.listdir(path):\n",
        "    if not fs.is_directory(path):\n",
        "faults/test_durable_names.py",
    ),
    Mistake(
        "changed_clock_is_trusted_immediately", "logcore/metadata/trusted_clock.py",
        "    if held_ms >= DISTRUST_MS:\n",
        "    if held_ms > 0:\n",
        "log/test_trusted_clock.py",
    ),
    Mistake(
        "parts_are_in_the_order_of_messages", "pyspark_logcore/staged.py",
        "sorted(by_task.items())",
        "by_task.items()",
        "spark/test_sinks_plain.py -k order_of_tasks",
    ),
    Mistake(
        "replay_depends_on_the_refusal_of_the_last_attempt", "pyspark_logcore/stream_writer.py",
        "staging.is_done(query, batchId)",
        "staging.outcome(query, batchId) == \"done\"",
        "spark/test_sinks_plain.py -k replay_does_not_depend",
    ),
    Mistake(
        "state_forgotten_before_its_manifest", "logcore/staging/publishing.py",
        "        with contextlib.suppress(FileNotFoundError):\n            self._fs.sync_dir(self.path)\n", "",
        "spark/test_sink_crashes.py -k unnamed_write",
    ),
    Mistake(
        "part_of_a_staged_write_is_visible", "logcore/partition/file_view.py",
        "        if staged is not None:\n            visible =", "        if False:\n            visible =",
        "staging/test_staging_crashes.py -k complete_write_or_none",
    ),
    # -- offsets by key
    Mistake(
        "key_index_survives_a_truncation", "logcore/key_index.py",
        "        if times_truncated != self._times_truncated or", "        if",
        "log/test_key_index.py -k scan",
    ),
    Mistake(
        "key_index_lacks_unsynced_records", "logcore/log.py",
        "check(expected, self._state.end)", "check(expected, self.high_watermark)",
        "log/test_key_index.py -k unsynced",
    ),
    Mistake(
        "deleted_record_of_a_key_is_expected", "logcore/key_index.py",
        "                if found != offset:\n                    found = next",
        "                if False:\n                    found = next",
        "log/test_key_index.py -k tombstone",
    ),
    # -- snapshots
    Mistake(
        "snapshot_has_a_later_marker", "logcore/backup/transaction_cut.py",
        "            if time_ms > self._time_ms:\n", "            if False:\n",
        "backup/test_transaction_cut.py",
    ),
    Mistake(
        "snapshot_has_a_transaction_that_began_later", "logcore/backup/transaction_cut.py",
        "                end = min(end, offset)\n        return end", "                pass\n        return end",
        "backup/test_transaction_cut.py",
    ),
    Mistake(
        "snapshot_lacks_unsynced_records", "logcore/directory/copying.py",
        "    end = acknowledged_end(log)\n", "    end = log.high_watermark\n",
        "backup/test_snapshots.py -k not_synced",
    ),
    Mistake(
        "stored_parts_are_reused_without_a_check", "logcore/backup/taking.py",
        "                if crc != part.crc32c:\n", "                if False:\n",
        "backup/test_snapshots.py -k truncated",
    ),
    Mistake(
        "parts_of_other_snapshots_are_deleted", "logcore/backup/catalog.py",
        "        if name in used or", "        if",
        "backup/test_snapshots.py -k older_snapshots",
    ),
    Mistake(
        "restored_parts_are_not_checked", "logcore/backup/restoring.py",
        "        if (size, crc) !=", "        if False and (size, crc) !=",
        "backup/test_snapshots.py -k damaged_backup",
    ),
    # -- gathering of local writes
    Mistake(
        "receipt_is_written_before_its_name_is_synced", "pyspark_logcore/local.py",
        "                fs.sync_dir(parent)\n                self._remove_leftovers(fs, final)\n",
        "                self._remove_leftovers(fs, final)\n",
        "spark/test_local_crashes.py",
    ),
    Mistake(
        "staged_rows_are_deleted_before_they_are_gathered", "pyspark_logcore/gathering.py",
        "            done.append(self._gather(batch))\n",
        "            for one in batch.receipts if remove else ():\n                self._remove(one)\n"
        "            done.append(self._gather(batch))\n",
        "spark/test_local_crashes.py",
    ),
    Mistake(
        "each_gather_uses_a_new_name", "pyspark_logcore/gathering.py",
        'f"write_local {batch.job} {batch.topic} {topic}"', 'f"write_local {batch.receipts[0].run} {topic}"',
        "spark/test_local_plain.py -k 'repeated_batch or in_order'",
    ),
    Mistake(
        "missing_batch_is_skipped", "pyspark_logcore/gathering.py",
        "if batch.number != expected:", "if batch.number < expected:",
        "spark/test_local_plain.py -k incomplete_input",
    ),
    Mistake(
        "rows_of_two_runs_are_mixed", "pyspark_logcore/gathering.py",
        "        if report.run != receipt.run:\n            raise", "        if report.run == '':\n            raise",
        "spark/test_local_plain.py -k repeated_batch",
    ),
    Mistake(
        "shipped_bytes_are_not_compared", "logcore/staging/shipping.py",
        "        _compare(source, sealed, len(data), crc32c(data))\n", "",
        "spark/test_local_plain.py -k damage",
    ),
    Mistake(
        "duplicate_task_replaces_the_winner", "pyspark_logcore/local.py",
        "            if report is not None and report.run == self.run:\n                remove_directory(fs, part)",
        "            if report is None:\n                remove_directory(fs, part)",
        "spark/test_local_plain.py -k first_finished_attempt",
    ),
    # -- object stores
    Mistake(
        "short_object_ends_the_log", "pyspark_logcore/stores.py",
        "        if len(data) < size:\n", "        if len(data) > size:\n",
        "spark/test_stores_plain.py -k after_it_was_listed",
    ),
    Mistake(
        "copy_without_its_end_is_accepted", "pyspark_logcore/stores.py",
        "if recorded is not None and recorded.offset > log.log_end_offset:",
        "if recorded is not None and recorded.offset < log.log_start_offset:",
        "spark/test_stores_plain.py -k made_during_writes",
    ),
    # -- groups
    Mistake(
        "assignment_of_an_older_generation", "logcore/coordination/classic_transitions.py",
        "if group.state != COMPLETING or group.generation != stored_effect.generation:",
        "if group.state != COMPLETING:",
        "netshim/test_commits.py::test_assignment_of_an_older_generation_is_not_returned",
    ),
    Mistake(
        "instance_id_of_a_removed_member_is_kept", "logcore/coordination/classic_group.py",
        "            del self.static[member.instance_id]\n", "            pass\n",
        "netshim/test_groups.py::test_P58_P61_partitions_have_one_owner_and_all_requests_are_answered",
    ),
    Mistake(
        "heartbeat_renews_nothing", "logcore/coordination/classic_transitions.py",
        "    step.renew(group.members[member_id])\n    if group.state", "    if group.state",
        "netshim/test_membership.py::test_member_that_never_syncs_is_removed",
    ),
    Mistake(
        "commit_seen_before_it_is_on_disk", "logcore/coordination/offsets.py",
        "        group.storing[key] += 1\n",
        "        group.storing[key] += 1\n        group.apply_record(key, offsets[key])\n",
        "netshim/test_commits.py::test_P60_commit_is_answered_and_visible_once_durable",
    ),
    Mistake(
        "commit_outlives_its_topic", "logcore/coordination/classic_group.py",
        "            found.update((key, None) for key in keys if key[0] in topics)\n", "            pass\n",
        "netshim/test_commits.py::test_deleting_a_topic_deletes_its_committed_offsets",
    ),
    Mistake(
        "sync_timer_of_the_last_generation_is_kept", "logcore/coordination/classic_transitions.py",
        "        self.cancel_sync_timer()\n        group.is_first", "        group.is_first",
        "netshim/test_groups.py::test_P58_P61_partitions_have_one_owner_and_all_requests_are_answered",
    ),
    Mistake(
        "session_not_begun_after_a_restart", "logcore/coordination/coordinator.py",
        "                effects += classic_transitions.begin_sessions(\n"
        "                    group, now_ms, rules=self._rules\n"
        "                )\n",
        "                pass\n",
        "netshim/test_commits.py::test_member_that_does_not_return_after_a_restart_expires",
    ),
    Mistake(
        "member_that_waits_for_a_response_expires", "logcore/coordination/classic_transitions.py",
        "if member.is_waiting and not member.is_new and not member.is_absent:", "if False:",
        "netshim/test_membership.py::test_pending_member_delays_a_rebalance_until_its_timeout",
    ),
    Mistake(
        "replaced_member_delays_the_rebalance", "logcore/coordination/classic_group.py",
        "            self.unsynced.discard(old.member_id)\n            self.unsynced.add(new.member_id)\n",
        "            pass\n",
        "netshim/test_groups.py::test_P58_P61_partitions_have_one_owner_and_all_requests_are_answered",
    ),
    Mistake(
        "static_member_answered_again_after_a_rebalance", "logcore/coordination/classic_transitions.py",
        "        if (\n"
        "            member.joining is not stored_effect.waiter\n"
        "            or group.generation != stored_effect.generation\n"
        "            or group.state != STABLE\n"
        "        ):",
        "        if group.state == DEAD:",
        "coordination/test_coordination.py",
    ),
    Mistake(
        "join_timer_outlives_its_rebalance", "logcore/coordination/classic_transitions.py",
        "        self.cancel_join_timer()\n        assert group.state == PREPARING",
        "        self.group.join_timer = None\n        assert group.state == PREPARING",
        "coordination/test_coordination.py::test_invariants_hold_in_any_order_and_every_request_is_answered",
    ),
    Mistake(
        "session_timer_outlives_its_member", "logcore/coordination/classic_transitions.py",
        "        self.cancel_session(member)\n        self.group.remove_member(member)\n",
        "        self.group.remove_member(member)\n",
        "coordination/test_coordination.py::test_invariants_hold_in_any_order_and_every_request_is_answered",
    ),
    Mistake(
        "assigned_before_it_is_stored", "logcore/coordination/classic_transitions.py",
        "                AppendRecords(group, group.records(request.assignments), stored_effect)\n"
        "            )\n",
        "                AppendRecords(group, group.records(request.assignments), stored_effect)\n"
        "            )\n"
        "            self.assigned(stored_effect, None)\n",
        "coordination/test_coordination.py::test_invariants_hold_in_any_order_and_every_request_is_answered",
    ),
    Mistake(
        "members_that_joined_are_not_renewed", "logcore/coordination/classic_transitions.py",
        "                member.joining = None\n                self._restart_session(member)\n"
        "            member.is_new = False\n",
        "                member.joining = None\n            member.is_new = False\n",
        "coordination/test_coordination.py",
    ),
    # -- producers
    Mistake(
        "retry_with_a_new_sequence", "logcore/producer/sender.py",
        "            self.counts.retries += 1\n",
        "            self.counts.retries += 1\n            batch.reset_attempt()\n",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "reopened_log_is_assumed_to_contain_the_batch", "logcore/producer/sender.py",
        "        if receipt.last_offset >= log.log_end_offset:\n            return False\n",
        "        return True\n",
        "producer/test_producer.py",
    ),
    Mistake(
        "reopened_log_is_not_searched_for_the_batch", "logcore/producer/sender.py",
        "            if self._is_stored(log, batch):\n                return\n",
        "            pass\n",
        "producer/test_producer.py",
    ),
    Mistake(
        "batch_is_written_after_a_failed_batch", "logcore/producer/sender.py",
        "                if not batch.delivery.is_resolved:",
        "                if False:",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "acknowledged_before_the_sync", "logcore/producer/sender.py",
        "                written_batch.log.flush()\n",
        "                pass\n",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "only_the_first_log_is_synced", "logcore/producer/sender.py",
        "            if written_batch.log in failures:\n                continue\n",
        "            if failures:\n                failures[written_batch.log] = None\n                continue\n",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "sequence_of_a_failed_batch_is_not_restored", "logcore/producer/accumulator.py",
        "        identity.next_sequence = batch.sequence\n",
        "        pass\n",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "written_again_without_idempotence", "logcore/producer/sender.py",
        "if batch.may_be_stored and not self._settings.idempotent:",
        "if False:",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "batch_with_unknown_outcome_is_reported_failed", "logcore/producer/sender.py",
        "        if batch.may_be_stored:\n            error = Dur",
        "        if False:\n            error = Dur",
        "producer/test_producer.py producer/test_producer_histories.py",
    ),
    Mistake(
        "sequence_continues_after_an_unknown_outcome", "logcore/producer/sender.py",
        "            self._discard_identity(queue)\n        else:",
        "            pass\n        else:",
        "producer/test_producer.py",
    ),
    Mistake(
        "refusal_settles_the_attempt_before_it", "logcore/producer/sender.py",
        "was_maybe_stored or isinstance",
        "isinstance",
        "producer/test_producer.py",
    ),
    Mistake(
        "buffer_is_reused_before_the_outcome", "logcore/producer/buffer_pool.py",
        "self._free_buffers.pop()",
        "self._free_buffers[-1]",
        "producer/test_producer.py producer/test_buffer_pool.py",
    ),
    Mistake(
        "buffer_is_reused_despite_another_view", "logcore/producer/buffer_pool.py",
        "            buffer.append(0)\n            buffer.pop()\n",
        "            pass\n",
        "producer/test_buffer_pool.py",
    ),
    Mistake(
        "halves_of_a_batch_are_sent_in_the_wrong_order", "logcore/producer/accumulator.py",
        "for half in reversed(halves)",
        "for half in halves",
        "producer/test_producer_histories.py",
    ),
    Mistake(
        "memory_of_a_batch_is_kept", "logcore/producer/accumulator.py",
        "        self.used_bytes -= batch.memory_bytes\n",
        "        self.used_bytes -= batch.memory_bytes - 1\n",
        "producer/test_producer_histories.py",
    ),
    # -- writing a log from several processes
    Mistake(
        "lock_record_is_not_marked_busy", "logcore/partition/shared_writer.py",
        "                self._write_lock.mark_busy()\n            return True",
        "                pass\n            return True",
        "partition/test_sharing_kills.py",
    ),
    Mistake(
        "lock_record_is_marked_idle_too_early", "logcore/partition/shared_lock.py",
        "        self._fs.pwrite(self._record_handle, content, 0)\n        self._known_record",
        "        self._fs.pwrite(self._record_handle, holder, _HOLDER_AT)\n"
        "        self._fs.pwrite(self._record_handle, content, 0)\n        self._known_record",
        "partition/test_sharing_kills.py",
    ),
    Mistake(
        "busy_lock_record_is_trusted", "logcore/partition/shared_writer.py",
        "        elif record is None or synced is None or record.is_busy:\n",
        "        elif record is None or synced is None:\n",
        "partition/test_sharing_kills.py",
    ),
    Mistake(
        "structure_number_is_not_compared", "logcore/partition/shared_writer.py",
        "            record.structure != self._record.structure\n"
        "            or synced.truncations != self._truncations\n",
        "            False\n",
        "partition/test_sharing_kills.py",
    ),
    Mistake(
        "structure_number_is_not_raised", "logcore/partition/shared_writer.py",
        "            structure += 1\n",
        "            structure += 0\n",
        "partition/test_sharing_kills.py",
    ),
    Mistake(
        "lock_record_is_written_before_the_data", "logcore/partition/writer.py",
        "        self.has_unfinished_write = True\n        try:\n            segment.append(",
        "        if self.sharing is not None:\n"
        "            record = self.sharing._record._replace(end=last_offset + 1, size_bytes=start + size)\n"
        "            self.sharing._write_lock.write_lock_record(record)\n"
        "        self.has_unfinished_write = True\n        try:\n            segment.append(",
        "partition/test_sharing_kills.py",
    ),
    Mistake(
        "sync_is_published_after_a_truncation", "logcore/partition/shared_writer.py",
        "            if synced is None or synced.truncations != self._truncations:\n                return False\n",
        "            if synced is None:\n                return False\n",
        "partition/test_sharing.py",
    ),
    Mistake(
        "end_that_moved_during_a_sync_is_published", "logcore/partition/group_commit.py",
        "        self._record_sync(target, written_bytes)\n",
        "        self._record_sync(self._written()[1], written_bytes)\n",
        "partition/test_sharing.py",
    ),
    Mistake(
        "failed_sync_is_not_reported", "logcore/partition/writer.py",
        "            if self.sharing is not None:\n                self.sharing.record_failure()\n",
        "",
        "partition/test_sharing.py",
    ),
    Mistake(
        "truncation_uses_the_own_recovery_point", "logcore/partition/truncation.py",
        "            writer.own_checkpoint(checkpoint.RECOVERY_POINT),\n",
        "            0,\n",
        "partition/test_sharing.py",
    ),
    Mistake(
        "two_compactions_run_concurrently", "logcore/partition/shared_lock.py",
        "        return self._fs.lock_byte(self._lock_handle, self._byte + 2)\n",
        "        return True\n",
        "partition/test_sharing_exploration.py",
    ),
    Mistake(
        "segments_are_read_after_a_compaction", "logcore/partition/rewriting.py",
        "            for segment in view.sealed:\n                segment.view()\n",
        "            pass\n",
        "partition/test_sharing.py",
    ),
    Mistake(
        "batches_of_other_processes_are_no_duplicates", "logcore/partition/writer.py",
        "            self.producers.adopt(facts, active)\n",
        "            pass\n",
        "partition/test_sharing.py",
    ),
    Mistake(
        "records_are_visible_before_their_sync", "logcore/partition/shared_writer.py",
        "                visible = writer.commit.durable_end\n            self.raise_visible_end(visible)\n",
        "                visible = writer.state.end\n            self.raise_visible_end(visible)\n",
        "partition/test_sharing.py",
    ),
    Mistake(
        "checkpoints_of_other_processes_are_overwritten", "logcore/metadata/checkpoint.py",
        "        if known is None or self._changing is not None:\n",
        "        if known is None:\n",
        "partition/test_sharing_exploration.py directory/test_shared_directory.py",
    ),
    Mistake(
        "lock_record_of_an_earlier_boot_is_trusted", "logcore/partition/shared_writer.py",
        "                if (\n"
        "                    record is None\n"
        "                    or synced is None\n"
        "                    or is_alone\n"
        "                    or record.is_busy\n"
        "                    or synced.has_failed\n"
        "                ):",
        "                if record is None or synced is None or record.is_busy or synced.has_failed:",
        "partition/test_sharing.py",
    ),
    Mistake(
        "deleted_partition_takes_appends", "logcore/directory/shared_topics.py",
        "                announce_deleted(\n"
        "                    self._fs, self._claim.lock_handle, (topic, number), path\n"
        "                )\n",
        "                pass\n",
        "directory/test_shared_directory.py",
    ),
    Mistake(
        "topics_of_other_processes_are_overwritten", "logcore/directory/shared_topics.py",
        "        with self._claim.changing():\n            self.read_changes()\n            yield\n",
        "        with self._claim.changing():\n            yield\n",
        "directory/test_shared_directory.py",
    ),
    Mistake(
        "index_lacks_transactions_that_other_processes_aborted", "logcore/partition/writer.py",
        "        self.transactions.lacks_entries |= active.has_markers\n",
        "",
        "partition/test_sharing.py",
    ),
    Mistake(
        "reader_continues_after_its_end", "logcore/partition/scan.py",
        "                if ran and expected >= end:\n                    return\n                piece",
        "                if False:\n                    return\n                piece",
        "partition/test_persisted_offsets.py",
    ),
    # -- a broker that shares its directory with other processes
    Mistake(
        "open_transactions_are_read", "logcore/reader.py",
        "            or transactions.open\n",
        "",
        "netshim/test_fast_path.py::test_an_open_transaction_is_not_returned",
    ),
    Mistake(
        "change_of_a_partition_is_not_recorded", "netshim/fetch_wakeups.py",
        "        self.changes.add((key,))\n        if self.of_followers.by_key:\n",
        "        if self.of_followers.by_key:\n",
        "netshim/cluster/test_cluster_fast_path.py",
    ),
    Mistake(
        "sessions_are_checked_with_the_refresh", "netshim/cluster/member.py",
        "                self._end_stuck_sessions()\n                if is_due:\n",
        "                if is_due:\n                    self._end_stuck_sessions()\n",
        "netshim/cluster/test_cluster_member.py::test_a_stopped_member_is_replaced_in_an_idle_cluster",
    ),
    Mistake(
        "maintenance_coordinates_replicas", "logcore/directory_host.py",
        "self.has_coordinator = is_replicated", "self.has_coordinator = False",
        "directory/test_replicas.py",
    ),
    Mistake(
        "replica_accepts_appends_before_its_role", "logcore/directory/open_logs.py",
        "                    begin_to_follow(log.host.writer)\n",
        "                    pass\n",
        "directory/test_replicas.py",
    ),
    Mistake(
        "role_changes_during_the_removal_of_a_replica", "netshim/cluster/replicas.py",
        "numbers = local_topic.numbers - step.unassigned\n",
        "numbers = local_topic.numbers\n",
        "netshim/cluster/test_cluster_replicas.py",
    ),
    Mistake(
        "removal_overtakes_the_work_of_a_role", "netshim/cluster/replicas.py",
        "            if self._has_roles(name, step.unassigned):\n",
        "            if False:\n",
        "netshim/cluster/test_cluster_replicas.py",
    ),
    Mistake(
        "replica_without_a_state_is_removed", "netshim/cluster/replicas.py",
        "            elif key in view.states:\n                unassigned",
        "            else:\n                unassigned",
        "netshim/cluster/test_cluster_replicas.py",
    ),
    Mistake(
        "partition_state_is_shared_with_a_deleted_topic", "netshim/cluster/registry_nodes.py",
        'return f"{partitions_path(name)}/{number}/{topic_id}"\n',
        'return f"{partitions_path(name)}/{number}/state"\n',
        "netshim/cluster/test_registry_nodes.py::test_late_write_for_a_deleted_topic_does_not_change_the_next_topic",
    ),
    Mistake(
        "reassignment_ends_in_the_same_epoch", "logcore/replication/electing.py",
        "state.leader_epoch + 1 if state.removing else state.leader_epoch\n",
        "state.leader_epoch\n",
        "replication/test_replication_rules.py",
    ),
    Mistake(
        "waiting_fetch_reads_a_topic_with_the_same_name", "netshim/fast_path.py",
        "            request.topic_id is None\n            or ",
        "            True\n            or ",
        "netshim/test_fast_path.py::test_a_waiting_fetch_ends_with_its_topic",
    ),
    Mistake(
        "waiting_fetch_waits_for_its_whole_time_again", "netshim/fast_path.py",
        "        remaining_ms = max(0, self._deadline_ms - now_ms)\n",
        "        remaining_ms = self._request.max_wait_ms\n",
        "netshim/test_fast_path.py::test_waiting_fetch_leaves_the_fast_path_when_a_transaction_begins",
    ),
    Mistake(
        "fast_path_ignores_rules", "netshim/fast_path.py",
        "        if not self._state.security.may(session, operation, name):\n            return None\n",
        "",
        "netshim/test_fast_path.py::test_both_paths_enforce_the_rules",
    ),
    Mistake(
        "waiting_fetch_ignores_new_rules", "netshim/fast_path.py",
        "log is None or not may_read",
        "log is None",
        "netshim/test_fast_path.py::test_both_paths_enforce_the_rules",
    ),
    Mistake(
        "fast_path_ignores_authentication", "netshim/broker.py",
        "            and (\n                session.authentication is None\n"
        "                or session.authentication.passes_requests(now_ms)\n            )\n",
        "",
        "netshim/test_fast_path.py::test_a_connection_must_authenticate_first",
    ),
    Mistake(
        "change_of_a_fetch_session_is_not_undone", "netshim/fast_path.py",
        "            if session_fetch is not None:\n                session_fetch.undo()\n            return None",
        "            return None",
        "netshim/test_fast_path.py::test_random_requests_get_equal_responses",
    ),
    Mistake(
        "outdated_request_of_a_session_is_answered", "netshim/fast_path.py",
        "        if session_fetch is not None and not session_fetch.is_current:\n",
        "        if False:\n",
        "netshim/test_fast_path.py::test_request_of_a_session_ends_the_previous_request",
    ),
    Mistake(
        "failed_write_is_tried_again", "netshim/fast_path.py",
        "            result = _result_of(request, -1)",
        "            return None\n            result = _result_of(request, -1)",
        "netshim/test_fast_path.py::test_a_batch_whose_write_failed_is_not_written_again",
    ),
    Mistake(
        "next_batch_of_an_old_epoch_is_stored", "logcore/partition/producers.py",
        "        if known is None or known.epoch != epoch or known.open_offset >= 0:\n            return False\n",
        "        if known is None or known.open_offset >= 0:\n            return False\n",
        "kernels/test_appending.py::test_next_batch_of_a_producer_is_accepted",
    ),
    Mistake(
        "next_batch_outside_its_transaction_is_stored", "logcore/partition/producers.py",
        "        if known is None or known.epoch != epoch or known.open_offset >= 0:\n            return False\n",
        "        if known is None or known.epoch != epoch:\n            return False\n",
        "kernels/test_appending.py::test_batch_of_a_producer_outside_its_transaction_is_refused",
    ),
    Mistake(
        "fast_append_is_not_added_to_its_producer", "logcore/partition/producer_state.py",
        "        self.known().add(producer_id, epoch, batch, is_transactional=False)\n",
        "        del batch\n",
        "kernels/test_appending.py::test_next_batch_of_a_producer_is_accepted",
    ),
    Mistake(
        "aborted_transactions_are_not_named", "netshim/fast_path.py",
        "            if request.is_committed and request.offset < state.no_transactions_from:\n",
        "            if False:\n",
        "netshim/test_fast_path.py::test_aborted_transactions_are_named",
    ),
    Mistake(
        "outdated_logs_are_served", "netshim/logs.py",
        "                return log.has_failed or (\n"
        "                    self._logdir.is_shared and log.host.writer.state.is_behind()\n"
        "                )",
        "                return log.has_failed",
        "netshim/test_shared_broker.py::test_waiting_fetch_gets_records_of_another_process",
    ),
    Mistake(
        "appends_of_other_processes_wake_no_fetch", "netshim/fetch_wakeups.py",
        "self._queues.submit(key, log.refresh, partial(self._followed, key, now_ms))",
        "pass",
        "netshim/test_shared_broker.py::test_waiting_fetch_gets_records_of_another_process",
    ),
    Mistake(
        "answers_of_other_processes_are_not_polled", "netshim/sharing.py",
        "        self._is_polling = True\n",
        "        return\n",
        "netshim/test_shared_broker.py",
    ),
    Mistake(
        "zombies_commit_in_transactions", "logcore/coordination/coordinator.py",
        "            error = self._check_producer(committer)\n",
        "            error = None\n",
        "netshim/test_transaction_requests.py coordination",
    ),
    Mistake(
        "offsets_never_expire_without_a_broker", "logcore/coordinators/lookup.py",
        "self.groups(directory).expire_offsets()",
        "pass",
        "netshim/test_shared_broker.py::test_offsets_past_their_retention_are_deleted",
    ),
    Mistake(
        "member_of_a_dead_process_is_kept", "logcore/coordinators/shared_groups.py",
        "            if alive[session]:\n                continue\n",
        "            if True:\n                continue\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "paused_process_removes_other_members", "logcore/coordinators/stall_detector.py",
        "            observed.counted_ms += min(\n"
        "                now_ms - observed.observed_ms, duration_ms // _PAUSE_PART\n"
        "            )",
        "            observed.counted_ms += now_ms - observed.observed_ms",
        "consumer/test_stall_detector.py consumer/test_shared_groups.py",
    ),
    Mistake(
        "deadlines_end_without_an_observation", "logcore/coordinators/shared_groups.py",
        "        return self._observed.is_over(node.group, node.timers, timeout)\n",
        "        return True\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "rebalances_end_without_an_observation", "logcore/coordinators/stall_detector.py",
        "        if isinstance(timeout, JoinEnds | SyncEnds):\n",
        "        if False:\n",
        "consumer/test_stall_detector.py faults/test_schedules.py",
    ),
    Mistake(
        "synced_group_waits_without_an_observation", "logcore/coordinators/stall_detector.py",
        "        if isinstance(timeout, JoinEnds | SyncEnds):\n",
        "        if isinstance(timeout, JoinEnds):\n",
        "consumer/test_stall_detector.py faults/test_schedules.py",
    ),
    Mistake(
        "zombies_commit", "logcore/coordination/coordinator.py",
        "if error is not None or not committed:\n            return [*effects, Reply(waiter, error)]",
        "if not committed:\n            return [*effects, Reply(waiter, error)]",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "commit_answered_before_it_is_on_disk", "logcore/coordinators/shared_groups.py",
        "        self._unsynced.wait_until_durable()\n        return commit.error\n",
        "        return commit.error\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "unsynced_commit_is_visible_to_other_processes", "logcore/coordinators/shared_groups.py",
        "        sync_present(log)\n        cached, end =",
        "        cached, end =",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "threads_of_a_shared_directory_share_no_sync", "logcore/coordinators/shared_groups.py",
        "                receipt = append(log, rows, store.producer, \"os\")\n",
        "                receipt = append(log, rows, store.producer, \"disk\")\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "each_commit_wakes_all_members", "logcore/coordinators/shared_groups.py",
        "            _keep_deadlines(node.group, deadlines)\n",
        "            pass\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "positions_start_at_an_outdated_start_offset", "logcore/consumer/consumer.py",
        "            start = self._fetcher.start(read_position.log)\n",
        "            start = read_position.log.log_start_offset\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "offsets_of_other_processes_are_not_read", "logcore/coordinators/shared_groups.py",
        "            for columns in log.scan(start, high_watermark):\n",
        "            for columns in log.scan(start, high_watermark) if is_new else ():\n",
        "consumer/test_shared_groups.py consumer/test_shared_groups_exploration.py",
    ),
    Mistake(
        "generations_begin_again_after_a_power_cut", "logcore/coordinators/shared_groups.py",
        "                generation = max(generation, stored.generation)\n",
        "                generation = 0\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "session_is_not_renewed", "logcore/coordinators/shared_groups.py",
        "            if (\n"
        "                now_ms - renewed_ms\n"
        "                < group.members[member_id].session_timeout_ms // _RENEW_PART\n"
        "            ):",
        "            if True:",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "generation_of_a_single_process_is_used_again", "logcore/coordinators/shared_groups.py",
        "        is_outdated = (\n"
        "            node is not None\n"
        "            and stored is not None\n"
        "            and stored.generation > node.group.generation\n"
        "        )",
        "        is_outdated = node is not None and False",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "aborted_commits_count", "logcore/coordinators/shared_groups.py",
        "        if is_undecided or aborted_transactions(log, start, high_watermark):\n",
        "        if False:\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "offsets_outlive_their_deleted_topic", "logcore/coordinators/shared_groups.py",
        "            self._read_new_records(number, self._opened(number))\n",
        "            pass\n",
        "consumer/test_shared_groups.py",
    ),
    Mistake(
        "partition_is_read_without_a_claim", "logcore/consumer/registry_identity.py",
        "        registry.create(path, self._name, ephemeral=True)\n        return True\n",
        "        return True\n",
        "consumer/test_shared_groups_exploration.py",
    ),
    Mistake(
        "partition_is_released_before_the_commit", "logcore/consumer/assignment.py",
        "        self._stop_reading(self._current_partitions() - self._share)\n        self._read_owned()\n",
        "        if self._ownership is not None:\n"
        "            self._ownership.claim(self._current_partitions() & self._share, "
        "self._membership.group_metadata())\n"
        "        self._stop_reading(self._current_partitions() - self._share)\n        self._read_owned()\n",
        "consumer/test_member_nodes.py",
    ),
    Mistake(
        "removed_owner_blocks_a_partition", "logcore/consumer/registry_identity.py",
        "            paths.unpack_consumer(consumer.value, path).members.get(number)\n"
        "            in group.members",
        "            paths.unpack_consumer(consumer.value, path).members.get(number) is not None",
        "consumer/test_member_nodes.py",
    ),
    Mistake(
        "live_owner_is_ignored", "logcore/consumer/registry_identity.py",
        "        if node is not None and self._is_valid_owner(registry, group, node):\n",
        "        if node is not None and node.value == self._name:\n",
        "consumer/test_shared_groups_exploration.py",
    ),
    Mistake(
        "removed_member_deletes_the_node_of_another_member", "logcore/consumer/registry_identity.py",
        "        if node is not None and node.value == self._name:\n            registry.delete(path)\n",
        "        if node is not None:\n            registry.delete(path)\n",
        "consumer/test_member_nodes.py",
    ),
    Mistake(
        "partition_is_read_while_another_member_owns_it", "logcore/consumer/assignment.py",
        "            owned = self._ownership.claim(\n"
        "                self._share, self._membership.group_metadata()\n            )\n",
        "            self._ownership.claim(self._share, self._membership.group_metadata())\n",
        "consumer/test_shared_groups_exploration.py",
    ),
    Mistake(
        "node_deleted_by_another_process_is_an_error", "logcore/consumer/registry_identity.py",
        "            with contextlib.suppress(NodeNotFoundError):\n"
        "                registry.delete(path)\n",
        "            registry.delete(path)\n",
        "consumer/test_shared_groups_exploration.py",
    ),
    Mistake(
        "dual_commits_are_read_from_the_log_only", "logcore/consumer/offset_stores.py",
        "            if key not in stored or stored[key].offset < offset:\n",
        "            if key not in stored:\n",
        "consumer/test_offset_stores.py",
    ),
    Mistake(
        "zombies_commit_to_the_registry", "logcore/consumer/offset_stores.py",
        "            if error is None:\n                offsets.commit(",
        "            if True:\n                offsets.commit(",
        "consumer/test_offset_stores.py",
    ),
    Mistake(
        "dual_commit_is_stored_in_one_storage_only", "logcore/consumer/offset_stores.py",
        "        if error is None and self.is_dual:\n            # A refusal",
        "        if False:\n            # A refusal",
        "consumer/test_offset_stores.py consumer/test_shared_groups_exploration.py -k move",
    ),
    Mistake(
        "rewind_is_stored_in_the_log_only", "logcore/consumer/offset_stores.py",
        "since the first call.\n        _rewind_registry(registry, group_id, rows)",
        "since the first call.\n        pass",
        "consumer/test_offset_stores.py",
    ),
    Mistake(
        "members_commit_old_positions_after_a_rewind", "logcore/coordination/coordinator.py",
        "        if group is not None and group.members:\n            everyone",
        "        if False:\n            everyone",
        "consumer/test_shared_groups_exploration.py -k rewind",
    ),
    Mistake(
        "rewind_leaves_an_offset_of_the_oldest_layout", "logcore/registry/offsets.py",
        "                    registry.delete(f\"{above}/{name}\")\n",
        "                    pass\n",
        "registry/test_registry_conformance.py -k oldest",
    ),
    # -- groups of consumers
    Mistake(
        "commit_of_a_removed_member_counts", "logcore/coordination/coordinator.py",
        "if error is not None or not committed:\n            return [*effects, Reply(waiter, error)]",
        "if not committed:\n            return [*effects, Reply(waiter, error)]",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "commit_answered_before_the_sync", "logcore/coordinators/local_groups.py",
        "            self._unsynced.add(\n"
        "                {log: receipt.last_offset + 1},\n"
        "                functools.partial(self._on_durable, append_effects, log),\n"
        "            )",
        "            self._on_stored(append_effects, None)",
        "consumer/test_consumer_groups.py::test_random_histories_keep_all_invariants_of_groups",
    ),
    Mistake(
        "commits_for_two_offset_partitions_share_a_batch", "logcore/coordinators/local_groups.py",
        "                and present_offsets_partition_of(\n"
        "                    self._directory, following.group.group_id\n"
        "                )\n                == home\n            )",
        "            )",
        "consumer/test_consumer_commits.py -k share_batches",
    ),
    Mistake(
        "commits_inside_and_outside_a_transaction_share_a_batch", "logcore/coordinators/local_groups.py",
        "                following.producer == append_effects[0].producer\n"
        "                and present_offsets_partition_of(",
        "                present_offsets_partition_of(",
        "consumer/test_consumer_commits.py -k share_batches",
    ),
    Mistake(
        "steps_are_answered_before_their_sync", "logcore/coordinators/flat_combining.py",
        "            self._wait_until_durable()\n            is_synced = True\n        finally:",
        "            is_synced = True\n        finally:",
        "log/test_flat_combining.py",
    ),
    Mistake(
        "interrupted_step_is_reported_as_done", "logcore/coordinators/flat_combining.py",
        "                if not have_all_run and request.error is None:",
        "                if False:",
        "log/test_flat_combining.py",
    ),
    Mistake(
        "no_thread_combines_after_an_interrupt", "logcore/coordinators/flat_combining.py",
        "                    may_lead = not is_woken or self._is_first(request)",
        "                    may_lead = self._is_first(request)",
        "log/test_flat_combining.py --timeout 30",
    ),
    Mistake(
        "sessions_are_measured_by_the_wall_clock", "logcore/coordinators/local_groups.py",
        "return self._started_ms + self._fs.monotonic_ms()",
        "return self._fs.now_ms()",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "position_is_finished_at_once", "logcore/consumer/commits.py",
        "            partition: OffsetAndMetadata(read_position.finished)\n",
        "            partition: OffsetAndMetadata(read_position.position or 0)\n",
        "consumer/test_consumer.py consumer/test_consumer_groups.py",
    ),
    Mistake(
        "last_commit_has_the_old_generation", "logcore/consumer/group_member.py",
        "        if self._pending_join is None or not isinstance(\n"
        "            self._pending_join.result, Joined\n        ):\n",
        "        if self.generation >= 0 or not isinstance(self._pending_join, PendingResult):\n",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "leaving_member_is_refused_during_assignment", "logcore/coordination/offsets.py",
        "    if group.state == COMPLETING and not committer.is_leaving:\n",
        "    if group.state == COMPLETING:\n",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "checkpoints_are_read_once", "logcore/partition/persisted.py",
        "        if fresh is not None and fresh[0] == changed_ms:\n",
        "        if fresh is not None:\n",
        "partition/test_persisted_offsets.py",
    ),
    Mistake(
        "high_watermark_is_read_once", "logcore/partition/file_view.py",
        "        if self._has_visible_end or not has_same_names:\n",
        "        if self._has_visible_end:\n",
        "partition/test_persisted_offsets.py",
    ),
    Mistake(
        "connection_stays_in_the_queue_without_a_request", "netshim/connection.py",
        "            self._workload.leave_queue(self)\n",
        "            pass\n",
        "netshim/test_connection.py",
    ),
    Mistake(
        "requests_of_a_closed_connection_count_as_running", "netshim/connection.py",
        "                    self._workload.end(slot.held_bytes)\n",
        "                    pass\n",
        "netshim/test_connection.py",
    ),
    Mistake(
        "waiting_requests_count_as_running", "netshim/broker.py",
        "is_parked=api.key in _PARKED, runs_in_steps=is_large",
        "runs_in_steps=is_large",
        "netshim/test_hostile.py",
    ),
    Mistake(
        "later_request_overtakes_a_chunked_request", "netshim/connection.py",
        "            or (len(self._slots) > 0 and self._is_in_steps())\n",
        "",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "waiting_requests_are_overtaken_between_chunks", "netshim/broker.py",
        "response.runs_in_steps or entries > scheduling.CHUNK_ENTRIES",
        "response.runs_in_steps",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "chunks_run_outside_the_lock_of_shared_groups", "netshim/sharing.py",
        "return run_all_steps(steps)",
        "return self._state.run_in_steps(steps)",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "records_of_later_chunks_are_lost", "netshim/handlers/produce.py",
        "                    if not are_copied:\n",
        "                    if False:\n",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "later_chunks_ignore_failures", "netshim/logs.py",
        "        if self._failures:\n            steps",
        "        if False:\n            steps",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "chunked_produce_leaves_the_queue_at_once", "netshim/logs.py",
        "                    return (yield from begin())\n",
        "                    self._requests.leave(queued)\n"
        "                    return (yield from begin())\n",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "fetch_misses_wakeups_during_its_check", "netshim/handlers/fetch.py",
        "        if self._was_woken:\n",
        "        if False:\n",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "offsets_of_a_topic_deleted_between_chunks_are_stored", "netshim/handlers/group.py",
        "    if state.logdir.host.topics_version != version:",
        "    if False:",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "number_of_chunked_requests_is_unlimited", "netshim/scheduling.py",
        "            while self.is_full:\n",
        "            while False:\n",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "rest_of_a_failed_change_is_not_read", "logcore/directory/group_settings.py",
        "                self._settings = self._read()\n            raise",
        "                self._read()\n            raise",
        "netshim/test_group_settings.py",
    ),
    Mistake(
        "members_keep_the_session_timeout_of_the_broker", "logcore/coordination/consumer_transitions.py",
        "timeout_ms = self.context.rules.session_timeout_ms_of(self.group.group_id)",
        "timeout_ms = self.context.rules.consumer_session_timeout_ms",
        "netshim/test_group_settings.py",
    ),
    Mistake(
        "waiting_commits_are_stored_after_later_ones", "logcore/consumer/commits.py",
        "        self.store_queued()\n        self._commit(offsets, timeout)\n",
        "        self._commit(offsets, timeout)\n        self.store_queued()\n",
        "consumer/test_consumer_commits.py",
    ),
    Mistake(
        "commit_of_a_listener_waits_for_the_next_generation", "logcore/consumer/assignment.py",
        "belong to the ending generation.\n            self._commits.store_queued()\n",
        "belong to the ending generation.\n",
        "consumer/test_consumer_commits.py",
    ),
    Mistake(
        "removed_member_commits_to_an_empty_group", "logcore/consumer/commits.py",
        "        if member is not None and member.is_removed:\n",
        "        if False:\n",
        "consumer/test_consumer_commits.py",
    ),
    Mistake(
        "close_after_an_error_finishes_all_records", "logcore/consumer/consumer.py",
        "self._close(is_done=kind is None)",
        "self._close(is_done=True)",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "auto_commit_reverts_a_commit", "logcore/consumer/consumer.py",
        "would later commit a smaller offset.\n        self._fetcher.finish()\n",
        "would later commit a smaller offset.\n",
        "consumer/test_consumer_groups.py::test_random_histories_keep_all_invariants_of_groups",
    ),
    Mistake(
        "consumer_gets_records_before_its_position", "logcore/partition/scan.py",
        "                yield (\n"
        "                    item.size_bytes,\n"
        "                    self._within(item.placed_records(topic, partition)),\n"
        "                )",
        "                yield item.size_bytes, item.placed_records(topic, partition)",
        "consumer/test_consumer.py::test_poll_returns_the_same_records_as_read_from_every_offset",
    ),
    Mistake(
        "consumer_gets_all_records_of_a_compressed_batch", "logcore/partition/scan.py",
        "                yield (\n"
        "                    item.size_bytes,\n"
        "                    kernel.to_topic_records(topic, partition, self._within(records)),\n"
        "                )",
        "                yield item.size_bytes, kernel.to_topic_records(topic, partition, records)",
        "consumer/test_consumer.py::test_poll_returns_the_same_records_as_read_from_every_offset",
    ),
    Mistake(
        "damage_error_of_a_consumer_lacks_the_position", "logcore/partition/scan.py",
        "        with self._placed():\n            return kernel.decode_topic_records(",
        "        if True:\n            return kernel.decode_topic_records(",
        "consumer/test_consumer.py::test_consumer_reports_damage_like_read",
    ),
    Mistake(
        "consumer_skips_damage", "logcore/consumer/fetcher.py",
        "        if not next_records.is_last or stopped_early:\n",
        "        if not (next_records.is_last or next_records.is_stopped):\n",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "iteration_skips_damage", "logcore/consumer/fetcher.py",
        "            if next_records.is_stopped:\n                read_position.drop()\n                return\n",
        "",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "damage_hides_the_records_before_it", "logcore/consumer/positions.py",
        "                return NextRecords(records, size_bytes, is_stopped=True)\n",
        "                raise\n",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "position_goes_back_to_the_last_stable_offset", "logcore/consumer/fetcher.py",
        "    return end <= position <= max(end, log.high_watermark)\n",
        "    return position == end\n",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "consumer_reads_aborted_records", "logcore/consumer/fetcher.py",
        "                    isolation=self._settings.isolation_level,",
        '                    isolation="read_uncommitted",',
        "consumer/test_consumer.py",
    ),
    Mistake(
        "iteration_loses_records_that_it_fetched", "logcore/consumer/fetcher.py",
        "            read_position.has_undelivered = True\n",
        "",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "end_of_a_stream_commits_the_current_record", "logcore/consumer/consumer.py",
        "        self._close(is_done=False)\n",
        "        self._close(is_done=True)\n",
        "consumer/test_consumer_streams.py",
    ),
    Mistake(
        "columns_undo_a_seek", "logcore/consumer/fetcher.py",
        "            if read_position is None or read_position.position != columns.start:\n",
        "            if read_position is None:\n",
        "aio/test_aio_consumer.py",
    ),
    Mistake(
        "failed_record_is_counted_as_queued", "logcore/producer/accumulator.py",
        "        self.used_records -= len(batch.records)\n",
        "",
        "producer/test_seeds.py producer/test_producer.py",
    ),
    # -- asyncio
    Mistake(
        "file_of_a_cancelled_open_is_kept_open", "logcore/aio/loop_thread.py",
        "            self.submit(release_result)\n",
        "",
        "aio/test_aio_cancellation.py",
    ),
    Mistake(
        "append_overtakes_an_earlier_call", "logcore/aio/log.py",
        "        self.start_writing()\n        self._turn += 1\n",
        "        self.start_writing()\n",
        "aio/test_aio_log.py",
    ),
    Mistake(
        "cancelled_append_is_written", "logcore/aio/log.py",
        "            if appended.future.cancelled():\n",
        "            if False:\n",
        "aio/test_aio_cancellation.py",
    ),
    Mistake(
        "appends_of_one_call_are_written_in_parts", "logcore/aio/log.py",
        "            if found and size_bytes + appended.size_bytes > most:\n",
        "            if found and size_bytes > most:\n",
        "aio/test_aio_log.py",
    ),
    Mistake(
        "refused_record_fails_its_batch", "logcore/aio/log.py",
        "    except _OF_RECORDS:  # nothing was written\n",
        "    except ZeroDivisionError:\n",
        "aio/test_aio_log.py",
    ),
    Mistake(
        "half_of_a_batch_is_resolved_too_early", "logcore/aio/producer.py",
        "            if later:\n                self._sent[delivery] = later\n",
        "            if False:\n                self._sent[delivery] = later\n",
        "aio/test_aio_producer.py::test_first_half_of_a_batch_is_completed_before_the_second_is_written",
    ),
    Mistake(
        "tasks_overtake_tasks_that_wait_for_memory", "logcore/aio/producer.py",
        "        if not self._memory_waiters and self._since_yield < _RECORDS_PER_YIELD:\n",
        "        if self._since_yield < _RECORDS_PER_YIELD:\n",
        "aio/test_aio_producer.py",
    ),
    Mistake(
        "cancelled_step_overwrites_a_seek", "logcore/aio/consumer.py",
        "        if self._steps and not self._loop_thread.is_answering:\n"
        "            self._deferred_calls.append(function)\n",
        "        if False:\n            self._deferred_calls.append(function)\n",
        "aio/test_aio_consumer.py",
    ),
    Mistake(
        "listener_blocks_its_own_commit", "logcore/aio/loop_thread.py",
        "        if request is not None:\n            request.jobs.put(job)\n",
        "        if False:\n            request.jobs.put(job)\n",
        "aio/test_aio_consumer.py::test_listeners_may_be_coroutines_that_seek_and_commit",
    ),
    Mistake(
        "notification_is_sent_twice_before_it_is_handled", "logcore/aio/notify.py",
        "        self._is_scheduled = False  # first: events from now on schedule another wake()\n",
        "",
        "aio/test_aio_log.py::test_tail_wakes_for_appends_in_other_threads_and_for_close",
    ),
    Mistake(
        "partition_is_assigned_before_it_is_revoked", "logcore/consumer/assignors.py",
        "    return {\n"
        "        member_id: [\n"
        "            partition\n"
        "            for partition in owned\n"
        "            if claims.claimants.get(partition, {member_id}) == {member_id}\n"
        "        ]\n"
        "        for member_id, owned in assignment.items()\n"
        "    }",
        "    return {member_id: [partition for partition in owned] for member_id, owned in assignment.items()}",
        "consumer/test_assignors.py",
    ),
    Mistake(
        "waiting_consumer_ignores_deadlines", "logcore/consumer/assignment.py",
        "        self._groups.poll()\n",
        "",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "partition_is_revoked_without_a_commit", "logcore/consumer/assignment.py",
        "        if partitions:\n            self._commits.commit_finished()\n",
        "",
        "consumer/test_consumer_groups.py",
    ),
    # -- requests
    Mistake(
        "fetch_waits_for_its_first_partition", "netshim/handlers/fetch.py",
        "                else:\n                    self.keys.append((name, number))\n",
        "                elif not self.keys:\n                    self.keys.append((name, number))\n",
        "netshim/test_requests.py::test_a_fetch_waits_for_each_of_its_partitions",
    ),
    Mistake(
        "each_partition_sends_one_batch_beyond_the_limit", "netshim/handlers/fetch.py",
        "                buffers = log.stored(\n"
        "                    offset, stable, max_bytes=max_bytes, at_least_one=not total\n"
        "                )",
        "                buffers = log.stored(offset, stable, max_bytes=max_bytes, at_least_one=True)",
        "netshim/test_requests.py::test_size_limit_of_a_fetch_covers_all_partitions",
    ),
    Mistake(
        "budget_of_a_fetch_is_not_used_up", "netshim/handlers/fetch.py",
        "                remaining_bytes -= size\n                # Only if", "                # Only if",
        "netshim/test_requests.py::test_size_limit_of_a_fetch_covers_all_partitions",
    ),
    Mistake(
        "deletion_wakes_no_fetch", "netshim/handlers/offsets.py",
        "        state.fetches.wake(keys, call.now_ms)\n        pending.set(error", "        pending.set(error",
        "netshim/test_requests.py::test_waiting_fetch_is_answered_when_its_offset_is_deleted",
    ),
    Mistake(
        "zstd_batches_hidden_from_old_clients", "netshim/handlers/fetch.py",
        "            if (\n"
        "                not part.error_code\n"
        "                and call.version < _ZSTD_SINCE\n"
        '                and log.config.compression_type == "zstd"\n'
        "            ):",
        "            if not part.error_code and call.version < _ZSTD_SINCE:",
        "netshim/test_kafka_answers.py::test_fetch_below_v10_gets_zstd_batches",
    ),
    Mistake(
        "unknown_partitions_answer_a_fetch_at_once", "netshim/handlers/fetch.py",
        "            part.error_code = code_of(error)\n"
        "            is_urgent = is_urgent or id(partition) not in missing\n",
        "            part.error_code = code_of(error)\n            is_urgent = True\n",
        "netshim/test_kafka_answers.py",
    ),
    Mistake(
        "waiting_requests_hold_no_memory", "netshim/connection.py",
        "        self._budget.reserve_for_request(size)\n",
        "        self._budget.reserve_for_request(0)\n",
        "netshim/test_memory.py",
    ),
    Mistake(
        "memory_counter_never_decreases", "logcore/coordination/memory_budget.py",
        "            self._upper_bound_bytes = self._counted_bytes = sum(\n"
        "                size_function() for size_function in self.size_functions\n"
        "            )",
        "            self._counted_bytes = self._upper_bound_bytes",
        "netshim/test_memory.py",
    ),
    Mistake(
        "buffers_are_kept_without_free_memory", "netshim/connection.py",
        "            size <= _MAX_EMPTY_BUFFER_BYTES\n            and 2 * budget.used_bytes < budget.limit_bytes\n",
        "            size <= _MAX_EMPTY_BUFFER_BYTES\n",
        "netshim/test_connection.py",
    ),
    Mistake(
        "buffers_of_idle_connections_are_kept", "netshim/connection.py",
        "            and now_ms - self.active_ms >= _EMPTY_BUFFER_MS\n        ):\n"
        "            self._resize(_SMALL_BYTES)\n",
        "            and now_ms - self.active_ms >= _EMPTY_BUFFER_MS\n        ):\n            pass\n",
        "netshim/test_connection.py",
    ),
    Mistake(
        "released_memory_wakes_no_reader", "netshim/connection.py",
        "        self.used_bytes -= size\n        self._call_first()\n\n    def stop_waiting",
        "        self.used_bytes -= size\n\n    def stop_waiting",
        "netshim/test_connection.py",
    ),
    Mistake(
        "answers_of_disconnected_clients_continue", "netshim/scheduling.py",
        "    if pending.is_cancelled:\n        pending.cancel()\n",
        "",
        "netshim/test_cycles.py",
    ),
    Mistake(
        "concurrently_queued_requests_are_lost", "netshim/request_order.py",
        "        if self._waiting[key]:\n            self._ready.append(key)\n        else:\n",
        "        if True:\n",
        "netshim/test_request_order.py",
    ),
    Mistake(
        "actions_of_cancelled_timers_are_kept", "netshim/scheduling.py",
        "        if self._actions.pop(name, None) is not None:\n            self._timers.cancel(name)\n",
        "        self._timers.cancel(name)\n",
        "netshim/test_cycles.py",
    ),
    Mistake(
        "logs_in_use_are_closed_to_free_memory", "netshim/logs.py",
        "            if key not in busy\n"
        "            and key not in self._closing\n",
        "            if key not in self._closing\n",
        "netshim/test_memory.py",
    ),
    Mistake(
        "request_for_many_partitions_reopens_its_logs", "netshim/logs.py",
        "            self._next_to_open = first + batch_size\n",
        "            self._next_to_open = 0\n",
        "netshim/test_broker_killed.py",
    ),
    Mistake(
        "settings_that_a_request_omits_are_kept", "netshim/handlers/configs.py",
        "        return {\n"
        "            **dict.fromkeys(before),\n"
        "            **{config.name: config.value for config in resource.configs},\n"
        "        }",
        "        return {config.name: config.value for config in resource.configs}",
        "netshim/test_conformance.py",
    ),
    Mistake(
        "closed_connections_of_an_address_are_counted", "netshim/open_connections.py",
        "        self._addresses[client.address] -= 1\n",
        "",
        "netshim/test_hostile.py",
    ),
    Mistake(
        "stop_leaves_chunked_requests_unfinished", "netshim/broker.py",
        "        self.state.step_runner.finish()\n",
        "",
        "netshim/test_chunked_requests.py",
    ),
    Mistake(
        "answers_refer_to_their_callbacks", "netshim/scheduling.py",
        "            self._callback = self._cancel = None\n            if callback",
        "            if callback",
        "netshim/test_cycles.py",
    ),
    Mistake(
        "refused_batches_refer_to_their_frames", "netshim/scheduling.py",
        "        link.__traceback__ = None\n",
        "",
        "netshim/test_cycles.py",
    ),
    Mistake(
        "cancelled_fetch_keeps_waiting", "netshim/handlers/fetch.py",
        "        pending.when_cancelled(self._forget)\n", "",
        "netshim/test_requests.py::test_fetch_of_a_disconnected_client_stops_waiting",
    ),
    # -- the registry
    Mistake(
        "registry_writes_into_the_newer_slot", "logcore/registry/files.py",
        "self._fs.pwrite(handle, new.pack(head), head.place(new.version))",
        "self._fs.pwrite(handle, new.pack(head), head.place(slot.version))",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_has_one_slot", "logcore/registry/node_file.py",
        "return self.size + (version & 1) * self.capacity", "return self.size",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_trusts_a_slot_without_its_crc", "logcore/registry/node_file.py",
        "    if _CRC.unpack_from(data, start + _SLOT.size)[0] != crc32c(\n"
        "        head.creation + fields + value\n"
        "    ):",
        "    if len(value) != length:",
        "registry/test_registry_exploration.py registry/test_registry_damage.py",
    ),
    Mistake(
        "registry_does_not_read_a_torn_slot_again", "logcore/registry/sessions.py",
        "if data == before:\n            break", "if data != before:\n            break",
        "registry/test_registry_damage.py -k torn_read",
    ),
    Mistake(
        "registry_releases_the_lock_before_the_write", "logcore/registry/files.py",
        "        try:\n            yield\n        finally:\n            self._fs.unlock_byte(self._lock, byte)",
        "        self._fs.unlock_byte(self._lock, byte)\n        yield",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_reads_before_the_lock", "logcore/registry/files.py",
        "                found = self._expected(names, path, version, handle)\n"
        "                return self._write_to(handle, names, *found, bytes(value))\n"
        "            finally:\n                self._fs.close(handle)\n\n",
        "                return self._write_to(handle, names, *found, bytes(value))\n"
        "            finally:\n                self._fs.close(handle)\n\n"
        "        found = self._expected(names, path, version)\n",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_accepts_writes_of_expired_sessions", "logcore/registry/sessions.py",
        "return not self._fs.exists(self._path)", "return False",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_expires_a_session_without_a_rename", "logcore/registry/sessions.py",
        "            self._fs.rename(path, path + EXPIRED)\n        try:\n"
        "            handle = self._fs.open(path + EXPIRED, write=True)",
        "            self._fs.file_size(path)\n        try:\n            handle = self._fs.open(path, write=True)",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_expires_a_session_without_its_gate_lock", "logcore/registry/sessions.py",
        "if not self._fs.lock_byte(handle, GATE, timeout_ms=timeout_ms):\n                facts",
        "if timeout_ms < 0:\n                facts",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_trusts_nodes_of_expired_sessions", "logcore/registry/files.py",
        "if session is None or self._sessions.is_alive(session):", "if True:",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_reads_nodes_of_its_own_expired_session", "logcore/registry/files.py",
        "        return self._read_valid(self._file(names))\n",
        "        return self._read_valid(self._file(names), self._lease and self._lease.id)\n",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "registry_trusts_its_session_throughout_a_block", "logcore/registry/files.py",
        "        living = None\n        if self._held is None:\n            living =",
        "        living =",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "registry_expires_a_session_whose_file_is_not_locked", "logcore/registry/sessions.py",
        "            return self._fs.is_byte_locked(handle, LIVENESS_BYTE)\n", "            return True\n",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_session_is_seen_before_its_lock", "logcore/registry/sessions.py",
        "        unfinished = name + node_file.UNFINISHED\n", "        unfinished = name\n",
        "registry/test_registry_sessions.py -k cleaning",
    ),
    Mistake(
        "registry_overwrites_the_only_valid_slot", "logcore/registry/files.py",
        "            self._fs.fdatasync(handle)\n            self._sync_names(names)\n"
        "        self._fs.pwrite",
        "            pass\n        self._fs.pwrite",
        "registry/test_registry_power.py",
    ),
    Mistake(
        "registry_names_a_node_before_it_is_on_disk", "logcore/registry/files.py",
        "            if head.kind is NodeKind.PERSISTENT:\n                self._fs.fdatasync(handle)\n"
        "            self._fs.rename(unfinished, file)",
        "            self._fs.rename(unfinished, file)\n"
        "            if head.kind is NodeKind.PERSISTENT:\n                self._fs.fdatasync(handle)",
        "registry/test_registry_power.py",
    ),
    Mistake(
        "registry_syncs_the_last_name_only", "logcore/registry/files.py",
        "for depth in range(len(names) - 1, -1, -1):\n            self._fs.sync_dir",
        "for depth in range(len(names) - 1, len(names) - 2, -1):\n            self._fs.sync_dir",
        "registry/test_registry_exploration.py -k power",
    ),
    Mistake(
        "registry_answers_before_the_sync", "logcore/registry/files.py",
        "            self._sync(handle, head, new)\n", "",
        "registry/test_registry_exploration.py -k power",
    ),
    Mistake(
        "registry_deletes_without_a_sync", "logcore/registry/files.py",
        "        if kind is NodeKind.PERSISTENT:\n            self._fs.sync_dir(self._directory(names[:-1]))",
        "        if kind is None:\n            self._fs.sync_dir(self._directory(names[:-1]))",
        "registry/test_registry_exploration.py -k power",
    ),
    Mistake(
        "registry_ignores_a_failed_sync", "logcore/registry/files.py",
        "                self._fs.pwrite(\n"
        "                    handle, bytes(len(new.pack(head))), head.place(new.version)\n"
        "                )",
        "                pass",
        "registry/test_registry_power.py",
    ),
    Mistake(
        "registry_records_the_domain_after_the_node", "logcore/registry/files.py",
        "            if domains is not None and domain not in domains:\n",
        "            if domain == file:\n",
        "registry/test_registry_exploration.py -k every_order",
    ),
    Mistake(
        "registry_sets_no_watch_for_a_missing_node", "logcore/registry/watching.py",
        "                    directory = posixpath.dirname(directory)\n", "                    break\n",
        "registry/test_registry_sessions.py -k nearest",
    ),
    Mistake(
        "registry_publishes_no_topics_after_an_error", "logcore/directory/controller.py",
        "        except BaseException:\n            # The generator has ended, so start again.\n"
        "            self._version = -1\n",
        "        except BaseException:\n",
        "directory/test_controller.py",
    ),
    Mistake(
        "registry_publishes_topics_before_the_election", "logcore/directory/controller.py",
        "            if self.epoch:\n                self._publish(registry)\n",
        "            if True:\n                self._publish(registry)\n",
        "directory/test_controller.py",
    ),
    Mistake(
        "registry_keeps_partitions_of_an_earlier_topic", "logcore/registry/views.py",
        "        if f\"{partition}/state\" not in states:",
        "        if False:",
        "registry/test_registry_conformance.py -k topics",
    ),
    Mistake(
        "registry_trusts_the_first_read_after_a_crash", "logcore/registry/watching.py",
        "self._repeat_times = [now + delay_ms for delay_ms in _REPEAT_DELAYS_MS]", "self._repeat_times = []",
        "registry/test_registry_sessions.py -k reported_again",
    ),
    Mistake(
        "registry_watches_no_new_directory", "logcore/registry/watching.py",
        "            self._armed = {}\n        if self._watch.saw_close",
        "            pass\n        if self._watch.saw_close",
        "registry/test_registry_conformance.py -k survives_deletion",
    ),
    Mistake(
        "registry_observer_uses_the_wall_clock", "logcore/registry/files.py",
        "                self._fs.monotonic_ms(), self._sessions.all()\n",
        "                self._fs.now_ms(), self._sessions.all()\n",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "paused_registry_observer_expires_sessions_at_once", "logcore/registry/sessions.py",
        "                or (now_ms - before.last_ms) * 3 > facts.max_poll_interval_ms\n", "",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "registry_lease_survives_a_fork", "logcore/registry/files.py",
        "        fs.after_fork(self._forget)\n", "",
        "registry/test_registry_processes.py -k fork",
    ),
    # -- groups of the consumer protocol
    Mistake(
        "unreleased_partition_is_assigned", "logcore/coordination/consumer_group.py",
        "        unreleased = frozenset(\n"
        "            partition for partition in new if partition in self.owners\n"
        "        )",
        "        unreleased: Partitions = frozenset()",
        "coordination/test_consumer_group_histories.py::test_partitions_have_one_owner_and_the_group_becomes_stable",
    ),
    Mistake(
        "heartbeat_without_partitions_confirms_a_revocation", "logcore/coordination/consumer_group.py",
        "if owned is None or owned & current.revoking:",
        "if owned is not None and owned & current.revoking:",
        "coordination/test_heartbeats.py::test_six_steps_observed_with_kafka",
    ),
    Mistake(
        "late_join_is_accepted_with_epoch_zero", "logcore/coordination/consumer_group.py",
        "if member_epoch == current.member_epoch:\n            return True",
        "if member_epoch in (0, current.member_epoch):\n            return True",
        "coordination/test_heartbeats.py",
    ),
    Mistake(
        "epoch_is_kept_after_a_revocation", "logcore/coordination/consumer_group.py",
        "return self._next(member_id, current, current.member_epoch + 1, owned)",
        "return self._next(member_id, current, current.member_epoch, owned)",
        "coordination/test_heartbeats.py::test_reconciliation_of_a_member",
    ),
    Mistake(
        "response_overtakes_earlier_steps", "logcore/coordination/consumer_transitions.py",
        "elif consumers.is_busy:\n            last",
        "elif consumers.queued:\n            last",
        "coordination/test_heartbeats.py",
    ),
    Mistake(
        "only_the_failed_batch_is_reverted", "logcore/coordination/consumer_transitions.py",
        "failed_steps = [*consumers.storing, *consumers.queued]",
        "failed_steps = [*consumers.storing]",
        "coordination/test_consumer_group_histories.py coordination/test_heartbeats.py",
    ),
    Mistake(
        "uncertain_record_is_not_written_again", "logcore/coordination/consumer_transitions.py",
        "again = [fact for fact in consumers.unsure if fact not in changed]",
        "again: list[Fact] = []",
        "coordination/test_heartbeats.py",
    ),
    Mistake(
        "heartbeat_is_answered_while_the_outcome_is_unknown", "logcore/coordination/consumer_transitions.py",
        "elif consumers.unsure and answers:",
        "elif consumers.unsure and not answers:",
        "coordination/test_heartbeats.py",
    ),
    Mistake(
        "revocation_timer_restarts_with_each_change", "logcore/coordination/consumer_transitions.py",
        "if kind is RecordKind.CURRENT:\n                self._update_revocation_timer(name)",
        "self._update_revocation_timer(name)",
        "coordination/test_heartbeats.py",
    ),
    Mistake(
        "commit_of_an_older_epoch_is_accepted", "logcore/coordination/consumer_group.py",
        "if self.current(member_id).member_epoch == member_epoch:\n            return None",
        "if self.current(member_id).member_epoch >= member_epoch:\n            return None",
        "coordination/test_heartbeats.py",
    ),
    Mistake(
        "claims_are_ignored_in_an_upgrade", "logcore/coordination/migration.py",
        "        kept = _with_ids(subscription.owned, context.topics).difference(taken)\n",
        "        kept = _with_ids((), context.topics).difference(taken)\n",
        "coordination/test_group_conversions.py",
    ),
    Mistake(
        "zombie_joins_by_the_classic_protocol", "logcore/coordination/migration.py",
        "        if member_id not in self.consumers.members and subscription.owned:\n",
        "        if member_id is None:\n",
        "coordination/test_group_conversions.py",
    ),
    Mistake(
        "pending_tombstones_are_not_retried", "logcore/coordination/coordinator.py",
        "        if (\n"
        "            error is None\n"
        "            and group.pending_tombstones\n"
        "            and effect.records[: len(group.pending_tombstones)]\n"
        "            == group.pending_tombstone_records()\n"
        "        ):",
        "        if group.pending_tombstones and (\n"
        "            effect.records[: len(group.pending_tombstones)]\n"
        "            == group.pending_tombstone_records()\n        ):",
        "coordination/test_group_conversions.py",
    ),
    Mistake(
        "generations_begin_anew_after_a_downgrade", "logcore/coordination/migration.py",
        "    group.generation = consumers.target_epoch\n",
        "    group.generation = 0\n",
        "coordination/test_group_conversions.py",
    ),
    Mistake(
        "late_classic_members_are_kept", "logcore/coordination/consumer_transitions.py",
        "LateMemberRemoved(self.group.group_id, member_id))\n        self._remove(member_id)\n",
        "LateMemberRemoved(self.group.group_id, member_id))\n",
        "coordination/test_group_conversions.py",
    ),
    Mistake(
        "records_of_a_request_are_split_into_batches", "netshim/stored_offsets.py",
        "return append_atomically(log.host.writer, rows, durability=\"os\")",
        "return log.append_many(rows, durability=\"os\")",
        "netshim/test_consumer_protocol.py::test_records_of_a_heartbeat_are_one_batch",
    ),
    # -- transactions of a cluster
    Mistake(
        "answer_of_the_coordinator_outlives_a_marker", "netshim/cluster/transaction_shards.py",
        "unknown - errors.keys() - preparation.changed",
        "unknown - errors.keys()",
        "netshim/cluster/test_transaction_shards.py",
    ),
    Mistake(
        "verification_outlives_the_leadership", "netshim/cluster/transaction_shards.py",
        "        self._verified.pop(key, None)\n",
        "",
        "netshim/cluster/test_transaction_shards.py",
    ),
    Mistake(
        "requests_of_a_producer_overtake_each_other", "netshim/cluster/transaction_shards.py",
        "        if producer[1] in self._preparations:\n            return False",
        "        if False:\n            return False",
        "netshim/cluster/test_transaction_shards.py",
    ),
    Mistake(
        "restarted_replica_has_no_start", "logcore/partition/replication.py",
        "            writer.begin_at_locked(offset)\n        # The batches",
        "            pass\n        # The batches",
        "partition/test_following.py",
    ),
    # -- rollback of a broker
    Mistake(
        "rolled_back_producer_ids", "netshim/rollback.py",
        'frozenset((CLOCK, PRODUCER_IDS, ".lock"))',
        'frozenset((CLOCK, ".lock"))',
        "netshim/test_rollback.py::test_producer_ids_are_not_given_out_again",
    ),
    Mistake(
        "rolled_back_epochs", "netshim/rollback.py",
        "self.epochs.get((topic, number), 0)",
        "0",
        "netshim/test_rollback.py::test_leader_epoch_rises_if_records_are_removed",
    ),
    Mistake(
        "transaction_continues_after_a_rollback", "netshim/rollback.py",
        "                state.transactions.request(request, now_ms, lambda _: None)\n",
        "                pass\n",
        "netshim/test_rollback.py::test_open_transaction_ends_and_a_new_transaction_commits",
    ),
    # -- transactions of a broker; coordination/test_transactions_coordinated.py has the coordinator
    Mistake(
        "marker_counts_before_it_is_on_disk", "netshim/transactions.py",
        "leadership.when_safe(\n            partition, log, end, partial(self._finish_partition, partition)\n        )",
        "self._finish_partition(partition, None)",
        "netshim/test_transaction_crashes.py",
    ),
    Mistake(
        "record_counts_before_it_is_on_disk", "netshim/internal_topics.py",
        "            self._unsynced.setdefault(log, deque()).append((end, callback))\n",
        "            callback(None)\n",
        "netshim/test_transaction_crashes.py",
    ),
    Mistake(
        "prepared_transactions_wait_for_a_request", "netshim/broker.py",
        "        self.state.transactions.begin(now_ms)\n",
        "",
        "netshim/test_transaction_crashes.py",
    ),
    Mistake(
        "offsets_stay_unstable", "netshim/transactions.py",
        "        if error is None and partition[0] == OFFSETS_TOPIC:\n",
        "        if error is not None and partition[0] == OFFSETS_TOPIC:\n",
        "netshim/test_transaction_requests.py",
    ),
    Mistake(
        "open_offsets_forgotten_at_a_restart", "logcore/coordinators/stored_offsets.py",
        "        found.add_unstable(undecided)\n",
        "",
        "netshim/test_transaction_requests.py",
    ),
    Mistake(
        "earlier_transactional_offset_covers_a_later_one", "logcore/coordination/classic_group.py",
        "        if key in self.applied and order < self.applied[key]:\n            return\n",
        "",
        "netshim/test_transaction_requests.py",
    ),
    Mistake(
        "late_batches_join_the_next_transaction", "netshim/transactions.py",
        "return write() if error is None else error",
        "return write()",
        "netshim/test_transaction_requests.py",
    ),
    # -- transactions of producers in one process
    Mistake(
        "partition_is_added_after_its_first_batch", "logcore/producer/sender.py",
        "            ready = self._add_to_transaction(self._transaction_manager, ready)\n"
        "        written: list[_WrittenBatch] = []\n"
        "        for queue, batches in ready:\n"
        "            self._write_all(queue, batches, written)\n",
        "            admitted = ready\n"
        "        written: list[_WrittenBatch] = []\n"
        "        for queue, batches in ready:\n"
        "            self._write_all(queue, batches, written)\n"
        "        if self._transaction_manager is not None:\n"
        "            self._add_to_transaction(self._transaction_manager, admitted)\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "failed_transaction_is_written_on", "logcore/producer/sender.py",
        "            if self._transaction_manager.has_failed:\n",
        "            if False:\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "transaction_with_a_failed_batch_commits", "logcore/producer/transactional_producer.py",
        "            if self._transaction_manager.failure is not None:\n"
        "                raise self._transaction_manager.failure\n",
        "            pass\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "next_transaction_keeps_its_sequences", "logcore/producer/transactional_producer.py",
        "                queue.identity = None  # each transaction has another epoch\n",
        "                pass\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "refused_offsets_commit_with_the_rest", "logcore/producer/transactional_producer.py",
        "                self._transaction_manager.fail(error)\n"
        "            raise error\n",
        "                pass\n"
        "            raise error\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "offsets_count_without_their_transaction", "logcore/coordinators/group_host.py",
        "        if producer is None:\n            return coordinator.commit_as(",
        "        if True:\n            return coordinator.commit_as(",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "marker_before_the_decision_is_on_disk", "logcore/coordinators/transactions.py",
        "        if effect.stored is None or effect.stored.status in _COMPLETE:\n",
        "        if effect.stored is None or effect.stored.status is not Status.EMPTY:\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "markers_count_as_written_before_they_are_on_disk", "logcore/coordinators/transactions.py",
        "            ends[log] = receipt.last_offset + 1\n",
        "            pass\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "unwritten_marker_counts_as_written", "logcore/coordinators/transactions.py",
        "        self._act(machine.markers_written(effect, frozenset(unwritten), self.now_ms()))\n",
        "        self._act(machine.markers_written(effect, frozenset(), self.now_ms()))\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "decisions_of_other_processes_are_not_read", "logcore/coordinators/transactions.py",
        "            if self._ends.get(number) != (log, log.log_end_offset):\n",
        "            if number not in self._ends:\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "two_processes_decide_concurrently", "logcore/claim.py",
        "        return _held(self._common.transactions)\n",
        "        return _held(None)\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "state_is_kept_after_a_record_that_failed", "logcore/coordinators/transactions.py",
        "            self._is_loaded = False\n"
        "        self._act",
        "            pass\n"
        "        self._act",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "groups_are_not_notified_of_a_marker", "logcore/coordinators/transactions.py",
        "                self._on_marker(effect.producer_id, effect.commit)\n",
        "                pass\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "consumer_begins_before_an_open_commit", "logcore/consumer/consumer.py",
        "            if partition in unstable:\n"
        "                continue\n",
        "",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "committed_offsets_read_before_the_open_ones", "logcore/consumer/consumer.py",
        "            if self._settings.isolation_level == \"read_committed\":\n"
        "                unstable = self._groups.unstable(group_id)\n"
        "            stored = self._commits.committed()\n",
        "            stored = self._commits.committed()\n"
        "            if self._settings.isolation_level == \"read_committed\":\n"
        "                unstable = self._groups.unstable(group_id)\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "overdue_transactions_wait_for_a_producer", "logcore/coordinators/lookup.py",
        "            self.transactions(directory).end_overdue()\n",
        "            self.transactions(directory)\n",
        "producer/test_producer_transactions.py producer/test_transaction_exploration.py -k 'not many'",
    ),
    Mistake(
        "each_append_waits_for_all_logs", "logcore/coordinators/durable_queue.py",
        "                logs = [\n"
        "                    log\n"
        "                    for log, waiting in self._waiting.items()\n"
        "                    if any(append.number <= last for append in waiting)\n"
        "                ]",
        "                logs = list(self._waiting)",
        "log/test_pending_syncs.py",
    ),
    Mistake(
        "follow_up_appends_are_not_awaited", "logcore/coordinators/durable_queue.py",
        "        number = self._parent_number\n        if number is None:",
        "        number = None\n        if number is None:",
        "log/test_pending_syncs.py",
    ),
    Mistake(
        "append_after_a_sync_counts_as_lost", "logcore/coordinators/durable_queue.py",
        "                    if failure is None and end <= log.log_end_offset:\n"
        "                        continue\n",
        "",
        "log/test_pending_syncs.py",
    ),
    Mistake(
        "prepared_transaction_times_out_after_a_restart", "logcore/coordination/transactions.py",
        "            if stored.status is Status.ONGOING and stored.timeout_ms != NO_TIMEOUT:\n",
        "            if stored.status is Status.ONGOING:\n",
        "producer/test_producer_transactions.py",
    ),
    Mistake(
        "completing_producer_shares_the_epoch_of_the_preparing_one", "logcore/producer/transaction_manager.py",
        "            if self._is_inherited:\n"
        "                response = self._initialized(deadline_ms)\n",
        "",
        "producer/test_producer_transactions.py",
    ),
    Mistake(
        "transaction_is_prepared_before_its_records_are_written", "logcore/producer/transactional_producer.py",
        "        self._write_all(self._deadline_ms(timeout))\n"
        "        return",
        "        return",
        "producer/test_producer_transactions.py",
    ),
    Mistake(
        "orphans_of_a_power_cut_stay_open", "netshim/transactions.py",
        "            effects += self._coordinator.adopt(find_orphans(self._state.logdir), now_ms)\n",
        "            pass\n",
        "netshim/test_transaction_crashes.py",
    ),
    Mistake(
        "orphan_aborted_with_its_own_epoch", "logcore/coordination/transactions.py",
        "            epoch = min(epochs[producer_id] + 1, _TOP_EPOCH)\n",
        "            epoch = epochs[producer_id]\n",
        "coordination/test_transactions_coordinated.py",
    ),
    Mistake(
        "orphan_of_a_later_epoch_counts_as_known", "logcore/coordination/transactions.py",
        "    return (\n"
        "        stored is not None\n"
        "        and partition in stored.partitions\n"
        "        and epoch <= stored.producer_epoch\n"
        "    )",
        "    return stored is not None and partition in stored.partitions",
        "coordination/test_transactions_coordinated.py",
    ),
    Mistake(
        "append_overtakes_waiting_appends", "netshim/logs.py",
        "        is_busy = key in self._queued_keys or key in self._keys_at_work\n",
        "        is_busy = key in self._queued_keys\n",
        "netshim/test_produce.py",
    ),
    Mistake(
        "urgent_request_waits_for_all_others", "netshim/request_order.py",
        "            self._ready.appendleft(key)\n",
        "            self._ready.append(key)\n",
        "netshim/test_request_order.py",
    ),
    Mistake(
        "all_requests_are_submitted_at_once", "netshim/request_order.py",
        "            while self._ready and self._running < _MAX_RUNNING:\n",
        "            while self._ready:\n",
        "netshim/test_request_order.py",
    ),
    Mistake(
        "last_waiting_request_runs_first", "netshim/request_order.py",
        "        batch = [waiting.popleft() for",
        "        batch = [waiting.pop() for",
        "netshim/test_produce.py",
    ),
    Mistake(
        "acks_all_is_answered_before_the_sync", "netshim/handlers/produce.py",
        "    if request.acks == 1 or state.leadership.is_committed(log, end):\n",
        "    if request.acks != 1 or state.leadership.is_committed(log, end):\n",
        "netshim/test_produce.py",
    ),
    Mistake(
        "fast_path_stores_unchecked_batches", "netshim/handlers/produce.py",
        "    if (\n"
        "        log is None\n"
        "        or state.leadership.is_clustered\n"
        "        or _check_batch(request, topic.name, records, call)[0]\n"
        "        or _may_wait(log, records)\n"
        "    ):",
        "    if log is None or _may_wait(log, records):",
        "netshim/test_produce.py",
    ),
    Mistake(
        "each_tick_reads_all_settings", "logcore/directory/shared_topics.py",
        "        if not self.is_behind:\n            return\n        stale",
        "        stale",
        "directory/test_maintenance.py",
    ),
    # -- forwarding to a cluster, and mirroring from one
    Mistake(
        "progress_is_read_before_older_forwarders_are_fenced", "logcore/shipping/forwarder.py",
        "            sender = self._cluster.transactional_sender(\n"
        "                self.transactional_id, self.group_id\n"
        "            )\n"
        "            try:\n"
        "                progress = self._cluster.committed(\n"
        "                    self.group_id, list(self._partitions)\n"
        "                )\n"
        "            except BaseException:\n"
        "                sender.close()\n"
        "                raise",
        "            progress = self._cluster.committed(self.group_id, list(self._partitions))\n"
        "            sender = self._cluster.transactional_sender(\n"
        "                self.transactional_id, self.group_id\n"
        "            )",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "recreated_log_counts_as_the_old_log", "logcore/shipping/forwarder.py",
        "                self._check_last_record(log, progress)\n",
        "                pass\n",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "progress_of_another_cluster_is_used", "logcore/shipping/forwarder.py",
        "        if recorded.cluster_id != self._cluster_id:\n",
        "        if False:\n",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "incomplete_transaction_continues", "logcore/shipping/forwarder.py",
        "offset.\n            self._drop_sender()\n",
        "offset.\n",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "uncommitted_records_shipped", "logcore/shipping/forwarder.py",
        'records = log.read(part.position, end, isolation="read_committed")',
        "records = log.read(part.position, log.high_watermark)",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "undelivered_batch_is_not_read_again", "logcore/shipping/forward_rules.py",
        "        self.has_position = True\n"
        "        self.rewind()\n",
        "        self.has_position = True\n",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "lost_progress_starts_again_without_an_error", "logcore/shipping/forward_rules.py",
        '        if on_lost == "fail":',
        '        if on_lost == "never":',
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "skipped_records_are_not_committed", "logcore/shipping/forwarder.py",
        "        part.skip_to(record.offset + 1)\n"
        "        part.needs_commit = True\n",
        "        part.skip_to(record.offset + 1)\n",
        "shipping/test_forwarder.py",
    ),
    Mistake(
        "fetched_records_count_as_stored", "logcore/shipping/mirror.py",
        "        except BaseException:\n"
        "            self._reset_positions()\n"
        "            raise\n",
        "",
        "shipping/test_mirror.py",
    ),
    Mistake(
        "missing_record_counts_as_compacted", "logcore/shipping/mirror_rules.py",
        "    if is_compacted:\n        return None\n",
        "    if True:\n        return None\n",
        "shipping/test_mirror.py",
    ),
    Mistake(
        "batch_is_mirrored_before_it_is_compared", "logcore/shipping/mirror.py",
        "            part.fetch_offset = min(part.local_tail, default=decision.offset)\n",
        "            part.fetch_offset = decision.offset\n",
        "shipping/test_mirror.py",
    ),
    Mistake(
        "mirror_written_by_fast_appends", "logcore/partition/writer_fields.py",
        "not checks_times and not is_copy\n",
        "not checks_times\n",
        "cli/test_shipping_at_the_command_line.py",
    ),
    Mistake(
        "append_of_a_former_leader_is_stored", "logcore/partition/writer_fields.py",
        "bool(config.mirror_source) or is_following",
        "bool(config.mirror_source)",
        "directory/test_replicas.py",
    ),
    Mistake(
        "lost_replica_is_created_empty", "logcore/directory/topics.py",
        "            if topic.is_of_cluster:\n                # A missing",
        "            if False:\n                # A missing",
        "directory/test_replicas.py",
    ),
    Mistake(
        "states_of_a_cluster_are_not_synced", "logcore/registry/files.py",
        "            is_view = names[:2] == _CHANGES",
        "            is_view = is_view or names[:2] == _CHANGES",
        "registry/test_registry_of_a_cluster.py",
    ),
    Mistake(
        "progress_is_stored_before_its_records", "logcore/shipping/mirror.py",
        "                        records[-1].record.offset + 1, part.source_id",
        "                        records[-1].record.offset + 2, part.source_id",
        "shipping/test_mirror.py",
    ),
    # -- mistakes that only the exploration of schedules detects
    Mistake(
        "commit_checked_outside_the_lock", "logcore/coordinators/shared_groups.py",
        "        request = commit_request(committer, offsets, producer)\n\n"
        "        def step(coordinator: Coordinator, now_ms: int) -> Iterable[Effect]:\n"
        "            return request(coordinator, commit.waiter, now_ms)\n",
        "        with self._lock:\n            seen = self._present(committer.group_id)\n"
        "        if seen is not None and producer is None:\n"
        "            wrong = seen.check_committer(\n"
        "                committer.member_id, committer.instance_id, committer.generation)\n"
        "            if wrong is not None:\n                return wrong\n\n"
        "        request = commit_request(committer, offsets, producer)\n\n"
        "        def step(coordinator: Coordinator, now_ms: int) -> Iterable[Effect]:\n"
        "            if producer is None:\n"
        "                return coordinator.commit(committer.group_id, offsets, commit.waiter)\n"
        "            return request(coordinator, commit.waiter, now_ms)\n",
        "consumer/test_commit_steps.py",
    ),
    Mistake(
        "durable_end_published_before_the_sync", "logcore/partition/group_commit.py",
        "        try:\n            self._sync()\n",
        "        if self._publish is not None:\n            self._publish(target)\n"
        "        try:\n            self._sync()\n",
        "partition/test_sharing_exploration.py -k flushed",
    ),
    Mistake(
        "late_deletion_forgets_the_offsets_of_the_next_topic", "logcore/coordination/offsets.py",
        "    if current:\n        keys = [key for key in keys if not group.has_commit_of(key, current)]\n",
        "",
        "netshim/cluster/test_shards_loading.py",
    ),
    Mistake(
        "commit_has_the_id_of_a_view_that_is_not_applied", "netshim/cluster/shards.py",
        "for view in (self._view, self._member.view):",
        "for view in (self._member.view, self._view):",
        "netshim/cluster/test_shards_loading.py",
    ),
    Mistake(
        "missing_topic_is_never_deleted", "netshim/cluster/shards.py",
        "                self._missing[name] = topic_id\n",
        "                pass\n",
        "netshim/cluster/test_shards_loading.py",
    ),
    # -- absent static members
    Mistake(
        "static_member_is_removed_at_once", "logcore/coordination/classic_transitions.py",
        "            step.renew(member, member.absence_ms)\n",
        "            step.renew(member, 0)\n",
        "consumer/test_shared_groups_exploration.py -k static",
    ),
    Mistake(
        "dead_static_member_is_not_recorded", "logcore/coordinators/shared_groups.py",
        "        if static:\n            run.act(",
        "        if static and dynamic:\n            run.act(",
        "consumer/test_shared_groups_exploration.py -k static",
    ),
    Mistake(
        "static_member_with_a_heartbeat_remains_absent", "logcore/coordination/classic_transitions.py",
        "        member.is_absent = False\n",
        "",
        "coordination/test_coordination.py -k absent",
    ),
    Mistake(
        "absent_member_has_the_session_timeout", "logcore/coordinators/stall_detector.py",
        "            member.active_session_ms,\n",
        "            member.session_timeout_ms,\n",
        "consumer/test_stall_detector.py consumer/test_consumer_groups.py -k 'static or absent'",
    ),
    # -- sizes of reads and batches
    Mistake(
        "poll_ignores_the_byte_limit", "logcore/consumer/positions.py",
        "            size_bytes += run_bytes\n",
        "",
        "consumer/test_consumer.py -k large_records",
    ),
    Mistake(
        "records_of_a_run_are_skipped", "logcore/consumer/positions.py",
        "            self._next_index = min(max_records - len(records), len(self._records))\n",
        "            self._next_index = len(self._records)\n",
        "consumer/test_consumer.py",
    ),
    # -- interrupts, cancellation, and recreated topics
    Mistake(
        "expected_offset_joins_the_batch_before_it", "logcore/aio/log.py",
        "            if found and (\n"
        "                appended.durability != found[0].durability or appended.depends_on_others\n"
        "            ):",
        "            if found and (appended.durability != found[0].durability):",
        "aio/test_aio_log.py",
    ),
    Mistake(
        "appends_join_the_batch_of_an_expected_offset", "logcore/aio/log.py",
        "            if appended.depends_on_others:\n                break\n        return found",
        "        return found",
        "aio/test_aio_log.py",
    ),
    Mistake(
        "positions_stay_moved_after_an_interrupt", "logcore/consumer/fetcher.py",
        "                read_position.seek_to(start)\n            raise",
        "                pass\n            raise",
        "faults/test_interrupted_calls.py -k fetcher",
    ),
    Mistake(
        "records_that_were_taken_are_not_counted", "logcore/consumer/fetcher.py",
        "        read_position.has_undelivered = True\n        try:\n",
        "        try:\n",
        "faults/test_interrupted_calls.py -k fetcher",
    ),
    Mistake(
        "position_moves_past_a_refused_record", "logcore/consumer/fetcher.py",
        "        if not next_records.is_last or stopped_early:\n            end = delivered[-1].offset + 1\n",
        "        if not next_records.is_last:\n            end = next_records.records[-1].offset + 1\n",
        "consumer/test_consumer.py",
    ),
    Mistake(
        "columns_move_a_position_after_a_seek", "logcore/consumer/fetcher.py",
        "            if read_position is None or read_position.position != columns.start:\n",
        "            if read_position is None:\n",
        "aio/test_aio_consumer.py consumer/test_consumer.py",
    ),
    Mistake(
        "interrupted_close_counts_as_complete", "logcore/consumer/consumer.py",
        "            except Exception:\n                self._end()\n                raise\n",
        "            except BaseException:\n                self._end()\n                raise\n",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "join_is_not_recorded_before_its_request", "logcore/consumer/group_member.py",
        "        self._join_being_sent = pending\n",
        "",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "replaced_topic_continues_at_old_positions", "logcore/consumer/positions.py",
        "            if is_other:\n                read_position.restart_in_new_topic(topic_id)\n",
        "            read_position.topic_id = topic_id\n",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "offsets_of_a_deleted_topic_are_committed", "logcore/consumer/commits.py",
        "            if read_position.finished is not None\n"
        "            and read_position.finished != read_position.stored\n"
        "            and not self.is_of_deleted_topic(partition)",
        "            if read_position.finished is not None and read_position.finished != read_position.stored",
        "consumer/test_consumer_groups.py",
    ),
    Mistake(
        "session_forgets_domains_in_which_it_has_nodes", "logcore/registry/files.py",
        "        facts = attrs.evolve(facts, domains=(*kept, last))\n",
        "        facts = attrs.evolve(facts, domains=(last,))\n",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "expired_session_polls", "logcore/registry/files.py",
        "                raise self._expired(lease)\n            facts = lease.record\n",
        "                pass\n            facts = lease.record\n",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "interrupted_block_of_a_domain_stays_locked", "logcore/registry/files.py",
        "                self._held = before\n",
        "                pass\n",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "clock_of_an_earlier_boot_is_used", "logcore/registry/views.py",
        "        if value is not None and paths.unpack_clock(value)[0] == boot:\n",
        "        if value is not None:\n",
        "registry/test_registry_sessions.py",
    ),
    Mistake(
        "each_process_measures_transactions_by_its_own_clock", "logcore/coordinators/lookup.py",
        "        if not directory.is_shared:\n            return clock_ms\n",
        "        if directory.path:\n            return clock_ms\n",
        "producer/test_transaction_exploration.py -k clock",
    ),
    Mistake(
        "file_opened_for_a_cancelled_task_is_kept_open", "logcore/aio/loop_thread.py",
        "            self.submit(release_result)\n",
        "",
        "aio/test_aio_cancellation.py",
    ),
    Mistake(
        "seek_takes_effect_inside_the_step_of_another_call", "logcore/aio/consumer.py",
        "        if self._steps and not self._loop_thread.is_answering:\n",
        "        if self._is_reading and self._loop_thread.is_answering:\n",
        "aio",
    ),
    Mistake(
        "commit_of_a_loop_takes_later_positions", "logcore/aio/consumer.py",
        "await self._loop_thread.call(self._sync.commit, chosen, timeout)\n",
        "await self._loop_thread.call(self._sync.commit, offsets, timeout)\n",
        "aio/test_aio_consumer.py",
    ),
    Mistake(
        "reading_in_a_loop_finishes_nothing", "logcore/aio/consumer.py",
        "            self._sync.fetcher.finish()\n            deadline = self._loop.time() + timeout_ms / 1000\n"
        "            while not moves and await self._prepare(deadline):\n                found, moves",
        "            deadline = self._loop.time() + timeout_ms / 1000\n"
        "            while not moves and await self._prepare(deadline):\n                found, moves",
        "aio/test_aio_consumer.py",
    ),
    Mistake(
        "small_fetch_waits_for_more_than_it_may_return", "logcore/legacy/simple_consumer.py",
        "            if (\n"
        "                is_full\n"
        "                or fetched.size_bytes >= min(min_bytes, max_bytes)\n"
        "                or remaining_ms <= 0\n"
        "            ):",
        "            if fetched.size_bytes >= min(min_bytes, max_bytes) or remaining_ms <= 0:",
        "consumer/test_simple_consumer.py",
    ),
    Mistake(
        "batch_of_a_deleted_topic_is_tried_again", "logcore/producer/sender.py",
        "        if isinstance(error, TopicNotFoundError):\n",
        "        if isinstance(error, TopicNotFoundError) and not batch.may_be_stored:\n",
        "producer/test_producer.py -k deleted",
    ),
    Mistake(
        "bare_tokens_are_recorded", "netshim/recording/secrets.py",
        "    if authentication is not None and authentication.expects_token:\n        return 0\n",
        "",
        "netshim/test_recording.py",
    ),
    Mistake(
        "responses_with_tokens_are_recorded", "netshim/recording/recorder.py",
        "                self._secret_ids.add(bytes(frame[4:8]))",
        "                pass",
        "netshim/test_recording.py",
    ),
    Mistake(
        "recording_continues_on_a_full_disk", "netshim/recording/recorder.py",
        "        except LogcoreError as error:\n            self._fail(error)\n",
        "        except LogcoreError as error:\n            self.failure = error\n",
        "netshim/test_recording.py",
    ),
    Mistake(
        "recording_fills_the_memory", "netshim/recording/recorder.py",
        "            if self._pending_bytes > self._max_pending_bytes:",
        "            if self._pending_bytes > 100 * self._max_pending_bytes:",
        "netshim/test_recording.py",
    ),
    Mistake(
        "replay_keeps_producer_ids", "netshim/replay/id_mapping.py",
        "                changes[field.name] = self._records(field_value)",
        "                pass",
        "netshim/test_replay.py -k ids",
    ),
    Mistake(
        "replay_accepts_fewer_records", "netshim/replay/comparison.py",
        "        if len(replayed_batches) < len(recorded_batches):",
        "        if False:",
        "netshim/test_replay.py -k fetch",
    ),
)  # fmt: skip


def copy_tree(target: Path) -> None:
    for name in ("src", "tests"):
        shutil.copytree(
            ROOT / name,
            target / name,
            ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
        )
    # Tests read other files, such as documents.
    for path in ROOT.iterdir():
        if (
            not path.name.startswith((".", "build"))
            and not (target / path.name).exists()
        ):
            (target / path.name).symlink_to(path)


def run(tree: Path, tests: list[str]) -> tuple[int, str]:
    """Return the exit status of pytest, or -1 if it hung, and its output."""
    environment = {
        **os.environ,
        **ROUNDS,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--timeout=60"]
    options += ["-m", "not slow"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command,
            cwd=tree / "tests",
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = -1
        file.seek(0)
        return code, file.read()


def try_mistake(tree: Path, mistake: Mistake) -> dict[str, object]:
    path = tree / "src" / mistake.file
    original = path.read_text("utf-8")
    if original.count(mistake.old) != 1:
        return {"error": f"the old text occurs {original.count(mistake.old)} times"}
    path.write_text(original.replace(mistake.old, mistake.new), "utf-8")
    try:
        code, output = run(tree, shlex.split(mistake.tests))
    finally:
        path.write_text(original, "utf-8")
    if code == 0:
        return {"detected": False}
    failure = re.search(
        r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", output, re.MULTILINE
    )
    if code != -1 and (code != 1 or failure is None):
        return {"error": f"pytest ended with {code}: {output[-300:]}"}
    killer = "pytest hung" if failure is None else failure[1].removeprefix("tests/")
    code, output = run(
        tree, shlex.split(mistake.tests) if failure is None else [killer]
    )
    return (
        {"detected": True, "by": killer}
        if code == 0
        else {"error": f"fails without it: {killer} {output[-300:]}"}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make mistakes in a copy of the tree, and report whether tests fail."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only mistakes with these names"
    )
    names = parser.parse_args().names
    mistakes = [mistake for mistake in MISTAKES if not names or mistake.name in names]
    detected = 0
    with tempfile.TemporaryDirectory() as directory:
        copy_tree(Path(directory))
        for mistake in mistakes:
            start = time.monotonic()
            result = try_mistake(Path(directory), mistake)
            detected += result.get("detected") is True
            seconds = round(time.monotonic() - start)
            print(
                json.dumps(
                    {
                        "name": mistake.name,
                        "file": mistake.file,
                        **result,
                        "seconds": seconds,
                    }
                ),
                flush=True,
            )
    print(f"detected {detected} of {len(mistakes)}")
    return 0 if mistakes and detected == len(mistakes) else 1


if __name__ == "__main__":
    sys.exit(main())
