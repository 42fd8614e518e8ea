"""`understudy readback` against a server that decodes with our own decoder, as it should and in every way that it should not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, running_engine
from readback_run import GAMMA, read
from tiny_models import perturbed
from typer.testing import CliRunner

from distill.cli import app
from distill.commands.drift.sources import read_answers
from distill.commands.readback import source
from distill.commands.readback.asking import Replies
from distill.commands.readback.comparison import pace, served_texts
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.engines.protocol.client import Answer
from distill.engines.protocol.engine import known_engines
from distill.report.page import write_page
from distill.report.sections.readback import readback_lines, readback_tables
from distill.run.heldout_set import HeldoutSet
from distill.run.readback_record import ReadbackRecord
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.text_fit import TextFit
from speculative.measure.engine_blocks import Decoded, ServedBlocks, after_prefill
from speculative.measure.measured import TARGET
from speculative.measure.replay import expected_blocks_of, shares_of, survival_sums
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

pytestmark = pytest.mark.usefixtures("_quick")


def starts(record: ReadbackRecord) -> list[str]:
    return [cause.split(":")[0] for cause in record.causes]


@pytest.mark.parametrize("rule", ["greedy-draft", "sample", "greedy"])
def test_an_engine_that_does_as_it_should_agrees(make: Callable[..., FakeEngine], run: Path, rule: Any) -> None:
    engine = make(rule="greedy-draft" if rule == "greedy" else rule)
    found = read(engine, run, rule="greedy" if rule == "greedy" else "auto")
    assert (found.agrees, found.causes, found.served.rule, found.greedy.same) == (True, [], rule, True)
    assert (found.engine, found.version, found.served.gamma, found.served.prompts) == ("vLLM", "0.32.0", GAMMA, 10)
    # The server's own sums: tokens behind the prefill's over calls. Greedy blocks are known exactly, with sampled and argmax drafts.
    assert found.served.tau == pytest.approx((found.served.tokens - 10) / (engine.text.made_blocks(rule == "greedy")))
    if rule == "sample":
        assert abs(found.z) < 4
    else:
        assert found.z == 0
        assert found.served.tau == pytest.approx(found.replay.tau, abs=1e-12)
        assert found.survival["served"] == pytest.approx(found.survival["replay"], abs=1e-12)
        assert found.served.accepted_per_drafted == pytest.approx(found.replay.accepted_per_drafted, abs=1e-12)
    if rule == "greedy":
        assert found.text_fit is None
    else:
        assert found.text_fit is not None
        assert found.text_fit.same
    assert ReadbackRecord.stored(run) == found


def test_sums_alone_tell_the_same_tau(make: Callable[..., FakeEngine], run: Path) -> None:
    one, two, three = (read(make(detail=detail), run) for detail in ("detailed", "summary", "none"))
    assert one.served.tau == two.served.tau == three.served.tau
    assert (one.source, two.source, three.source) == ("responses", "responses", "metrics")
    assert one.z == two.z == three.z == 0
    assert three.agrees
    low, high = three.served.tau_ci
    assert low < three.served.tau < high
    # What is drafted behind the end is in sums, and in the difference of two scrapes it is the same.
    assert two.survival["served"] == pytest.approx(three.survival["served"])
    assert two.served.accepted_per_drafted == pytest.approx(three.served.accepted_per_drafted)


def test_another_gamma_is_named(make: Callable[..., FakeEngine], run: Path) -> None:
    for detail in ("detailed", "none"):
        found = read(make(gamma=2, detail=detail), run)
        assert not found.agrees
        assert found.causes[0].startswith(
            "gamma: the server drafts 2 tokens per block, not 3; at gamma 2 replay agrees"
        )
        assert len(found.causes) == 1
    assert read(make(gamma=2), run, gamma=2).agrees


@pytest.fixture
def masked(draft: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The run's draft, with a token that stands for what is not known yet: it may draft either way."""
    both = copy.deepcopy(draft)
    both.config.pard_token = 1
    monkeypatch.setattr(HeldoutSet, "draft", lambda own, path: both)
    return both


