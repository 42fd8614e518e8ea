"""The log's writer: rotation, an incomplete last line, samples, forgetting, a full queue."""

import dataclasses
import os
import queue
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_traffic_record import RECORD

from distill.live.traffic import retention
from distill.live.traffic import writer as module
from distill.live.traffic.forget import forget
from distill.live.traffic.reader import read_traffic
from distill.live.traffic.record import FORGOTTEN, from_line, log_files
from distill.live.traffic.retention import write_lock
from distill.live.traffic.writer import LogWriter
from speculative.errors import UserError

NOW = 1.7e9


def named(name: str, slice_name: str = "all") -> module.TrafficRecord:
    return dataclasses.replace(RECORD, id=name, slice=slice_name, time=NOW)


def write(writer: LogWriter, *records: module.TrafficRecord) -> list[bool]:
    """Append and wait."""
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


def test_a_record_is_on_the_disk_itself_before_its_response_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The files after a power loss: each file's bytes at its last sync, under the synced names."""
    safe, names, breaks, sync = dict[int, bytes](), set[str](), [False], os.fsync

    def synced(descriptor: int) -> None:
        if breaks[0]:
            raise OSError(5, "Input/output error")
        sync(descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            names.update(os.listdir(descriptor))
        else:
            safe[os.fstat(descriptor).st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    monkeypatch.setattr(os, "fsync", synced)
    writer, path = LogWriter(tmp_path), tmp_path / "log-00001.jsonl"
    assert (tmp_path / "salt").read_bytes() in safe.values(), "without it no request is found by its id"
    for number in range(3):
        assert write(writer, named(f"r{number}")) == [True]
        assert safe[path.stat().st_ino] == path.read_bytes()
        assert path.name in names
        if number == 1:
            forget(tmp_path, ["r0"])
            assert safe[path.stat().st_ino].count(b"\n") == 1
    breaks[0] = True
    assert write(writer, named("lost")) == [False]
    writer.close()
    assert "Input/output error" in capfd.readouterr().err


def test_a_clock_that_is_set_ahead_while_the_gateway_runs_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall, offset, moments = time.time, [0.0], queue.Queue[float]()

    def sweep(directory: Path, days: float, now: float) -> Any:
        moments.put(now)
        return retention.sweep(directory, days, now)

    monkeypatch.setattr(time, "time", lambda: wall() + offset[0])
    monkeypatch.setattr(module, "sweep", sweep)
    writer = LogWriter(tmp_path, text=True, file_bytes=1)
    began = moments.get(timeout=20)
    offset[0] = 400 * retention.DAY
    write(writer, dataclasses.replace(RECORD, time=began))
    assert moments.get(timeout=20) - began < retention.DAY
    offset[0] = -400 * retention.DAY
    write(writer, dataclasses.replace(RECORD, id="r2", time=began))
    assert moments.get(timeout=20) < began
    writer.close()
    assert all(record.response_ids for record in read_traffic(tmp_path).records)


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    with pytest.raises(UserError, match="another gateway writes there"):
        LogWriter(tmp_path)
    writer.close()
    LogWriter(tmp_path).close()


def test_a_disk_that_hangs_fills_a_bounded_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_RECORDS", 4)
    writer, told = LogWriter(tmp_path), list[bool]()
    writer.append(named("first"))
    with write_lock(tmp_path):  # like a forget that rewrites a large file
        while not told:
            writer.append(named("x"), lambda written: told.append(written))
    writer.close()
    assert told[0] is False
    assert writer.dropped == 1


def test_requests_forgotten_within_one_clock_tick_are_not_written(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path)
    for name in ("a", "b"):
        forget(tmp_path, [name])
        os.utime(tmp_path / FORGOTTEN, ns=(10**9, 10**9))
        write(writer, named(name))
    writer.close()
    assert log_files(tmp_path)[0].read_bytes() == b""


def test_of_a_conversation_that_was_forgotten_no_text_is_written(tmp_path: Path) -> None:
    first, second, other = (
        dataclasses.replace(RECORD, id=f"r{number}", time=NOW, conversation=talk * 64)
        for number, talk in enumerate("aab")
    )
    writer = LogWriter(tmp_path, text=True, retention_days=1e9)
    write(writer, first)
    forget(tmp_path, ["r0"])
    write(writer, first, second, other)
    writer.close()
    assert {record.id: record.response_ids for record in read_traffic(tmp_path).records} == {
        "r1": None,
        "r2": RECORD.response_ids,
    }


def test_a_request_that_was_in_flight_when_it_was_forgotten_leaves_no_text_in_later_turns(tmp_path: Path) -> None:
    first, second = (dataclasses.replace(RECORD, id=f"r{turn}", time=NOW, conversation="a" * 64) for turn in (1, 2))
    writer = LogWriter(tmp_path, text=True, retention_days=1e9)
    forget(tmp_path, ["r1"])
    write(writer, first)
    write(writer, second)
    writer.close()
    (line,) = log_files(tmp_path)[0].read_bytes().splitlines()
    assert from_line(line + b"\n") == second.without_text(), "on the disk itself"


def test_files_that_are_no_log_files_are_ignored_or_refused(tmp_path: Path) -> None:
    LogWriter(tmp_path).close()
    (tmp_path / "log-notes.jsonl").write_text("mine")
    writer = LogWriter(tmp_path)
    write(writer, named("a"))
    writer.close()
    assert len(read_traffic(tmp_path).records) == 1
    (tmp_path / "log-00002.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        LogWriter(tmp_path)
