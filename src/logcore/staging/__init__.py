"""Writes of many tasks that become visible at once or never: segments staged beside the
log, published by one manifest.

    data/orders-0/...                 the log directory, as Kafka and all readers see it
    data.staging/<txid>/<topic>-<partition>.<task>.<attempt>.<n>.{log,index,timeindex}
    data.staging/<app>@<version>.json      a manifest: ready, without offsets
    data.staging/<app>@<version>.claim     the same while a writer assigns offsets
    data.staging/<app>@<version>.assigned  a manifest with offsets, always carried out
    data.staging/<app>.state               the last completed version of an application
    data.staging/<app>@<version>.refused   the reason why a manifest was refused
    data.staging/<app>@<version>.damaged   a damaged assigned manifest, kept for a
    person
    data.staging/logcore.garbage           old files found by publish(), with the time

Steps of a write: tasks stage segments whose offsets begin at 0, under names unique to
the attempt, and sync them. The driver publishes a manifest, which decides that the
whole write will be in the log. A writer of the directory claims it and assigns offsets
from the ends of the logs. It stores these offsets, then stamps them into the batch
heads, outside the CRC, and moves the files in place. After a crash before "assigned", a
later writer claims the manifest again. After a later crash, roll_forward() completes
the work before any log is listed.

A staged segment differs from a real one in its name, and in the base offsets and leader
epochs of its heads.

manifest.py defines the files. writing.py is the task's part, publishing.py the
driver's, and applying.py the part of the owner of the directory.
"""
