"""`understudy drift`: the baseline of a run by replay, and what the command says of answers."""

import io
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, Pair
from page_server import page_server
from prometheus_client import generate_latest
from rich.console import Console
from tiny_models import perturbed, prompts_of, tiny_model

from distill.commands.drift import baseline, drift
from distill.commands.drift.baseline import Baseline, baseline_of, drawn_prompts, gamma_of, slices_of
from distill.commands.drift.drift import Drift, drift_command
from distill.commands.drift.options import DriftOptions
from distill.commands.drift.sources import AcceptanceLog, AcceptanceRecord, read_answers
from distill.run.heldout_set import HeldoutSet, load_heldout_set
from distill.run.verdict_record import WAYS, load_verdict
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, Drafting
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import TokenScores, score_tokens
from speculative.rules.rule import Rule

GAMMA = 4
EASE = {"code": 0.85, "chat": 0.6}


def requests(rng: np.random.Generator, count: int, domain: str, ease: float | None = None) -> list[dict[str, Any]]:
    """Requests of a domain, blocks drawn one by one."""
    rows = []
    for _ in range(count):
        blocks = int(rng.integers(15, 40))
        own = rng.beta(30 * (ease or EASE[domain]), 30 * (1 - (ease or EASE[domain])))
        kept = int(np.minimum(rng.geometric(1 - own, blocks) - 1, GAMMA).sum())
        rows.append({"domain": domain, "drafted": GAMMA * blocks, "accepted": kept, "blocks": blocks})
    return rows


def write_log(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as answers that a readback kept."""
    names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_draft_tokens", "blocks": "num_spec_steps"}
    lines = list[str]()
    for row in rows:
        counts = {names[name]: row[name] for name in names}
        response = {"domain": row.get("domain", "stdlib"), "response": {"metrics": {"speculative_decoding": counts}}}
        lines.append(json.dumps(response) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with 80 held-out prompts of code, 80 of chat, 3 of a third domain."""
    rng = np.random.default_rng(0)
    rows = requests(rng, 80, "code") + requests(rng, 80, "chat") + requests(rng, 3, "rare", 0.8)
    prompts = [AcceptanceRecord(row["drafted"], row["accepted"], row["blocks"], row["domain"]) for row in rows]
    known = Baseline(GAMMA, Rule.named("sample"), prompts)
    monkeypatch.setattr(drift, "baseline_of", lambda *_: known)


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


def drifted(run: Path, log: Path, **options: Any) -> Drift:
    return drift_command(DriftOptions(run, log=log, **options), silent())


# What the command says.


def test_traffic_like_the_held_out_prompts_is_no_drift(judged: None, tmp_path: Path) -> None:
    """Also where its mix of labels is another."""
    rng = np.random.default_rng(1)
    console, out = silent(), tmp_path / "out" / "drift.json"
    log = write_log(tmp_path / "log.jsonl", requests(rng, 20, "code") + requests(rng, 100, "chat"))
    found = drift_command(DriftOptions(tmp_path, log=log, out=out), console)
    assert found.refresh is False
    low, high = found.ci
    assert found.sentence == (
        f"No drift: accepted/drafted is {found.now.accepted_per_drafted:.3f}, and "
        f"{found.judged.accepted_per_drafted:.3f} in the run at gamma 4, rule sample. "
        f"The change is {found.change:+.3f} [{low:+.3f}, {high:+.3f}] over 120 requests."
    )
    assert Drift.model_validate_json(out.read_text()) == found
    assert found.sentence in console.file.getvalue().replace("\n", " ")  # type: ignore[attr-defined]
    log.write_text(log.read_text().replace('"code"', '"new"').replace('"chat"', '"new"'))
    assert drifted(tmp_path, log).refresh is True, "all of them together accept more"


def test_a_fall_advises_a_refresh(judged: None, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(np.random.default_rng(2), 100, "code", 0.75))
    found = drifted(tmp_path, log)
    assert found.refresh is True
    assert found.sentence.startswith("Refresh the draft: accepted/drafted is 0.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give --metrics-url URL"),
        ({"log": Path("a"), "metrics_url": "b"}, "give --metrics-url URL"),
        ({"log": Path("a"), "rule": "best"}, "--rule best: choose one of sample"),
        ({"log": Path("nowhere.jsonl")}, r"--log nowhere\.jsonl: no such file"),
        ({"log": Path()}, "understudy traffic show"),
    ],
)
def test_options_out_of_range_are_one_line(tiny_run: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        drift_command(DriftOptions(tiny_run, **options), silent())


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any) -> None:
        raise AssertionError("work was begun")

    for name in ("read_answers", "baseline_of"):
        monkeypatch.setattr(drift, name, work)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "x.json", tmp_path):
        with pytest.raises(UserError, match=r"--out .*(cannot be written|not a regular file)"):
            drift_command(DriftOptions(tmp_path, log=tmp_path / "log.jsonl", out=place), silent())


