"""Reading, sweeping and forgetting: a log is read completely or refused, and forgotten requests leave no byte."""

import dataclasses
import fcntl
import re
import stat
import threading
from pathlib import Path

import pytest
from refusals import refused
from traffic_log import record_of, write_log

from distill.live.traffic.forget import forget
from distill.live.traffic.reader import read_traffic, served_by
from distill.live.traffic.record import WRITE_LOCK, from_line, priority, read_salt, to_line
from distill.live.traffic.retention import DAY, sweep


def ids(directory: Path) -> list[str]:
    return [record.id for record in read_traffic(directory).records]


def forgotten(log: Path, *names: str) -> tuple[int, int, list[str]]:
    """(lines removed, requests that lost their text, unknown ids)."""
    said, unknown = forget(log, names)
    removed, scrubbed = re.findall(r": (\d+) lines removed; text removed from (\d+) other", said[0])[0]
    return int(removed), int(scrubbed), unknown


def test_each_request_once_by_time_the_last_of_its_lines(tmp_path: Path) -> None:
    again = record_of(1, accepted=0)
    log = read_traffic(write_log(tmp_path / "log", [record_of(2), record_of(1)], [record_of(0), again]))
    assert log.records == [record_of(0), again, record_of(2)]
    assert log.warnings == ["1 lines repeat an id; the last line of each id counts"]
    # Lines in another file or order are the same requests.
    swapped = write_log(tmp_path / "swapped", [record_of(0)], [record_of(2), again])
    assert read_traffic(swapped).records == log.records


def test_only_the_very_last_line_may_be_torn(tmp_path: Path) -> None:
    torn = to_line(record_of(1))[:-20]
    log = write_log(tmp_path / "log", [record_of(0)], [record_of(2), torn])
    assert ids(log) == ["request-0000", "request-0002"]
    assert read_traffic(log).warnings == [f"{log}/log-00002.jsonl:2: the last line is incomplete and left out"]
    assert "log-00001.jsonl:2: crc32" in refused(
        lambda: read_traffic(write_log(tmp_path / "b", [record_of(0), torn], []))
    )
    whole = write_log(tmp_path / "c", [record_of(0), to_line(record_of(1)).rstrip(b"\n")])
    assert len(ids(whole)) == 2, "all but its end is there"
    assert "no traffic log" in refused(lambda: read_traffic(tmp_path / "nowhere"))


def test_requests_that_count_are_of_one_draft_and_of_free_text(tmp_path: Path) -> None:
    counted = [record_of(number, draft_version="v0001" if number < 3 else "v0002") for number in range(6)]
    counted[3] = record_of(3, draft_version="v0002", target_version="newer")
    silent, unused = {"accepted": None, "drafted": None}, {"accepted": 0, "drafted": 0}
    others = [record_of(6, **silent), record_of(7, constrained=True), record_of(8, **unused)]
    log = read_traffic(write_log(tmp_path, [*counted, *others]))
    records, warnings = served_by(log, "v0002")
    assert records == counted[3:]
    assert served_by(log, "v0001")[0] == counted[:3]
    assert warnings[:2] == [
        "3 of 9 requests are left out: nothing drafted, no counts, or constrained text",
        "more than one target was served: newer, target; a change may be the target's",
    ]


def test_a_sweep_keeps_the_text_of_a_recent_sample(tmp_path: Path) -> None:
    now, rare = 100 * DAY, [record_of(90, time=99.5 * DAY, slice="rare")]
    recent = [record_of(number, time=99 * DAY + number) for number in range(20)]
    old, damaged = [record_of(50, time=80 * DAY)], b"damaged\n"
    log = write_log(tmp_path / "log", [*old, *recent[:10], damaged], [*recent[10:], *rare])
    salt = read_salt(log)
    assert sweep(log, 7, now, 4) == (1 + 16, 5)
    lines = [line for path in sorted(log.glob("log-*")) for line in path.read_bytes().splitlines(keepends=True)]
    assert lines.pop(11) == damaged
    with_text = {record.id for record in map(from_line, lines) if record.prompt_ids is not None}
    smallest = sorted(recent, key=lambda record: priority(salt, record.id))[:4]
    assert with_text == {record.id for record in (*smallest, *rare)}
    texts = {record.id: record for record in (*old, *recent, *rare)}
    for record in map(from_line, lines):
        text = {"prompt_ids": record.prompt_ids, "response_ids": record.response_ids}
        assert dataclasses.replace(texts[record.id], **text) == record, "nothing else has changed"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in log.iterdir())
    assert sweep(log, 7, now) == (0, 5)
    assert sweep(log, 7, now + 1, 0) == (5, 0)


