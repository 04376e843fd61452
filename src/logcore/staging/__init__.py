"""Writes of many tasks that appear at once or never: segments staged beside the log, published by one manifest.

    data/orders-0/...                                       the log directory, as Kafka and all readers see it
    data.staging/<txid>/<topic>-<partition>.<task>.<attempt>.<n>.{log,index,timeindex}
    data.staging/<app>@<version>.json                       a manifest: ready, nothing in it says where records will lie
    data.staging/<app>@<version>.claim                      the same while a writer turns it into
    data.staging/<app>@<version>.assigned                   a manifest with offsets, carried out whatever happens
    data.staging/<app>.state                                the last version of an application that is done
    data.staging/<app>@<version>.refused                    why a manifest was not carried out
    data.staging/<app>@<version>.damaged                    an assigned manifest that rotted, kept for a person to see
    data.staging/logcore.garbage                            what was old when publish() last looked, and since when

The road of a write: tasks stage segments whose offsets begin at 0, under names no other attempt has, and sync them.
The driver publishes a manifest: from this moment on all of it will be in the log. A writer of the directory claims it,
gives out offsets from the ends of the logs, writes them down, and only then stamps them into the batch heads, outside
the CRC, and moves the files in place. A crash before "assigned" leaves a manifest that a later writer claims; after it,
roll_forward() ends the work before any log is listed.

A staged segment differs from a real one in its name and in the base offsets and leader epochs of its heads.

manifest.py knows the files, writing.py does a task's part, publishing.py its driver's, applying.py that of the holder
of the directory.
"""
