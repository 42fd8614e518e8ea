"""The log's writer: rotation, a torn tail, samples, what is to be forgotten, a queue that is full."""

import dataclasses
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_traffic_record import RECORD

from distill.live.traffic import writer as module
from distill.live.traffic.reader import read_traffic
from distill.live.traffic.record import FORGOTTEN, from_line, log_files, priority
from distill.live.traffic.retention import forget, write_lock
from distill.live.traffic.writer import LogWriter, Samples
from speculative.errors import UserError

NOW = 1.7e9


def named(name: str, slice_name: str = "all") -> module.TrafficRecord:
    return dataclasses.replace(RECORD, id=name, slice=slice_name, time=NOW)


def write(writer: LogWriter, *records: module.TrafficRecord) -> list[bool]:
    """Appends and waits."""
    done: list[bool] = []
    for record in records:
        event = threading.Event()
        writer.append(record, lambda written, event=event: (done.append(written), event.set())[0])
        assert event.wait(20)
    return done


def test_files_rotate_and_none_is_lost_or_doubled(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, file_bytes=2000)
    assert write(writer, *(named(f"r{number}") for number in range(12))) == [True] * 12
    writer.close()
    again = LogWriter(tmp_path, file_bytes=2000)
    write(again, named("last"))
    again.close()
    files = log_files(tmp_path)
    assert len(files) > 2
    assert all(path.stat().st_size < 3000 for path in files)
    ids = [from_line(line).id for path in files for line in path.read_bytes().splitlines()]
    assert ids == [*(f"r{number}" for number in range(12)), "last"]


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    with pytest.raises(UserError, match="another gateway writes there"):
        LogWriter(tmp_path)
    writer.close()
    LogWriter(tmp_path).close()


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=40), st.integers(0, 6))
def test_a_sample_is_the_k_smallest(places: list[int], size: int) -> None:
    samples, kept = Samples(size), []
    for place in places:
        # Pushed out are those that a later one is smaller than; the sweep takes their text.
        if samples.take("all", f"{place:x}"):
            kept.append(place)
    assert sorted(kept)[:size] == sorted(places)[:size]
    assert all(sum(other < place for other in places[: places.index(place)]) < size for place in kept)


def test_text_is_kept_of_a_sample_of_each_slice_alone(tmp_path: Path) -> None:
    names = [f"r{number}" for number in range(30)]
    writer = LogWriter(tmp_path, text=True, sample_size=3, retention_days=1e9)
    write(writer, *(named(name, "x") for name in names))
    write(writer, named("only", "y"))
    writer.close()
    LogWriter(tmp_path, text=True, sample_size=3, retention_days=1e9).close()  # its sweep
    texts = {record.id for record in read_traffic(tmp_path).records if record.response_ids}
    assert texts == {*sorted(names, key=lambda name: priority(writer.salt, name))[:3], "only"}
    writer = LogWriter(tmp_path / "without")
    write(writer, named("r1"))
    writer.close()
    assert read_traffic(tmp_path / "without").records[0].response_ids is None


def test_a_disk_that_hangs_fills_a_bounded_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_RECORDS", 4)
    writer, told = LogWriter(tmp_path), list[bool]()
    writer.append(named("first"))
    with write_lock(tmp_path):  # As a forget that rewrites a large file.
        while not told:
            writer.append(named("x"), lambda written: told.append(written))
    writer.close()
    assert told[0] is False
    assert writer.dropped == 1


def test_what_was_forgotten_within_one_tick_of_the_clock_is_never_written(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    for name in ("a", "b"):
        forget(tmp_path, [name])
        os.utime(tmp_path / FORGOTTEN, ns=(10**9, 10**9))
        write(writer, named(name))
    writer.close()
    assert log_files(tmp_path)[0].read_bytes() == b""


def test_what_cannot_be_its_file_is_named_or_left_alone(tmp_path: Path) -> None:
    LogWriter(tmp_path).close()
    (tmp_path / "log-notes.jsonl").write_text("mine")
    writer = LogWriter(tmp_path)
    write(writer, named("a"))
    writer.close()
    assert len(read_traffic(tmp_path).records) == 1
    (tmp_path / "log-00002.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        LogWriter(tmp_path)
