"""`understudy drift`: the baseline of a run, live and drawn anew, and what the command says of logs and fresh prompts."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from result_example import bare, example_result, typed
from rich.console import Console
from tiny_models import perturbed, prompts_of, tiny_model
from tiny_training import write_prompts

from data.responses.acceptance_log import AcceptanceLog, AcceptanceRecord
from distill.commands.drift.baseline import (
    ALL,
    MOST_SLICES,
    OTHERS,
    Baseline,
    engine_notes,
    gamma_of,
    other_best,
    prompts_of_result,
    redrawn_prompts,
    slices_of,
)
from distill.commands.drift.drift import drift_command
from distill.commands.options import DriftOptions
from distill.run.result import LivePrompt, Result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.parallel import Drafting
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain import cusum
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.rule import Rule

GAMMA = 4
EASE = {"code": 0.85, "chat": 0.7}


def requests(rng: np.random.Generator, count: int, domain: str, ease: float | None = None) -> list[dict[str, Any]]:
    """Rows in the shape of result.json's live_prompts, blocks drawn one by one."""
    rows = []
    for number in range(count):
        blocks = int(rng.integers(15, 40))
        own = rng.beta(30 * (ease or EASE[domain]), 30 * (1 - (ease or EASE[domain])))
        kept = np.minimum(rng.geometric(1 - own, blocks) - 1, GAMMA)
        counts = {
            "tokens": int(kept.sum()) + blocks,
            "blocks": blocks,
            "drafted": GAMMA * blocks,
            "accepted": int(kept.sum()),
        }
        rows.append({"key": f"{domain}-{number}", "domain": domain, "prompt_tokens": 9, **counts})
    return rows


def write_run(folder: Path, rows: list[dict[str, Any]] | None, rule: str = "sample") -> Path:
    folder.mkdir()
    result = bare(example_result())
    result |= {"verdict": result["verdict"] | {"rule": rule, "gamma": GAMMA}, "live_prompts": rows}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def write_log(path: Path, rows: list[dict[str, Any]], *keys: str) -> Path:
    path.write_text("".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows), encoding="utf-8")
    return path


