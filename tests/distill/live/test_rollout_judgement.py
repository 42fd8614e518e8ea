"""Decisions of a rollout: each reason on constructed numbers, all of them by simulation; and following a growing log."""

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_arms import Traffic, gateway_directory, served_of, steady
from simulation import trials
from traffic_log import record_of

from distill.live.anytime import Sums, sums_of
from distill.live.arms import ARMS, read_arms
from distill.live.rollout.judgement import Criteria, GateGain, Served, Tally, compare, watch
from distill.live.traffic.reader import LogTail, end_of
from distill.live.traffic.record import TrafficRecord, to_line
from speculative.errors import UserError

CRITERIA = Criteria(share=0.2, margin=0.0, slower=0.05, requests=10_000, watch=300)


def engine(
    rng: np.random.Generator, count: int, rate: float, seconds: float = 0.02, errors: int = 0, gamma: float = 4.0
) -> Served:
    """Requests with rates close to `rate`, so that a few are enough."""
    drafted = rng.integers(40, 120, count)
    accepted = np.round(drafted * np.clip(rng.normal(rate, 0.1, count), 0, 1))
    latency = sums_of(np.log(seconds) + rng.normal(0, 0.2, count))
    return Served(count + errors, count + errors, errors, gamma, sums_of(accepted, drafted), latency)


@pytest.mark.parametrize(
    ("new", "criteria", "action", "says"),
    [
        ({"rate": 0.7}, {}, "on", "certainly more is accepted: accepted / drafted 0.694 of 150"),
        ({"rate": 0.5}, {}, "back", "certainly less is accepted"),
        ({"rate": 0.6}, {}, "wait", "difference"),
        ({"rate": 0.6}, {"margin": 0.05}, "on", "certainly the loss is less than 0.05"),
        ({"rate": 0.6}, {"requests": 600}, "back", "undecided after 750 requests"),
        ({"rate": 0.7, "seconds": 0.025}, {}, "back", "certainly slower: 1.2"),
        ({"rate": 0.7, "seconds": 0.025}, {"slower": 0.5}, "on", "more"),
        (
            {"rate": 0.7, "errors": 10},
            {},
            "back",
            "more errors: 10 of 160 conversations, against 0 of 600 with the old engine",
        ),
        ({"rate": 0.7, "errors": 2}, {}, "on", "more"),
        (
            {"rate": 0.7},
            {"gate": GateGain(4, 1.0, 1.2)},
            "back",
            "the gain in accepted / drafted is below the gate's interval [+0.250, +0.300]",
        ),
        ({"rate": 0.7}, {"gate": GateGain(4, 0.2, 1.2)}, "on", "more"),
        ({"rate": 0.7, "gamma": 2.0}, {"gate": GateGain(4, 1.0, 1.2)}, "on", "more"),
    ],
)
def test_decisions_while_comparing(new: dict[str, Any], criteria: dict[str, Any], action: str, says: str) -> None:
    rng = np.random.default_rng(0)
    old, found = engine(rng, 600, 0.6), engine(rng, 150, **new)
    decision = compare(found, old, replace(CRITERIA, **criteria))
    assert decision.action == action
    assert says in decision.reason


@pytest.mark.parametrize(
    ("new", "criteria", "action", "says"),
    [
        ({"rate": 0.6}, {}, "on", "difference"),
        ({"rate": 0.6}, {"watch": 1000}, "wait", "difference"),
        ({"rate": 0.5}, {}, "back", "certainly less is accepted than before"),
        ({"rate": 0.62}, {"gate": GateGain(4, 0.4, 0.8)}, "back", "below the gate's interval"),
        ({"rate": 0.6, "seconds": 0.03}, {}, "on", "difference"),
        ({"rate": 0.6, "seconds": 0.06}, {}, "back", "certainly slower: 2.97"),
        ({"rate": 0.6, "errors": 20}, {}, "back", "more errors: 20 of 320"),
        ({"rate": 0.6, "errors": 1}, {}, "on", "difference"),
    ],
)
def test_decisions_while_watching(new: dict[str, Any], criteria: dict[str, Any], action: str, says: str) -> None:
    rng = np.random.default_rng(1)
    decision = watch(engine(rng, 300, **new), engine(rng, 900, 0.6), replace(CRITERIA, **criteria))
    assert decision.action == action
    assert says in decision.reason