# Slices and gamma.


def prompts_by_label(**counts: int) -> list[AcceptanceRecord]:
    return [
        AcceptanceRecord(40, 10 + number % 9, 10, name) for name, count in counts.items() for number in range(count)
    ]


def test_a_domain_is_compared_with_its_own_prompts_or_says_that_it_is_not() -> None:
    records = [AcceptanceRecord(4, 1, 1, name) for name in ("a", "few", None, "new", "a")]
    rows, members_SP, notes = slices_of(records, prompts_by_label(a=10, few=7))
    assert (rows, members_SP.sum(1).tolist()) == ([0, 1, 2, 3, 0], [10, 17, 17, 17])
    assert notes == [
        "few: 7 held-out prompts of that domain, so it is compared with all 17",
        "new: 0 held-out prompts of that domain, so it is compared with all 17",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ":1: Expecting property name"),
        ("7", ":1: "),
        ('{"accepted": 3, "drafted": 4}', ":1: 'response'"),
        (
            '{"domain": "a", "response": {"timings": {"draft_n": 3, "draft_n_accepted": 4}}}',
            "4 tokens accepted, but only 3",
        ),
        ('{"domain": "a", "response": {"choices": []}}', "no answer with drafted tokens"),
    ],
)
def test_answers_that_tell_nothing_are_one_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "log.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=words):
        read_answers(tmp_path / "log.jsonl")


def test_a_last_line_that_a_kill_cut_off_is_skipped(tmp_path: Path) -> None:
    whole = json.dumps({"domain": "a", "response": {"timings": {"draft_n": 4, "draft_n_accepted": 3}}}) + "\n"
    path = tmp_path / "log.jsonl"
    path.write_text(whole * 2 + whole[:40])
    log = read_answers(path)
    assert len(log.records) == 2
    assert log.warnings == ["line 3, the last, is only the start of an answer and is skipped"]
    path.write_text(whole[:40] + "\n" + whole)
    with pytest.raises(UserError, match="jsonl:1: "):
        read_answers(path)


def test_gamma_is_the_logs_where_it_tells() -> None:
    def log(*pairs: tuple[int, int | None]) -> AcceptanceLog:
        return AcceptanceLog([AcceptanceRecord(drafted, 1, blocks) for drafted, blocks in pairs])

    assert gamma_of(log((30, 10), (29, 10)), None) == (3, [])
    assert gamma_of(log((30, None)), 5) == (5, [])
    assert gamma_of(log((30, None)), None)[0] is None
    assert "--gamma" in gamma_of(log((30, None)), None)[1][0]
    gamma, notes = gamma_of(log((25, 10)), None)
    assert gamma in (2, 3)
    assert "2.50 tokens per block" in notes[0]
    assert "fixed gamma of 5" in gamma_of(log((30, 10)), 5)[1][0]


# The baseline by replay.


