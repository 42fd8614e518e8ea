"""A record's checks, its line, and the directory's secret."""

import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from distill.live.traffic.record import (
    RecordError,
    TrafficRecord,
    from_line,
    keyed_hash,
    prepare_directory,
    read_salt,
    to_line,
)
from distill.live.traffic.writer import LogWriter
from speculative.errors import UserError

RECORD = TrafficRecord(
    "r1", 1.5, "all", "a", "v0001", "target", {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": None},
    "ab" * 32, 2, 5, (1, 2), (3, 4, 5, 6, 7), 3, 4, 2, (2, 1), (2, 2), 0.1, 0.5, "stop",
)  # fmt: skip


def forged(**changes: Any) -> bytes:
    """A changed line with a valid checksum."""
    values = {**json.loads(to_line(RECORD)), **changes}
    body = json.dumps({key: value for key, value in values.items() if key != "crc32"}).encode()[:-1]
    return body + b',"crc32":"%08x"}\n' % zlib.crc32(body)


def test_a_line_is_read_as_it_was_written() -> None:
    line = to_line(RECORD)
    assert from_line(line) == RECORD
    assert line.endswith(b',"crc32":"%08x"}\n' % zlib.crc32(line[: line.rindex(b',"crc32"')]))
    assert json.loads(line)["response_ids"] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"accepted": 5, "drafted": 4, "accepted_B": [], "drafted_B": []}, "accepted"),
        ({"accepted": -1}, "accepted"),
        ({"drafted": 4.0}, "drafted"),
        ({"drafted": 10**400}, "drafted"),
        ({"prompt_ids": [5, 2**31]}, "prompt_ids"),
        ({"time": 1e300}, "time"),
        ({"accepted_B": [2, 2]}, "accepted"),
        ({"accepted_B": [3, 0]}, "accepted"),
        ({"accepted_B": [3]}, "accepted"),
        ({"blocks": 3}, "blocks"),
        ({"blocks": 0, "accepted_B": [], "drafted_B": []}, "accepted"),
        ({"response_tokens": 4}, "response_ids"),
        ({"response_ids": [-3, 4, 5, 6, 7]}, "response_ids"),
        ({"time": float("inf")}, "time"),
        ({"total_s": float("nan")}, "total_s"),
        ({"first_token_s": -0.1}, "first_token_s"),
        ({"slice": 'a"} 1\nb'}, "slice"),
        ({"finish": "done"}, "finish"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"constrained": 1}, "constrained"),
        ({"authorization": "Bearer x"}, "authorization"),
    ],
)
def test_invalid_records_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordError, match=rf"^{field}[.:]"):
        from_line(forged(**changes))


def test_fewer_or_more_tokens_than_accepted_are_valid() -> None:
    # A gate emits fewer tokens than were accepted, and steps without drafts emit more.
    for tokens in (3, 30):
        assert from_line(forged(response_tokens=tokens, response_ids=None)).response_tokens == tokens


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_flipped_bit_is_seen(place: int, bit: int) -> None:
    line = bytearray(to_line(RECORD)[:-1])
    line[place % len(line)] ^= 1 << bit
    with pytest.raises(RecordError):
        from_line(bytes(line))


def test_the_directory_is_private_and_its_secret_stays(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    salt = prepare_directory(folder)
    assert prepare_directory(folder) == read_salt(folder) == salt
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "salt")] == [0o700, 0o600]
    assert keyed_hash(salt, "prompt", "x") != keyed_hash(salt, "priority", "x")
    (folder / "salt").write_text("ab\n")
    with pytest.raises(UserError, match="salt: damaged"):
        read_salt(folder)


@pytest.mark.parametrize("mode", [0o2775, 0o755, 0o700])
def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    folder.chmod(mode)
    LogWriter(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_directory_of_another_user_that_others_can_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, own = tmp_path / "theirs", os.geteuid()
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    for opened in (LogWriter, prepare_directory):
        said = refused(opened, folder)
        assert said == (
            f"{folder}: belongs to another user (uid {own}) and others can read it; give a --log of your own, for example {folder}/traffic"
        )
    assert (stat.S_IMODE(folder.stat().st_mode), list(folder.iterdir())) == (0o755, [])
    folder.chmod(0o700)
    LogWriter(folder).close()
    LogWriter(folder / "traffic").close()
    assert stat.S_IMODE((folder / "traffic").stat().st_mode) == 0o700