@pytest.mark.parametrize(("judge", "silent"), [(compare, "new"), (compare, "old"), (watch, "new")])
def test_an_engine_that_tells_of_no_drafts_is_no_draft(judge: Any, silent: str) -> None:
    told = engine(np.random.default_rng(0), 60, 0.6)
    untold = Served(requests=60, conversations=60, latency=sums_of(np.full(60, -4.0)))
    decision = judge(*((untold, told) if silent == "new" else (told, untold)), CRITERIA)
    assert decision.action == "back"
    assert f"the {silent} engine reports no drafted tokens in 60 requests" in decision.reason


def test_silence_is_an_error_and_a_client_that_left_is_none() -> None:
    record = TrafficRecord("a", 1.0, "all", "new", "v2", "t", None, "0" * 64, finish="cancelled", total_s=300.0)
    left = served_of(replace(record, id=str(number)) for number in range(600))
    assert (left.left, left.requests, left.conversations, left.errors) == (600, 0, 0, 0)
    old = engine(np.random.default_rng(0), 600, 0.6)
    silent = served_of(replace(record, id=str(number), finish="error") for number in range(60))
    for judge in (compare, watch):
        waits = judge(left, old, CRITERIA)
        assert (waits.action, "clients cancelled 600 more before the first byte" in waits.reason) == ("wait", True)
        decision = judge(silent, old, CRITERIA)
        assert (decision.action, "more errors: 60 of 60" in decision.reason) == ("back", True)
    assert served_of([replace(record, first_token_s=0.1)]).requests == 1


@pytest.mark.parametrize("judge", [compare, watch])
def test_without_requests_a_rollout_waits(judge: Any) -> None:
    decision = judge(Served(), Served(), CRITERIA)
    assert decision.action == "wait"
    assert decision.interval == (-1.0, 1.0)


def test_tally_counts_requests_and_conversations() -> None:
    record = TrafficRecord(
        "a",
        1.0,
        "all",
        "new",
        "v2",
        "t",
        None,
        "0" * 64,
        response_tokens=10,
        accepted=6,
        drafted=12,
        blocks=4,
        total_s=0.5,
        finish="stop",
    )
    constrained = replace(record, constrained=True)
    cut = replace(record, accepted=0, drafted=4, blocks=1, finish="cancelled", first_token_s=0.1, response_tokens=1)
    failed = replace(record, accepted=None, drafted=None, blocks=None, response_tokens=None, finish="error")
    turns = [
        replace(one, id=str(number), conversation="c") for number, one in enumerate((record, constrained, cut, failed))
    ]
    found = served_of([*turns, turns[0]])
    assert (found.requests, found.conversations, found.errors, found.gamma) == (4, 1, 1, 16 / 5), "each id once"
    assert found.acceptance == Sums(1, 6.0, 16.0, 36.0, 96.0, 256.0)
    assert (found.latency.requests, found.latency.denominator) == (1, 2.0)
    assert found.latency.numerator == pytest.approx(2 * math.log(0.05))
    turns = [
        replace(one, id=str(id(one)), conversation=talk) for one, talk in ((record, "d"), (cut, "c"), (failed, "c"))
    ]
    found = served_of(turns)
    assert (found.requests, found.conversations, found.errors) == (3, 2, 1)
    assert found.acceptance == Sums(2, 6.0, 16.0, 36.0, 72.0, 160.0)