@pytest.mark.parametrize(
    ("rule", "drafting"),
    [(rule, "autoregressive") for rule in ("sample", "block", "greedy-draft")] + [("sample", "parallel")],
)
def test_drawing_blocks_along_a_text_gives_the_counts_of_decoding(rule: str, drafting: Drafting) -> None:
    """Blocks against their exact expectation on the same text; accepted/drafted against what the decoder counted."""
    target = tiny_model()
    draft = perturbed(target, 0.05)
    draft.config.pard_token = 0
    settings = DecodeSettings(gamma=3, rule=Rule.named(rule), max_tokens=24)
    responses, _ = decode(target, Draft(draft, drafting).drafter(), prompts_of([5] * 60), settings, batch_size=60)
    texts = [HeldoutResponse(r.key, "d", r.prompt_ids, r.response_ids, r.log_target_probs) for r in responses]
    scores = score_tokens(draft, texts, settings.sampling, offsets=3 if drafting == "parallel" else None)
    draws = [drawn_prompts(["d"] * 60, scores, Rule.named(rule), 3, seed) for seed in range(60)]
    assert [len(rows) for rows in draws] == [60] * 60
    blocks = np.array([[row.blocks for row in rows] for rows in draws])
    expected = expected_blocks_of(scores, Rule.named(rule), (3,))[:, 0]
    error = np.sqrt(blocks.var(0, ddof=1).sum() / len(draws))  # 0 under argmax rules: the text alone says
    assert abs(blocks.mean(0).sum() - expected.sum()) <= 4 * error + 1e-6
    assert all(row.drafted == 3 * row.blocks and 0 <= row.accepted <= row.drafted for rows in draws for row in rows)
    drawn = sum(row.accepted for rows in draws for row in rows) / sum(row.drafted for rows in draws for row in rows)
    counted = sum(r.accepted for r in responses) / sum(r.drafted for r in responses)
    # Given the text its blocks are still random: some 700 blocks of the decoder, a point and a half of standard error.
    assert drawn == pytest.approx(counted, abs=0.045)


def test_after_the_end_of_a_text_the_mean_acceptance_is_used() -> None:
    half, nothing = np.log([0.5]), np.zeros(1)
    score = TokenScores(half, nothing, nothing.astype(bool), nothing.astype(int))
    rows = drawn_prompts(["d"] * 2000, [score] * 2000, Rule.named("sample"), 3)
    assert {row.blocks for row in rows} == {1}
    # 1/2 + 1/4 + 1/8 of three; 0.02 is three standard errors of 2,000 blocks.
    assert sum(row.accepted for row in rows) / 6000 == pytest.approx(0.875 / 3, abs=0.02)


# On a run that was really trained.


def test_another_gamma_and_rule_are_drawn_from_the_runs_heldout_responses(tiny_run: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [{"accepted": int(rng.integers(0, 8)), "drafted": 20, "blocks": 10} for _ in range(12)]
    log = write_log(tmp_path / "log.jsonl", rows)
    found = drifted(tiny_run, log, rule="greedy-draft")
    assert (found.now.gamma, found.now.rule, found.judged.prompts) == (2, "greedy-draft", 10)
    assert found.drafting == "autoregressive"
    assert (found.now.how, found.judged.how) == ({"accepted_per_drafted": "served"}, {"accepted_per_drafted": "replay"})
    other = drifted(tiny_run, log, gamma=3)
    assert (other.judged.gamma, other.judged.rule) == (3, "sample")


def test_a_server_takes_the_first_token_from_the_prefill(tiny_run: Path) -> None:
    """Under an argmax rule the text alone says its blocks."""
    found = baseline_of(DriftOptions(tiny_run, rule="greedy-draft"), 2)
    heldout = load_heldout_set(tiny_run, "greedy-draft")
    texts = [
        HeldoutResponse(r.key, "d", [*r.prompt_ids, *r.response_ids[:1]], r.response_ids[1:], r.log_target_probs[1:])
        for r in heldout.responses
    ]
    scores = score_tokens(heldout.draft(str(tiny_run)), texts, heldout.sampling)
    assert [row.blocks for row in found.prompts] == expected_blocks_of(scores, Rule.named("greedy-draft"), (2,))[
        :, 0
    ].round().tolist()


# Counters of a running engine, scraped twice or more.


def engine_with(*pages: str) -> AbstractContextManager[str]:
    """A server whose /metrics is the next of these pages each time."""
    left = list(pages)
    return page_server(lambda path: left.pop(0) if path == "/metrics" and left else None)


def page(blocks: int, *places: int, gamma: int = 3) -> str:
    counts = {"drafts": blocks, "draft_tokens": gamma * blocks, "accepted_tokens": sum(places)}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}.0' for name, value in counts.items()]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    return "\n".join(
        lines + [f'{name}{{engine="0",position="{place}"}} {value}.0' for place, value in enumerate(places)]
    )


def scraped(run: Path, url: str, **options: Any) -> Drift:
    return drift_command(DriftOptions(run, metrics_url=url, **{"interval": 0.0, **options}), silent())