COUNTS = ("accepted", "drafted", "blocks")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 held-out prompts of code, 80 of chat, 3 of a third domain."""
    rng = np.random.default_rng(0)
    rows = requests(rng, 80, "code") + requests(rng, 80, "chat") + requests(rng, 3, "rare", 0.8)
    return write_run(tmp_path_factory.mktemp("drift") / "run", rows)


@pytest.fixture(autouse=True)
def _fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cusum, "FEWEST_STREAMS", 400)


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


def drifted(run: Path, log: Path, **options: Any) -> dict[str, Any]:
    return drift_command(DriftOptions(run, log=log, **options), silent())


# What the command says.


def test_traffic_like_the_held_out_prompts_is_no_drift(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [row for _ in range(60) for row in requests(rng, 1, "code") + requests(rng, 1, "chat")]
    console = silent()
    log = write_log(tmp_path / "log.jsonl", rows, *COUNTS)
    result = drift_command(DriftOptions(run, log=log, out=tmp_path / "out" / "drift.json"), console)
    assert result["refresh"] is False
    assert result["sentence"].startswith("No drift seen: accepted/drafted 0.")
    assert "a drop of 0.0" in result["sentence"]
    assert "false alarm rate 1 % over 120 requests" in result["sentence"]
    assert json.loads((tmp_path / "out" / "drift.json").read_text()) == result
    assert result["baseline"] == {
        "gamma": 4, "rule": "sample", "drafting": "autoregressive", "from": "live", "prompts": 163,
    }  # fmt: skip
    (facts,) = result["slices"]
    assert (facts["name"], facts["requests"], facts["alarms"], facts["behind"]) == ("all", 120, [], None)
    assert facts["accepted"] == sum(row["accepted"] for row in rows)
    assert facts["tau"] == pytest.approx(sum(row["tokens"] for row in rows) / sum(row["blocks"] for row in rows))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert result["sentence"].split(";")[0] in printed.replace("\n", " ")
    assert f"{facts['rate']:.3f}" in printed


def test_a_fall_is_found_where_it_began(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    before, after = requests(rng, 150, "code"), requests(rng, 100, "code", 0.75)
    rows = [row | {"time": f"day {number}"} for number, row in enumerate(before + after, start=1)]
    log = write_log(tmp_path / "log.jsonl", rows, *COUNTS, "domain", "time")
    result = drifted(run, log, plot=tmp_path / "drift.svg")
    assert result["refresh"] is True
    (facts,) = result["slices"]
    (alarm,) = facts["alarms"]
    assert 135 <= alarm["since"] <= 165 < alarm["at"] < 200
    assert alarm["until"] is None
    behind = facts["behind"]
    exact = sum(row["accepted"] for row in after) / sum(row["drafted"] for row in after)
    assert behind["ci"][0] < exact < behind["ci"][1]
    assert behind["change_ci"][1] < 0
    assert result["sentence"].startswith(
        f"Refresh the draft: code: accepted/drafted fell from {facts['baseline_rate']:.3f} to {behind['rate']:.3f} "
    )
    assert f"since request {alarm['since']} of 250 (day {alarm['since']})" in result["sentence"]
    assert (tmp_path / "drift.svg").read_text().startswith("<?xml")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_only_the_slice_that_fell_is_named(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = [row for _ in range(80) for row in requests(rng, 1, "code") + requests(rng, 1, "chat", 0.5)]
    result = drifted(run, write_log(tmp_path / "log.jsonl", rows, *COUNTS, "domain"), plot=tmp_path / "x.PNG")
    by_name = {facts["name"]: facts for facts in result["slices"]}
    assert [by_name["code"]["refresh"], by_name["chat"]["refresh"]] == [False, True]
    assert by_name["chat"]["level"] == pytest.approx(0.005)
    assert "chat: accepted/drafted fell" in result["sentence"]
    assert "code" not in result["sentence"]
    assert "in 2 slices" in result["sentence"]
    assert by_name["chat"]["alarms"][0]["since"] < 5  # low from the start: the settings come under suspicion first
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")


def test_low_from_the_first_request_points_at_the_settings(run: Path, tmp_path: Path) -> None:
    rows = [row | {"accepted": row["accepted"] // 2} for row in requests(np.random.default_rng(4), 60, "code")]
    result = drifted(run, write_log(tmp_path / "log.jsonl", rows, *COUNTS, "domain"))
    assert result["refresh"]
    assert (
        "from the first request on: see that the server's template, temperature, rule and gamma" in result["sentence"]
    )


def test_a_fall_that_passed_is_told_and_asks_for_nothing(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    rows = requests(rng, 60, "code") + requests(rng, 40, "code", 0.6) + requests(rng, 500, "code", 0.87)
    result = drifted(run, write_log(tmp_path / "log.jsonl", rows, *COUNTS, "domain"))
    (facts,) = result["slices"]
    assert [alarm["until"] is None for alarm in facts["alarms"]] == [False]
    assert result["refresh"] is False
    assert "it fell and came back" in result["sentence"]


def test_a_rise_is_seen_on_both_sides_only_and_needs_no_refresh(run: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(np.random.default_rng(6), 80, "chat", 0.88), *COUNTS, "domain")
    assert drifted(run, log)["slices"][0]["alarms"] == []
    result = drifted(run, log, two_sided=True, plot=tmp_path / "x.svg")
    assert [alarm["direction"] for alarm in result["slices"][0]["alarms"]] == ["up"]
    assert result["refresh"] is False
    assert result["sentence"].startswith("No refresh needed: chat: accepted/drafted rose from")


def test_an_engines_log_is_read_as_sums_and_its_rule_is_questioned(run: Path, tmp_path: Path) -> None:
    rng, lines = np.random.default_rng(7), []
    for _ in range(40):
        rows = requests(rng, 4, "code") + requests(rng, 4, "chat")
        accepted, drafted, blocks = (sum(row[key] for row in rows) for key in COUNTS)
        lines.append(
            f"INFO 11-20 10:00:00 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {1 + accepted / blocks:.2f}, "
            f"Accepted throughput: 1.00 tokens/s, Drafted throughput: 1.00 tokens/s, Accepted: {accepted} tokens, Drafted: "
            f"{drafted} tokens, Per-position acceptance rate: 0.8, 0.6, 0.5, 0.4, Avg Draft acceptance rate: 1.0%\n"
        )
    log = tmp_path / "vllm.log"
    log.write_text("".join(lines))
    result = drifted(run, log)
    assert result["refresh"] is False
    assert result["source"] == {"kind": "log", "path": str(log), "format": "vllm", "requests": 40}
    assert "over 40 log lines" in result["sentence"]
    assert any("--rule greedy-draft" in note for note in result["notes"])


def test_other_lengths_and_like_neighbours_are_noted(run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    ease = np.repeat(rng.uniform(0.75, 0.93, 10), 12)  # each of ten users asks twelve times
    rows = [requests(rng, 1, "code", value)[0] for value in ease]
    for row in rows:
        row.update({key: 4 * row[key] for key in COUNTS})
    result = drifted(run, write_log(tmp_path / "log.jsonl", rows, *COUNTS, "domain"), false_alarms=0.001, drop=0.2)
    assert any("resemble each other" in note for note in result["notes"])
    assert any("drafts" in note and "in the baseline" in note for note in result["notes"])


def test_the_same_seed_gives_the_same_answer(run: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(np.random.default_rng(9), 30, "code"), *COUNTS, "domain")
    assert drifted(run, log, seed=3) == drifted(run, log, seed=3)
    assert drifted(run, log, seed=3) != drifted(run, log, seed=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "one of --log FILE"),
        ({"log": Path("a"), "prompts": "b"}, "one of --log FILE"),
        ({"log": Path("a"), "chat": True}, "--chat is for --prompts"),
        ({"log": Path("a"), "prompt_column": "text"}, "--prompt-column is for --prompts"),
        ({"log": Path("a"), "false_alarms": 0.0}, "--false-alarms 0.0"),
        ({"log": Path("a"), "drop": 1.0}, "--drop 1.0"),
        ({"log": Path("a"), "gamma": 0}, "--gamma 0"),
        ({"log": Path("a"), "rule": "best"}, "--rule best: one of sample"),
        ({"log": Path("a"), "plot": Path("a.pdf")}, r"--plot a\.pdf: its name must end in \.svg or \.png"),
        ({"log": Path("nowhere.jsonl")}, r"--log nowhere\.jsonl: no such file"),
    ],
)
def test_options_out_of_range_are_one_line(run: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        drift_command(DriftOptions(run, **options), silent())


def test_runs_without_a_baseline_say_what_is_missing(run: Path, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(np.random.default_rng(0), 9, "code"), *COUNTS)
    with pytest.raises(UserError, match=r"no config\.yaml"):
        drifted(tmp_path, log)
    few = write_run(tmp_path / "few", requests(np.random.default_rng(0), 7, "code"))
    with pytest.raises(UserError, match=r"7 held-out prompts and 8 are the fewest.*judge\.prompts"):
        drifted(few, log)
    (few / "result.json").write_text("{")
    with pytest.raises(UserError, match=r"result\.json: cannot be read"):
        drifted(few, log)
    row = {"key": "k", "domain": "a", "drafted": 4, "accepted": 5, "blocks": 1}
    with pytest.raises(UserError, match=r"x/result\.json: live_prompts: more tokens accepted than drafted"):
        prompts_of_result([LivePrompt.model_validate(row)], "x/result.json")
    del row["blocks"]
    without = write_run(tmp_path / "without", [row])
    with pytest.raises(UserError, match=r"result\.json: key live_prompts\[0\]\.blocks is missing"):
        drifted(without, log)


@pytest.mark.parametrize("option", ["out", "plot"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("work was begun")

    for name in ("read_acceptance_log", "load_frozen_text", "_baseline", "_decoded"):
        monkeypatch.setattr(f"distill.commands.drift.drift.{name}", work)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.svg").mkdir()
    for place in (tmp_path / "file" / "x.svg", tmp_path / "folder.svg"):
        with pytest.raises(UserError, match=rf"--{option} .*(cannot be written|not an ordinary file)"):
            drift_command(DriftOptions(run, prompts="fresh.jsonl", **{option: place}), silent())


def test_a_result_of_another_checkpoint_than_the_best_is_noted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])

    def judged(*steps: int | None) -> Result:
        tree = bare(example_result())
        return typed(tree | {"contestants": [tree["contestants"][-1] | {"step": step} for step in steps]})

    assert other_best(run, judged(100), "x") == [], "no link says which is best"
    folder = run / "checkpoints" / "step-000300"
    folder.mkdir(parents=True)
    (run / "best").symlink_to(Path("checkpoints") / folder.name)
    assert other_best(run, judged(0, 300), "x") == []
    assert other_best(run, judged(None), "x") == []
    (note,) = other_best(run, judged(300, 100), "run/result.json")
    assert "run/result.json is of step 100 and the best draft is step-000300 by now" in note


# Slices and gamma.


def baseline_of(**counts: int) -> Baseline:
    prompts = [
        LivePrompt(key="", domain=name, drafted=40, accepted=10 + number % 9, blocks=10)
        for name, count in counts.items()
        for number in range(count)
    ]
    return Baseline(GAMMA, "sample", "live", prompts)


def test_a_label_is_compared_with_its_own_prompts_or_says_that_it_is_not() -> None:
    records = [AcceptanceRecord(order, 4, 1, 1, name) for order, name in enumerate(["a", "few", None, "new", "a"])]
    slices, notes = slices_of(records, baseline_of(a=10, few=7))
    assert [(part.name, part.of, len(part.records), len(part.prompts)) for part in slices] == [
        ("a", "a", 2, 10), ("few", ALL, 1, 17), (ALL, ALL, 1, 17), ("new", ALL, 1, 17)
    ]  # fmt: skip
    assert notes == [
        "few: only 7 held-out prompts of that label, so it is compared with all 17 together",
        "new: no held-out prompts of that label, so it is compared with all 17 together",
    ]
    assert slices[1].pool is slices[3].pool


def test_rare_labels_go_together_where_there_are_too_many() -> None:
    names = [f"n{number}" for number in range(MOST_SLICES + 5) for _ in range(2 if number < MOST_SLICES - 1 else 1)]
    slices, notes = slices_of(
        [AcceptanceRecord(order, 4, 1, 1, name) for order, name in enumerate(names)], baseline_of(a=10)
    )
    assert len(slices) == MOST_SLICES
    assert (slices[-1].name, len(slices[-1].records)) == (OTHERS, 6)
    assert notes[0] == "6 rare labels are taken together as `others`"


def test_gamma_is_the_logs_where_it_tells() -> None:
    def log(*pairs: tuple[int, int | None], format: str = "jsonl") -> AcceptanceLog:
        return AcceptanceLog([AcceptanceRecord(0, drafted, 1, blocks) for drafted, blocks in pairs], format, False)

    assert gamma_of(log((30, 10), (29, 10)), None) == (3, [])
    assert gamma_of(log((30, None)), 5) == (5, [])
    assert gamma_of(log((30, None)), None)[0] is None
    assert "--gamma" in gamma_of(log((30, None)), None)[1][0]
    gamma, notes = gamma_of(log((25, 10)), None)
    assert gamma in (2, 3)
    assert "2.50 tokens a block" in notes[0]
    assert "fixed gamma of 5" in gamma_of(log((30, 10)), 5)[1][0]
    assert engine_notes(log((4, 1)), baseline_of(a=1)) == []
    assert engine_notes(log((4, 1), format="llama.cpp"), baseline_of(a=1)) != []
    assert engine_notes(log((4, 1), format="vllm"), Baseline(4, "greedy-draft", "live", [])) == []


# The baseline drawn anew.


@pytest.mark.parametrize(
    ("rule", "drafting"),
    [
        ("sample", "autoregressive"),
        ("block", "autoregressive"),
        ("greedy-draft", "autoregressive"),
        ("sample", "parallel"),
    ],
)
def test_drawing_blocks_along_a_text_gives_the_counts_of_decoding(rule: Rule, drafting: Drafting) -> None:
    """Blocks against their exact expectation on the same text; accepted/drafted against what the decoder counted."""
    target = tiny_model()
    draft = perturbed(target, 0.05)
    draft.config.pard_token = 0
    settings = DecodeSettings(gamma=3, rule=rule, max_tokens=24)
    responses, _ = decode(target, Draft(draft, drafting).drafter(), prompts_of([5] * 60), settings, batch_size=60)
    texts = [HeldoutResponse(r.key, "d", r.prompt_ids, r.response_ids, r.log_target_probs) for r in responses]
    scores = score_tokens(draft, texts, settings.sampling, offsets=3 if drafting == "parallel" else None)
    draws = [redrawn_prompts(texts, scores, rule, 3, seed) for seed in range(60)]
    assert [len(rows) for rows in draws] == [60] * 60
    blocks = np.array([[row.blocks for row in rows] for rows in draws])
    expected = expected_blocks_of(scores, rule, (3,))[:, 0]
    error = np.sqrt(blocks.var(0, ddof=1).sum() / len(draws))  # 0 under argmax rules: the text alone says
    assert abs(blocks.mean(0).sum() - expected.sum()) <= 4 * error + 1e-6
    assert all(row.drafted == 3 * row.blocks and 0 <= row.accepted <= row.drafted for rows in draws for row in rows)
    drawn = sum(row.accepted for rows in draws for row in rows) / sum(row.drafted for rows in draws for row in rows)
    counted = sum(r.accepted for r in responses) / sum(r.drafted for r in responses)
    # Given the text its blocks are still random: some 700 blocks of the decoder, a point and a half of standard error.
    assert drawn == pytest.approx(counted, abs=0.045)


def test_behind_the_end_of_a_text_the_mean_acceptance_stands_in() -> None:
    half, nothing = np.log([0.5]), np.zeros(1)
    score = TokenScores(half, nothing, nothing.astype(bool), nothing.astype(int), nothing)
    texts = [HeldoutResponse(str(number), "d", [1], [2], [0.0]) for number in range(2000)]
    rows = redrawn_prompts(texts, [score] * len(texts), "sample", 3)
    assert {row.blocks for row in rows} == {1}
    # 1/2 + 1/4 + 1/8 of three; 0.02 is three standard errors of 2,000 blocks.
    assert sum(row.accepted for row in rows) / 6000 == pytest.approx(0.875 / 3, abs=0.02)


def test_a_draft_equal_to_its_target_accepts_all_drawn_blocks() -> None:
    target = tiny_model()
    settings = DecodeSettings(gamma=3, max_tokens=10)
    responses, _ = decode(target, ModelDrafter(target), prompts_of([5] * 3), settings)
    texts = [HeldoutResponse(r.key, "d", r.prompt_ids, r.response_ids, r.log_target_probs) for r in responses]
    rows = redrawn_prompts(texts, score_tokens(target, texts, settings.sampling), "sample", 3)
    assert [(row.blocks, row.accepted) for row in rows] == [(3, 9)] * 3


# On a run that was really trained.


def test_another_gamma_and_rule_are_drawn_from_the_runs_frozen_text(tiny_run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [{"accepted": int(rng.integers(0, 8)), "drafted": 20, "blocks": 10} for _ in range(12)]
    log = write_log(tmp_path / "log.jsonl", rows, *COUNTS)
    result = drifted(tiny_run, log, rule="greedy-draft")
    assert result["baseline"] == {
        "gamma": 2, "rule": "greedy-draft", "drafting": "autoregressive", "from": "replay", "prompts": 10,
    }  # fmt: skip
    assert "drawn by replay along the run's frozen text" in result["notes"][0]
    assert drifted(tiny_run, log, gamma=3)["baseline"]["rule"] == "sample"


def test_a_stale_result_gives_way_to_replay_of_the_best_draft(tiny_run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(tiny_run, copied, symlinks=True)
    rows = [{"accepted": 8, "drafted": 30, "blocks": 10}] * 12
    log = write_log(tmp_path / "log.jsonl", rows, *COUNTS)
    fresh = drifted(copied, log)
    assert fresh["baseline"]["from"] == "live"
    assert not any("by now" in note for note in fresh["notes"])
    path = copied / "result.json"
    stored = json.loads(path.read_text())
    best = stored["contestants"][-1]["step"]
    stored["contestants"][-1]["step"] = best + 1
    path.write_text(json.dumps(stored))
    stale = drifted(copied, log)
    assert stale["baseline"] == fresh["baseline"] | {"from": "replay"}
    assert any(f"is of step {best + 1} and the best draft is step-{best:06d}" in note for note in stale["notes"])


def test_fresh_prompts_are_decoded_and_compared(tiny_run: Path, tmp_path: Path) -> None:
    plain = write_prompts(tmp_path / "fresh.jsonl", 12)
    result = drift_command(DriftOptions(tiny_run, prompts=str(plain)), silent())
    assert result["source"] == {"kind": "prompts", "path": str(plain), "format": "prompts", "requests": 12}
    (facts,) = result["slices"]
    assert facts["name"] == "all"
    assert facts["drafted"] > 100
    assert facts["tau"] is not None
    assert any("no column `domain`" in note for note in result["notes"])
    labelled = tmp_path / "labelled.jsonl"
    rows = [json.loads(line) for line in plain.read_text().splitlines()]
    labelled.write_text("".join(json.dumps(row | {"domain": row["kind"]}) + "\n" for row in rows))
    parts = drift_command(DriftOptions(tiny_run, prompts=str(labelled)), silent())["slices"]
    assert sorted(part["name"] for part in parts) == ["even", "odd"]
    assert sum(part["accepted"] for part in parts) == facts["accepted"]  # labels change nothing else
    with pytest.raises(UserError, match="no such file"):
        drift_command(DriftOptions(tiny_run, prompts=str(tmp_path / "no.jsonl")), silent())
    with pytest.raises(UserError, match="chat"):
        drift_command(DriftOptions(tiny_run, prompts=str(plain), chat=True), silent())


def test_a_run_whose_best_drafts_in_parallel_is_compared_so(tiny_run: Path, tmp_path: Path) -> None:
    copied, fresh = tmp_path / "run", write_prompts(tmp_path / "fresh.jsonl", 12)
    shutil.copytree(tiny_run, copied, symlinks=True)
    stored = json.loads((copied / "result.json").read_text())
    stored["verdict"]["drafting"] = "parallel"
    (copied / "result.json").write_text(json.dumps(stored))
    own = copied / "best" / "student" / "config.json"
    own.write_text(json.dumps(json.loads(own.read_text()) | {"pard_token": 0}))

    def rates(run: Path) -> tuple[float, float]:
        (facts,) = drift_command(DriftOptions(run, prompts=str(fresh), gamma=7), silent())["slices"]
        return facts["baseline_rate"], facts["rate"]

    by_token, by_block = rates(tiny_run), rates(copied)
    # What it never learnt is hardly accepted, by replay and live.
    assert all(0 < block < 0.8 * token for block, token in zip(by_block, by_token, strict=True))


def test_fresh_conversations_are_read_by_the_template_though_the_run_is_plain(
    tiny_run: Path, tiny_target: Path, chat_target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run, symlinks=True)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_target), str(chat_target)))
    texts = [f"def part_{number}(a, b):" for number in range(10)]
    chats, plain = tmp_path / "chats.jsonl", tmp_path / "plain.jsonl"
    chats.write_text("".join(json.dumps({"talk": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    plain.write_text("".join(json.dumps({"prompt": f"user: {text};assistant:"}) + "\n" for text in texts))
    talked = drift_command(DriftOptions(run, prompts=str(chats), messages_column="talk"), silent())
    written = drift_command(DriftOptions(run, prompts=str(plain)), silent())
    assert talked["source"]["requests"] == 10
    for result in (talked, written):
        assert any("no column `domain`" in note for note in result["notes"])
    assert talked["slices"][0]["drafted"] > 50