@pytest.mark.simulation
def test_a_draft_as_good_as_the_old_one_is_seldom_taken_back_or_on() -> None:
    """Both phases, checked every 25 requests, without a limit on requests."""
    rng, streams, ends = np.random.default_rng(5), trials(60, 1000), {"on": 0, "back": 0, "wait": 0}
    for _ in range(streams):
        accepted, drafted = rng.beta(7, 4, 800), rng.integers(8, 160, 800)
        mine, failed = rng.random(800) < CRITERIA.share, rng.random(800) < 0.02
        seconds = rng.normal(0, 0.5, 800)
        action = "wait"
        for seen in range(100, 801, 25):
            parts = []
            for arm in (mine, ~mine):
                here = arm[:seen] & ~failed[:seen]
                kept = np.round(accepted[:seen] * drafted[:seen])[here]
                parts.append(
                    Served(
                        int(arm[:seen].sum()),
                        int(arm[:seen].sum()),
                        int((arm & failed)[:seen].sum()),
                        4.0,
                        sums_of(kept, drafted[:seen][here]),
                        sums_of(seconds[:seen][here]),
                    )
                )
            action = compare(parts[0], parts[1], CRITERIA).action
            if action != "wait":
                break
        ends[action] += 1
    slack = 3 * math.sqrt(0.05 / streams)
    assert ends["back"] / streams <= 0.05 + slack
    assert ends["on"] / streams <= 0.0125 + slack


def test_the_tail_reads_on_from_a_place_and_only_whole_lines(tmp_path: Path) -> None:
    with gateway_directory(tmp_path / "traffic") as log:
        traffic = Traffic(log, {"v0001": steady(0.7)})
        records = [traffic.record(read_arms(log / ARMS)) for _ in range(5)]
        lines, path = [to_line(record) for record in records], log / "log-00001.jsonl"
        assert list(LogTail(log, end_of(log)).read()) == []
        path.write_bytes(lines[0] + lines[1][:40])
        tail = LogTail(log, end_of(log))
        path.write_bytes(lines[0] + lines[1] + lines[2][:40])
        assert list(tail.read()) == [records[1]], "the first came before, the last is being written"
        path.write_bytes(lines[0] + lines[1] + lines[2])
        (log / "log-00002.jsonl").write_bytes(lines[3])
        assert list(tail.read()) == records[2:4]
        with (log / "log-00002.jsonl").open("ab") as file:
            file.write(lines[4])
        assert list(tail.read()) == records[4:]
        assert list(LogTail(log, end_of(log)).read()) == []
        # as retention and forget do
        (log / "new").write_bytes(lines[0] + lines[2])
        (log / "new").replace(path)
        assert list(tail.read()) == [records[2]]
        assert served_of([*records, records[2]]) == served_of(records), "each counts once"
        # Again; the new file reuses the inode and is longer.
        path.write_bytes(lines[0] + lines[1] + lines[2])
        assert list(tail.read()) == records[1:3]
        with path.open("ab") as file:
            file.write(lines[4].replace(b'"accepted":', b'"accepted":9'))
        with pytest.raises(UserError, match=r"log-00001\.jsonl:4: crc32"):
            list(tail.read())


def test_files_of_the_past_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "log-00001.jsonl").write_text("not a record\n")
    (tmp_path / "log-00002.jsonl").touch()
    assert list(LogTail(tmp_path, end_of(tmp_path)).read()) == []


def test_long_texts_pass_through_a_rollout_and_stay_nowhere(tmp_path: Path) -> None:
    record = record_of(
        1, prompt_ids=tuple(range(40_000, 60_000)), response_ids=tuple(range(9_000, 10_000)), drafted=900, blocks=None
    )
    with (tmp_path / "log-00001.jsonl").open("wb") as file:
        file.writelines(to_line(replace(record, id=f"r{number}")) for number in range(60))
    tracemalloc.start()
    try:
        tail, tally = LogTail(tmp_path), Tally()
        for found in tail.read():
            tally.add(found)
        del found
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tally.served().requests == 60
    assert held < 1e5
    assert peak < 5e6, "a line at a time"