@pytest.mark.parametrize("days", [400.0, -2.0])
def test_a_clock_that_jumped_erases_nothing_until_the_user_agrees(tmp_path: Path, days: float) -> None:
    now, records = 1000 * DAY, [record_of(number, time=(990 + number) * DAY) for number in range(10)]
    log = write_log(tmp_path, records)
    assert sweep(log, 30, now) == (0, 10)
    before = (log / "log-00001.jsonl").read_bytes()
    said = refused(sweep, log, 30, now + days * DAY)
    assert f"the clock says that {days:+,.1f} days have passed" in said
    assert f"delete {log}/swept" in said
    assert (log / "log-00001.jsonl").read_bytes() == before
    (log / "swept").unlink()
    assert sweep(log, 30, now + days * DAY)[0] == (10 if days > 0 else 0)


def test_without_text_any_clock_will_do(tmp_path: Path) -> None:
    log = write_log(tmp_path, [record_of(number).without_text() for number in range(3)])
    for day in (1000, 1400, 1000):
        assert sweep(log, 30, day * DAY) == (0, 0)


def test_of_a_forgotten_request_not_a_byte_is_left(tmp_path: Path) -> None:
    secret = record_of(7, id="client-77", prompt_ids=(31337, 31338), response_ids=(4242, 4243))
    log = write_log(
        tmp_path,
        [record_of(0), secret],
        [record_of(1), secret, b"damaged client-77\n", b'damaged "client-77"\n', record_of(2)],
    )
    (log / ".log-00002.jsonl.99.tmp").write_bytes(to_line(secret))  # left by a killed rewrite
    assert forgotten(log, "client-77", "unheard-of") == (4, 0, ["unheard-of"])
    everything = b"".join(path.read_bytes() for path in log.iterdir())
    for part in (b"client-77", b"31337", b"4242", secret.prompt_hash.encode(), b"unheard-of"):
        assert part not in everything
    assert ids(log) == ["request-0000", "request-0001", "request-0002"]
    with (log / "log-00002.jsonl").open("ab") as file:
        file.write(to_line(secret))  # it was in flight
    assert ids(log) == ["request-0000", "request-0001", "request-0002"]
    assert (log / "forgotten").read_text().count("\n") == 2
    assert stat.S_IMODE((log / "forgotten").stat().st_mode) == 0o600


def test_text_that_later_turns_repeat_is_forgotten_too(tmp_path: Path) -> None:
    turn = [
        record_of(n, id=f"turn{n}", conversation="a" * 64, prompt_ids=tuple(range(100, 103 + 9 * n))) for n in range(3)
    ]
    # Another template, or another id of the conversation: one repeats the conversation, the other the tokens.
    other = [
        record_of(3, id="of-it", conversation="a" * 64, prompt_ids=(9, 9, *range(100, 103))),
        record_of(4, id="repeats", conversation="b" * 64, prompt_ids=(*range(100, 103), 77)),
    ]
    kept = [
        record_of(5, id="near", conversation="c" * 64, prompt_ids=(100, 101, 1020)),
        record_of(6, prompt_ids=(100,)),
    ]
    log = write_log(tmp_path, [turn[1], *other], [turn[2], *kept, turn[0]])
    assert forgotten(log, "turn0") == (1, 4, [])
    everything = b"".join(path.read_bytes() for path in log.iterdir())
    assert [part in everything for part in (b"100,101,102,", b"100,101,102]")] == [False, False]
    found = {record.id: record for record in read_traffic(log).records}
    assert found == {one.id: one.without_text() for one in (*turn[1:], *other)} | {one.id: one for one in kept}
    with (log / "log-00002.jsonl").open("ab") as file:
        file.write(to_line(turn[0]) + to_line(turn[2]))  # they were in flight
    assert {record.id for record in read_traffic(log).records if record.prompt_ids} == {"near", "request-0006"}
    assert forgotten(log, "turn0") == (1, 1, [])
    assert forgotten(log, "turn0") == (0, 0, ["turn0"])
    assert forgotten(log, "request-0006") == (1, 0, []), "one id alone begins every text"


def test_a_log_is_rewritten_under_the_lock_of_its_appends(tmp_path: Path) -> None:
    log, done = write_log(tmp_path, [record_of(0), record_of(1)]), threading.Event()
    with (log / WRITE_LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: (forget(log, ["request-0001"]), done.set()))
        thread.start()
        assert not done.wait(0.2)
        with (log / "log-00001.jsonl").open("ab") as file:
            file.write(to_line(record_of(2)))
        fcntl.flock(lock, fcntl.LOCK_UN)
    thread.join(20)
    assert ids(log) == ["request-0000", "request-0002"]
