"""Gamma by load: ranges without gaps, 0 where plain decoding wins, and which engines take them under which key."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from engine_facts import GOOD, options, tensorrt_file

from distill.engines.protocol.facts import EngineFacts
from distill.engines.protocol.verdict import check, check_all
from distill.export.load_table import drafts_by, gamma_plan
from distill.run.verdict_record import DraftOf, Verdict
from speculative.measure.measured import DRAFT, TARGET, Measured

Row = tuple[int, int, float]


def verdict_of(rows: list[Row], plain_wins_from: int | None) -> Verdict:
    measured = [
        Measured(DRAFT, "sample", load, gamma=gamma, speed_up=faster, tokens_per_second=faster)
        for load, gamma, faster in rows
    ]
    run = {str(load): DRAFT if faster > 1.0 else TARGET for load, _, faster in rows}
    return Verdict(
        version="1",
        rule="sample",
        gamma=3,
        prompts=8,
        tokens=80,
        outcome="no_speed",
        headline="",
        drafts=[DraftOf(way=DRAFT)],
        measured=measured,
        run=run,
        plain_wins_from=plain_wins_from,
    )


@pytest.mark.parametrize(
    ("rows", "wins", "ranges"),
    [
        ([(1, 5, 1.6), (4, 3, 1.3), (16, 1, 0.9)], 12, [(1, 1, 5), (2, 11, 3), (12, 4096, 0)]),
        ([(1, 5, 1.6), (4, 3, 1.3), (16, 2, 1.1)], None, [(1, 1, 5), (2, 7, 3), (8, 4096, 2)]),
        ([(1, 5, 1.6), (4, 5, 1.3), (16, 2, 1.1)], 90, [(1, 7, 5), (8, 89, 2), (90, 4096, 0)]),
        ([(1, 1, 0.8), (4, 1, 0.7)], 1, [(1, 4096, 0)]),
        ([(1, 1, 0.9), (4, 2, 1.2)], None, [(1, 1, 0), (2, 4096, 2)]),
        ([(1, 2, 1.2), (8, 1, 0.9)], 1, [(1, 2, 2), (3, 4096, 0)]),
        ([(4, 3, 1.4), (16, 2, 1.2)], None, [(1, 7, 3), (8, 4096, 2)]),
        ([(1, 5, 1.6), (4, 6, 1.5), (16, 2, 1.1)], None, [(1, 7, 5), (8, 4096, 2)]),
    ],
)
def test_ranges_by_hand(rows: list[Row], wins: int | None, ranges: list[tuple[int, int, int]]) -> None:
    plan = gamma_plan(verdict_of(rows, wins))
    found = plan.by_load
    assert found == tuple(ranges)
    # The command's gamma is that of one request, or of the fewest at which drafting pays; the server uses no larger one.
    paying = [gamma for _, _, gamma in ranges if gamma]
    assert plan.gamma == (paying[0] if paying else rows[0][1])
    assert all(gamma <= plan.gamma for _, _, gamma in ranges)
    assert found[0][0] == 1
    assert all(later[0] == earlier[1] + 1 for earlier, later in itertools.pairwise(found))


def test_nothing_measured_under_load_has_no_table_and_no_note() -> None:
    assert gamma_plan(None).by_load == gamma_plan(verdict_of([], None)).by_load == ()
    one = gamma_plan(verdict_of([(1, 5, 2.0)], None))
    assert (one.by_load, one.gamma) == ((), 5), "one request at a time says nothing of a load"
    measured = verdict_of([(1, 5, 2.0), (4, 5, 1.5)], None)
    names = drafts_by(measured)
    assert gamma_plan(measured, names["autoregressive"]) == gamma_plan(measured)
    assert gamma_plan(measured).by_load == ((1, 4096, 5),)
    assert gamma_plan(measured, names["parallel"]) == gamma_plan(measured), "not timed, so the judged way's"
    assert not any("batch size" in note or "max_concurrency" in note for one in check_all(GOOD) for note in one.notes)


def test_ranges_in_words() -> None:
    assert (
        EngineFacts.load_words([(1, 1, 5), (2, 11, 3), (12, 4096, 0)])
        == "1: gamma 5; 2 to 11: gamma 3; from 12: plain decoding"
    )


LOADED = replace(GOOD, gamma=6, gamma_by_load=((1, 1, 6), (2, 11, 3), (12, 4096, 0)))


def schedule_of(facts: EngineFacts) -> list[list[int]]:
    given = json.loads(options(check("vLLM", facts).command)[1]["--speculative-config"])
    return given["num_speculative_tokens_per_batch_size"]


def test_a_row_of_gamma_0_is_written_as_1() -> None:
    (warning,) = check("vLLM", LOADED).warnings
    for word in ("from 12: plain decoding", "vllm#49548", "0.27.1", "2026-08-24", "drafts 1 token"):
        assert word in warning
    first = replace(GOOD, gamma=2, gamma_by_load=((1, 1, 0), (2, 4096, 2)))
    assert schedule_of(first) == [[1, 1, 1], [2, 4096, 2]]
    assert "1: plain decoding" in check("vLLM", first).warnings[0]


def test_the_others_say_that_they_do_not_and_where_to_stop(tmp_path: Path) -> None:
    assert any("gamma cannot follow" in note and "up to 11" in note for note in check("SGLang", LOADED).notes)
    assert any("gamma cannot follow" in note and "up to 11" in note for note in check("llama.cpp", LOADED).notes)
    assert tensorrt_file(LOADED, tmp_path)[1]["speculative_config"]["max_concurrency"] == 11


def test_a_draft_that_never_pays_under_load_is_not_scheduled(tmp_path: Path) -> None:
    never = replace(GOOD, gamma_by_load=((1, 4096, 0),))
    assert "per_batch_size" not in check("vLLM", never).command
    assert any("serve the target alone" in note for note in check("SGLang", never).notes)
    assert "max_concurrency" not in tensorrt_file(never, tmp_path)[1]["speculative_config"]


def test_vllm_gets_its_key() -> None:
    given = json.loads(options(check("vLLM", LOADED).command)[1]["--speculative-config"])
    assert given["num_speculative_tokens_per_batch_size"] == [[1, 1, 6], [2, 11, 3], [12, 4096, 1]], "no row of gamma 0"
    assert given["num_speculative_tokens"] == 6, "no range may draft more"
    assert given["method"] == "draft_model"


def test_a_schedule_without_0_has_no_warning() -> None:
    assert check("vLLM", replace(GOOD, gamma=6, gamma_by_load=((1, 7, 6), (8, 4096, 2)))).warnings == []
