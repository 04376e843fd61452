"""logcore.metadata.filenames: names are formatted and parsed, and other names are rejected."""

import pytest

from logcore.config import INT64_MAX
from logcore.errors import InvalidNameError
from logcore.metadata import filenames
from logcore.metadata.filenames import FileName

FORTY_TWO = "00000000000000000042"
LARGEST = str(INT64_MAX).zfill(20)

#: The name of a file, and its parsed form.
FILES = [
    *((FORTY_TWO + suffix, FileName(42, suffix)) for suffix in filenames.SUFFIXES),
    *(
        (FORTY_TWO + suffix + state, FileName(42, suffix, state))
        for suffix in filenames.SUFFIXES
        for state in filenames.STATES
    ),
    ("0" * 20 + ".log", FileName(0, ".log")),
    (LARGEST + ".log", FileName(INT64_MAX, ".log")),
    (FORTY_TWO + ".log.swap.deleted", FileName(42, ".log", ".swap.deleted")),
]

NO_FILES = [
    "", "42.log", FORTY_TWO, f"{FORTY_TWO}log", f"{FORTY_TWO}.swap", f"{FORTY_TWO}.logs", f"0{FORTY_TWO}.log",
    f"{INT64_MAX + 1:020d}.log", "9" * 20 + ".log", "-" + "0" * 19 + ".log", "²" * 20 + ".log", "٠" * 20 + ".log",
    f"{FORTY_TWO}.1234.quarantine", f"{FORTY_TWO}.log.tmp", "logcore.policy", "leader-epoch-checkpoint",
]  # fmt: skip


@pytest.mark.parametrize(("name", "parsed"), FILES)
def test_file_name_parses_into_its_parts(name, parsed):
    assert filenames.parse_file_name(name) == parsed
    assert str(parsed) == name
    assert (
        filenames.base_offset_of(name, parsed.suffix + parsed.state)
        == parsed.base_offset
    )
    assert filenames.leading_offset(name) == parsed.base_offset
    assert filenames.is_file_of_log(name) and not filenames.is_misnamed(name)


@pytest.mark.parametrize("name", NO_FILES)
def test_foreign_file_names_are_rejected(name):
    assert filenames.parse_file_name(name) is None
    assert filenames.base_offset_of(name) is None


@pytest.mark.parametrize(
    ("name", "is_misnamed"),
    [
        ("9" * 20 + ".log", True),
        (f"{INT64_MAX + 1:020d}.snapshot", True),
        ("9" * 20 + ".seal", False),  # not a file of Kafka
        ("9" * 20 + ".log.deleted", False),
        (LARGEST + ".log", False),
        ("9" * 21 + ".log", False),
    ],
)
def test_a_segment_beyond_all_offsets_is_misnamed(name, is_misnamed):
    assert filenames.is_misnamed(name) == is_misnamed


def test_base_offsets_come_from_log_files_in_order():
    listed = [
        filenames.file_name(base, suffix)
        for base in (300, 7, 42)
        for suffix in filenames.SUFFIXES
    ]
    assert filenames.bases_in(
        [*listed, f"{FORTY_TWO}.log.deleted", "9" * 20 + ".log"]
    ) == [
        7,
        42,
        300,
    ]


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("orders-0", ("orders", 0)),
        ("orders-1-2", ("orders-1", 2)),
        ("a.b_C-2147483647", ("a.b_C", 2**31 - 1)),
        ("x" * 249 + "-12345", ("x" * 249, 12345)),
        ("__consumer_offsets-49", ("__consumer_offsets", 49)),
    ],
)
def test_partition_name_parses_into_its_parts(name, parsed):
    assert (
        filenames.partition_of(name) == filenames.parse_partition_name(name) == parsed
    )
    assert filenames.partition_name(*parsed) == name


@pytest.mark.parametrize(
    "name",
    ["", "orders", "orders-", "-0", ".-0", "..-1", "orders--", "o/s-0", "ö-0", "orders-2147483648", "x" * 250 + "-0",
     "x" * 249 + "-1234567", "orders-0.recovering", "orders-0." + "0" * 32 + "-delete"],
)  # fmt: skip
def test_foreign_partition_names_are_rejected(name):
    assert filenames.partition_of(name) is None
    with pytest.raises(InvalidNameError):
        filenames.parse_partition_name(name)


def test_a_number_has_one_name():
    assert filenames.partition_of("orders-00") == ("orders", 0)
    assert filenames.partition_name("orders", 0) == "orders-0"


@pytest.mark.parametrize("name", ["orders-0", "x" * 249 + "-12345"])
def test_a_deleted_partition_has_a_name_that_fits_and_is_known(name):
    deleted = filenames.deleted_partition_name(name, bytes(range(16)))
    assert len(deleted) <= 255 and filenames.is_deleted_partition(deleted)
    assert (
        not filenames.is_deleted_partition(name)
        and filenames.partition_of(deleted) is None
    )


@pytest.mark.parametrize("name", ["orders-0", "x" * 249 + "-12345"])
def test_name_of_an_unfinished_copy_fits_and_is_not_a_partition(name):
    directory, _, made = filenames.unfinished(f"data/{name}").rpartition("/")
    assert directory == "data" and len(made) <= 255
    assert made.endswith(filenames.UNFINISHED) and filenames.partition_of(made) is None


@pytest.mark.parametrize("number", [0, 1, 12])
def test_quarantined_file_name_contains_its_position(number):
    name = filenames.quarantine_name(42, 1234, number)
    assert filenames.quarantined_position(name) == 1234
    assert filenames.leading_offset(name) == 42
    assert filenames.parse_file_name(name) is None


@pytest.mark.parametrize(
    "name",
    ["", FORTY_TWO + ".log", FORTY_TWO + ".quarantine", ".quarantine", "quarantine"],
)
def test_foreign_names_are_not_quarantined_files(name):
    assert filenames.quarantined_position(name) is None


@pytest.mark.parametrize(("name", "is_fine"), [("a", True), ("a.b-c_D", True), (".", False), ("..", False), ("", False),
                                              ("ä", False), ("x" * 250, False), (None, False), (7, False)])  # fmt: skip
def test_topic_names_are_kafkas(name, is_fine):
    assert filenames.is_topic_name(name) == is_fine
    if is_fine:
        assert filenames.check_topic_name(name) == name
    else:
        with pytest.raises(InvalidNameError):
            filenames.check_topic_name(name)