def test_differences_are_compared_with_the_run(tiny_run: Path) -> None:
    """What the run's own greedy blocks are is what the counters grow by: no drift."""
    prompts = baseline_of(DriftOptions(tiny_run, rule="greedy"), 3).prompts
    blocks, kept = sum(one.blocks for one in prompts), sum(one.accepted for one in prompts)
    with engine_with(page(1000, 500, 300, 100), page(1000 + blocks, 500 + kept, 300, 100)) as url:
        found = scraped(tiny_run, f"{url}/metrics", rule="greedy")
    assert (found.source, found.now.prompts) == (f"{url}/metrics", 1)
    assert (found.now.accepted_per_drafted, found.change) == (pytest.approx(kept / (3 * blocks)), pytest.approx(0.0))
    assert found.refresh is False


def test_the_baseline_is_of_the_way_of_drafting_that_is_served(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that proposes a block in one pass is less often right at later places: no drift, where that is what was chosen."""
    heldout = load_heldout_set(tiny_run, "greedy")
    with heldout.target.loaded() as target:
        draft = perturbed(target, 0.01)
    draft.config.pard_token = 1
    monkeypatch.setattr(HeldoutSet, "draft", lambda own, path: draft)
    prompts = [text.prompt_ids for text in heldout.responses]
    engine = FakeEngine(Pair(target, draft, 3, drafting="parallel", prompts=prompts))
    asked = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "stop_token_ids": [], "max_tokens": 20}
    pages = []
    for prompt in 4 * prompts:
        ids, *counts = engine.text(asked | {"prompt": prompt})
        engine.count(*counts, len(ids))
        pages.append(generate_latest(engine.counts.registry).decode())
    chosen = load_verdict(tiny_run).model_copy(update={"run": {"1": WAYS["parallel"]}})
    monkeypatch.setattr(baseline, "load_verdict", lambda run: chosen)
    with engine_with(*pages) as url:
        found = scraped(tiny_run, url, scrapes=len(pages), rule="greedy")
    assert (found.drafting, found.refresh) == ("parallel", False)


def test_a_fall_in_the_counters_advises_a_refresh(tiny_run: Path) -> None:
    pages = [page(2000 * number, 20 * number, 0, 0) for number in (1, 2, 3)]
    with engine_with(*pages, *pages) as url:
        result, unsaid = scraped(tiny_run, url, scrapes=3), scraped(tiny_run, url, scrapes=3, rule="sample")
    assert result.refresh is True
    assert result.now.prompts == 2
    hint = "add --rule greedy-draft"
    assert [any(hint in note for note in one.notes) for one in (result, unsaid)] == [True, False]


def test_a_restart_between_scrapes_is_noticed(tiny_run: Path) -> None:
    with (
        engine_with(page(100, 50, 30, 10), page(10, 5, 3, 1)) as url,
        pytest.raises(UserError, match="the server was restarted"),
    ):
        scraped(tiny_run, url, rule="sample")
    with engine_with(page(100, 50, 30, 10), page(10, 5, 3, 1), page(110, 55, 33, 11)) as url:
        result = scraped(tiny_run, url, scrapes=3, rule="sample")
    assert any("that interval is left out" in note for note in result.notes)
    assert result.now.prompts == 1


@pytest.mark.parametrize(
    ("pages", "options", "words"),
    [
        ((), {}, "no counters of drafts there"),
        (
            ("sglang:spec_verify_calls_total 5\nsglang:generation_tokens_total 20\nsglang:num_requests_total 2",),
            {},
            "give its --gamma",
        ),
        ((page(5, 4, 2, 1), page(5, 4, 2, 1)), {}, "nothing was drafted between the scrapes"),
        ((page(5, 40, 2, 1),), {}, "43 tokens accepted, but only 15 drafted"),
        ((), {"scrapes": 1}, "--scrapes 1"),
        ((), {"interval": float("nan")}, "--interval nan"),
    ],
)
def test_counters_that_say_nothing_are_one_line(
    tiny_run: Path, pages: tuple[str, ...], options: dict[str, Any], words: str
) -> None:
    with engine_with(*pages) as url, pytest.raises(UserError, match=words):
        scraped(tiny_run, url, **options)