@pytest.mark.parametrize("rule", ["greedy-draft", "sample"])
def test_a_draft_that_proposes_a_block_in_one_pass(
    make: Callable[..., FakeEngine], run: Path, masked: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way is read back by its own replay; the other one's counts are named."""
    served: dict[str, FakeEngine] = {
        way: make(draft=masked, rule=rule, drafting=way) for way in ("parallel", "autoregressive")
    }
    taus = []
    for way, other in (("parallel", "autoregressive"), ("autoregressive", "parallel")):
        monkeypatch.setattr(source, "drafting_to_serve", lambda *_, way=way: way)
        found = read(served[way], run)
        assert (found.agrees, found.served.rule, found.drafting) == (True, rule, way), found.causes
        if rule == "greedy-draft":
            assert found.z == 0
            assert found.survival["served"] == pytest.approx(found.survival["replay"], abs=1e-12)
        taus.append(found.served.tau)
        wrong = read(served[other], run, rule=rule)
        assert not wrong.agrees, "replay of the other way"
    assert taus[0] < taus[1], "a draft that never learnt it"


def test_another_draft_is_exposed(make: Callable[..., FakeEngine], run: Path, heldout: HeldoutSet, draft: Any) -> None:
    with heldout.target.loaded() as target:
        other = perturbed(target, 0.2, seed=3)
    for rule in ("greedy-draft", "sample"):
        found = read(make(draft=other, rule=rule), run)
        assert not found.agrees
        assert starts(found) == ["draft"]
        assert "DISAGREE with replay" in readback_lines(found)[0]


@pytest.mark.parametrize(("rule", "sampling"), [("greedy-draft", GREEDY), ("sample", None), ("greedy", None)])
def test_an_engine_that_skips_verification_does_not_agree(
    make: Callable[..., FakeEngine], draft: Any, run: Path, rule: Any, sampling: Any
) -> None:
    """It takes the draft for the target: everything is accepted, replay of its own text agrees, and the text tells."""
    engine = make(target=draft, rule="greedy-draft" if rule == "greedy" else rule, sampling=sampling)
    found = read(engine, run, rule=rule)
    assert found.served.accepted_per_drafted == 1.0
    assert {"greedy", "text"} & {*starts(found)}


def test_text_that_is_not_the_targets_is_caught_though_acceptance_is_as_replay_says(
    make: Callable[..., FakeEngine], run: Path
) -> None:
    found = read(make(noise=True), run)
    assert not found.agrees
    assert found.text_fit is not None
    assert not found.text_fit.same
    assert "text" in starts(found)
    assert found.greedy.same, "greedy text is right"


def test_a_token_that_neither_model_can_say_is_no_kept_draft() -> None:
    """An engine whose temperatures are uninitialised memory says them all the time."""
    fit = TextFit(0.0, -9.0, -1.0, 3, 1, [np.array([-1.0, -1.0, -np.inf])])
    answers = [Answer("", [5, 6, 7], "", False, 1.0, None, 3, {})]
    asked = Replies(DecodeSettings(), [HeldoutResponse("", "", [1], [5], [0.0])], answers)
    (text,) = served_texts(asked, fit) or []
    logs = np.array([-1.0, -np.inf])
    score = TokenScores(logs, np.array(text.log_target_probs), np.zeros(2, bool), np.zeros(2, int))
    assert score.accept_probs(Rule.named("sample")).tolist() == [1.0, 0.0]
    assert expected_blocks_of([score], Rule.named("sample"), (1,)).tolist() == [[1.0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_another_temperature_than_asked_for_is_named(
    make: Callable[..., FakeEngine], run: Path, temperature: float
) -> None:
    found = read(make(sampling=SamplingSettings(temperature)), run)
    assert not found.agrees
    assert "other settings" in next(line for line in found.causes if line.startswith("text"))


def test_greedy_text_that_differs_is_named(make: Callable[..., FakeEngine], run: Path) -> None:
    found = read(make(greedy_shift=7), run)
    assert (found.agrees, found.greedy.same) == (False, False)
    assert starts(found) == ["greedy"]
    assert "0 of 10 greedy texts" in found.causes[0]
    assert readback_lines(found)[0].startswith("The counts of vLLM 0.32.0 agree with replay")


def test_counters_that_are_reset_are_noticed(make: Callable[..., FakeEngine], run: Path) -> None:
    found = read(make(resets_at=18), run)
    assert "counters" in starts(found)
    assert not found.agrees
    with pytest.raises(UserError, match="the server was restarted"):
        read(make(resets_at=18, detail="none"), run)


def test_a_killed_server_is_one_line_and_what_was_answered_is_not_lost(
    make: Callable[..., FakeEngine], run: Path
) -> None:
    with running_engine(make(dies_after=16)) as url:
        done = CliRunner().invoke(app, ["readback", url, "--run", str(run), "--gamma", "3"])
    assert isinstance(done.exception, UserError)
    assert "no server answers" in str(done.exception)
    # One of each mode warms up and is not kept, and the 10 greedy ones have their own file.
    assert f"4 answers are kept in {run / 'readback.jsonl'}" in str(done.exception)
    assert sum(record.drafted for record in read_answers(run / "readback.jsonl").records) > 0
    engine = make()
    found = read(engine, run, resume=True)
    assert found.agrees
    assert engine.requests == 1 + 20 - 14  # The greedy answers are all there, so nothing warms the engine for them.


def test_a_server_without_a_draft_or_without_ids(
    make: Callable[..., FakeEngine], run: Path, heldout: HeldoutSet
) -> None:
    with pytest.raises(UserError, match="reports no draft counts"):
        read(make(draft=None), run)
    found = read(make(ids=False, tokenizer=heldout.target.tokenizer), run)
    assert found.text_fit is None
    assert found.replay == found.expected
    assert found.greedy.same
    assert abs(found.z) < 4


def test_answers_whose_ids_are_not_all_listed_are_left_out(make: Callable[..., FakeEngine], run: Path) -> None:
    """llama-server lists one token of a character that takes several."""
    found = read(make(unlisted=3), run)
    assert (found.agrees, found.z, found.greedy.same) == (True, 0, True)
    assert 0 < found.served.prompts < 10
    assert found.greedy.prompts == found.served.prompts
    left_out = f"{10 - found.served.prompts} answers are left out: the server does not list all their token ids"
    assert left_out in found.notes


def test_other_numerics_than_the_runs_are_replayed_if_they_are_named(
    make: Callable[..., FakeEngine],
    run: Path,
    heldout: HeldoutSet,
    draft: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with heldout.target.loaded() as whole:
        target, own, asked = perturbed(whole, 0.03, seed=5), copy.deepcopy(draft), []
    for part in (target, heldout.target.tokenizer):
        part.save_pretrained(tmp_path)
    monkeypatch.setattr(HeldoutSet, "draft", lambda _, path: asked.append(path) or own)
    engine = make(target=target, draft=own)
    assert not read(engine, run).greedy.same
    found = read(engine, run, target=str(tmp_path), draft="served.gguf")
    assert (found.agrees, found.greedy.equal, found.causes) == (True, 10, [])
    assert asked == [str(run), "served.gguf"]


def test_texts_may_differ_by_what_the_engines_arithmetic_does(
    make: Callable[..., FakeEngine], run: Path, heldout: HeldoutSet
) -> None:
    """Errors of the size of 8-bit inputs are reported with their size; larger ones stay a disagreement."""
    with heldout.target.loaded() as target:
        near, far = (perturbed(target, scale, seed=5) for scale in (0.001, 0.03))
    assert "greedy" in starts(read(make(target=near), run)), "in float32 they are no near-ties"
    found = read(make(target=near, weights="Q4_1"), run)
    assert (found.agrees, found.causes) == (True, [])
    assert (found.engine, found.weights, found.inputs) == ("llama.cpp", "Q4_1", "8 bits by 32")
    assert found.greedy.near_ties > 0
    assert 0 < found.greedy.gap < 3 * 2 * found.greedy.moved
    assert any("Q4_1 weights, inputs in 8 bits by 32" in line for line in readback_lines(found))
    assert not read(make(target=far, weights="Q4_1"), run).agrees
    assert not read(make(target=near, weights="F16"), run).agrees, "16 bits move logits less"
    assert read(make(weights="all F32"), run).inputs == ""
    inputs = known_engines()["llama.cpp"].dialect.inputs_of
    precisions = {"Q4_K - Medium": "8 bits by 256", "IQ4_NL - 4.5 bpw": "8 bits by 32", "BF16": "bfloat16", "": ""}
    assert {weights: inputs(weights) for weights in precisions} == precisions


def test_the_served_speed_up_is_of_the_same_engine_without_the_draft(
    make: Callable[..., FakeEngine], run: Path
) -> None:
    with running_engine(make()) as url, running_engine(make(draft=None)) as plain:
        found = readback_command(ReadbackOptions(url, run, plain=plain, gamma=GAMMA))
    own, alone = found.served, next(row for row in found.measured if row.way == TARGET)
    assert own.speed_up_ci[0] < own.speed_up < own.speed_up_ci[1]
    assert own.tokens_per_second == pytest.approx(own.speed_up * alone.tokens_per_second)
    assert sum(1 for _ in (run / "readback-plain.jsonl").open()) == 10
    assert {name for row in (own, alone) for name in row.first_token_ms} == {"p50", "p90", "p99"}


def test_speeds_are_pooled_over_prompts() -> None:
    """By hand: 10 + 30 tokens in 1 + 2 seconds against 10 + 20 in 2 + 4."""
    own, plain = (
        [Answer("", None, "", False, seconds, None, tokens, {}) for tokens, seconds in pairs]
        for pairs in (((10, 1.0), (30, 2.0)), ((10, 2.0), (20, 4.0)))
    )
    found = pace(own, plain, range(2))
    assert (found.tokens_per_second, found.latency, found.speed_up, found.plain) == (40 / 3, 1.5, (40 / 3) / 5, 5)
    assert pace(own, [], range(2)).speed_up is None


def test_waits_are_those_of_the_stream(make: Callable[..., FakeEngine], run: Path) -> None:
    """The server pauses after each of three events, two of which come behind the first token; the rows say what the file says."""
    found = read(make(pause=0.02), run, count=4)
    rows = [json.loads(line) for line in (run / "readback.jsonl").read_text().splitlines()]
    assert all(0.0 < row["first_seconds"] < row["seconds"] for row in rows)
    (choice,) = rows[0]["response"]["choices"]
    assert len(choice["token_ids"]) == rows[0]["response"]["usage"]["completion_tokens"]
    firsts = [1e3 * row["first_seconds"] for row in rows]
    assert found.served.first_token_ms["p50"] == pytest.approx(np.percentile(firsts, 50))
    own = [(row, row["response"]["usage"]["completion_tokens"]) for row in rows]
    per_token = [1e3 * (row["seconds"] - row["first_seconds"]) / (tokens - 1) for row, tokens in own if tokens > 1]
    assert found.served.per_token_ms["p90"] == pytest.approx(np.percentile(per_token, 90))
    titles = {table.title: table for table in readback_tables(found)}
    assert titles["p50 / p90 / p99"].texts()[0][:2] == ["draft", "1"]


@pytest.mark.usefixtures("without_pictures")
def test_the_command_for_ci_and_the_report(make: Callable[..., FakeEngine], run: Path, tmp_path: Path) -> None:
    with running_engine(make()) as url:
        arguments = [
            "readback",
            url.removesuffix("/v1"),
            "--run",
            str(run),
            "--gamma",
            "3",
            "--count",
            "6",
            "--concurrency",
            "2",
        ]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0
        tree = json.loads((run / "readback.json").read_text())
        assert (tree["format"], tree["engine"], tree["agrees"]) == (3, "vLLM", True)
        assert [(row["text"], row["prompts"], row["how"]["tau"]) for row in tree["measured"]] == [
            ("served", 6, "served"),
            ("served", 6, "replay"),
            ("held-out", 6, "replay"),
        ]
        page = write_page(run, tmp_path / "report.html").read_text()
        assert "The counts of vLLM 0.32.0 agree with replay" in page
        done = CliRunner().invoke(app, [*arguments[:-4], "--gamma", "2"])
        assert done.exit_code == 1
        assert "gamma" in done.output
        assert CliRunner().invoke(app, [*arguments[:-4], "--gamma", "0"]).exit_code == 2
    with pytest.raises(UserError, match="no server answers"):
        readback_command(ReadbackOptions("http://127.0.0.1:9/v1", run))


def test_blocks_are_counted_from_the_second_token_and_cut_at_the_end() -> None:
    """By hand: 6 tokens, the first is the prefill's; matches at tokens 1, 2, 4, 5 of the other five (0-based 0, 1, 3, 4)."""
    text = Decoded([1, 2], [10, 11, 12, 13, 14, 15], [0.0] * 6)
    rest = after_prefill(text)
    assert (rest.prompt_ids, rest.response_ids) == ([1, 2, 10], [11, 12, 13, 14, 15])
    matches = np.array([True, True, False, True, True])
    score = TokenScores(np.zeros(5), np.zeros(5), matches, np.zeros(5, dtype=np.int64))
    # Blocks of 3 drafted: [11 12 | 13], then [14 15 and one behind the end].
    assert expected_blocks_of([score], Rule.named("greedy"), (3,))[0, 0] == 2
    served = ServedBlocks(5, 2, (2, 3), (3, 3))
    assert served.inside() == [(0, 3, 2), (3, 2, 2)]
    assert served.whole
    # Places 1 and 2 are within the text in both blocks, place 3 in the first alone; 4 of 5 drafted tokens within it are kept.
    assert shares_of(*served.sums(3)) == ([1.0, 1.0, 0.0], 0.8)
    shares = [
        shares_of(*(own.sum(0) for own in survival_sums([score], Rule.named("greedy"), 3, spared=of))) for of in (0, 1)
    ]
    assert shares[0] == ([1.0, 1.0, 0.0], 0.8)
    # An engine that leaves room for the target's own token drafts 1 in the last block.
    assert shares[1] == ([1.0, 1.0, 0.0], 0.75)
