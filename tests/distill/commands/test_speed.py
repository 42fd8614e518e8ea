"""`understudy readback --speed`, and every view of engine_costs.json: one number, computed in speculative/measure/engine_costs.py."""

from __future__ import annotations

import html
import itertools
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, running_engine
from readback_run import GAMMA
from refusals import refused
from rich.console import Console

from distill.commands.probe.options import ProbeOptions
from distill.commands.probe.plan import read_plan
from distill.commands.probe.screen import assumptions
from distill.commands.readback.asking import AnswerFile, Replies
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback_command
from distill.commands.readback.speed import check_speed, seen_in
from distill.config.layout import VERDICT
from distill.engines.protocol.client import Answer, EngineClient
from distill.engines.protocol.counts import DraftCounts
from distill.export.load_table import gamma_plan
from distill.report.measured import engine_parts, ways_tables
from distill.report.page import write_page
from distill.report.screen import last_screen
from distill.report.sections.readback import speed_table
from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import OUR_DECODER, Verdict, load_verdict
from speculative.measure.engine_costs import EngineCosts, ratios_of, step_costs
from speculative.measure.measured import DRAFT, TARGET

LOADS = (1, 4)


def costs_of(
    step: float = 0.01, draft: float = 0.001, engine: str = "vLLM 0.32.0", prefill: float = 0.0
) -> EngineCosts:
    """An engine whose step takes `step` and 10 % more for each request, and a draft call `draft`."""
    seconds = {
        (n, gamma): step * (1 + 0.1 * n * (gamma + 1)) + gamma * draft
        for n, gamma in itertools.product(LOADS, (0, 1, 3))
    }
    costs = step_costs(seconds, parallel=False)
    ratios = {one.batch_size: ratios_of(one, [one, one]) for one in costs}
    reads = {n: {0: n * prefill, 1: n * prefill, 3: 2 * n * prefill} for n in LOADS} if prefill else {}
    return EngineCosts(format=1, engine=engine, device="d", flags=[], costs=costs, ratios=ratios, prefill=reads)


def test_a_response_has_its_prefill_and_the_prompts_of_the_others_in_it() -> None:
    """By hand: 11 tokens, ten of them decoded; all four prompts take 0.04 s without the draft and 0.08 s with it."""
    costs = costs_of(prefill=0.01)
    one = costs.costs[1]
    step, block = 0.014, 0.01 * (1 + 0.1 * 16) + 0.003
    expected = (0.04 + 10 * step) / (0.08 + 10 * block / 2.5)
    assert costs.speed_up(one, 3, 2.5, 11) == pytest.approx(expected)
    row = costs.row(one, 3, 2.5, "sample", 11)
    assert row.speed_up == pytest.approx(expected)
    assert row.tokens_per_second == pytest.approx(4 * 11 / (0.08 + 10 * block / 2.5)), "the goodput of all requests"
    assert costs.speed_up(one, 2, 2.5, 1e12) == pytest.approx(2.5 * step / (one.block_price(2) * step))
    assert costs.row(one, 0, 1.0, "sample", 11).speed_up == 1.0
    assert replace_prefill(costs).speed_up(one, 3, 2.5, 11) == pytest.approx(2.5 * step / block), (
        "an older file has no prefill"
    )


def replace_prefill(costs: EngineCosts) -> EngineCosts:
    return costs.model_copy(update={"prefill": {}})


@pytest.fixture
def timed_run(tiny_run: Path, tmp_path: Path) -> Path:
    made = tmp_path / "timed"
    shutil.copytree(tiny_run, made, symlinks=True)
    (made / EngineCosts.FILE).write_text(costs_of().model_dump_json())
    return made


@pytest.mark.usefixtures("without_pictures")
def test_every_view_shows_the_one_prediction(timed_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = load_verdict(timed_run)
    costs = costs_of()
    rows = costs.rows(verdict.replay, verdict.rule, verdict.tokens / verdict.prompts)
    assert verdict.engine_rows == rows
    last_screen(Console(width=200), timed_run, verdict, [], None)
    screen, page = capsys.readouterr().out, write_page(timed_run).read_text()
    for row in rows:
        shown = f"{row.speed_up:.2f}x" if row.gamma in (1, 3) else f"{row.tokens_per_second:,.0f}"
        assert shown in screen
        assert shown in page
    for text in (screen, page):
        assert "predicted (engine vLLM 0.32.0)" in text
        assert "plain decoding is faster" in text
    (timed_run / EngineCosts.FILE).unlink()
    assert "predicted (engine" not in write_page(timed_run).read_text()
    assert engine_parts(load_verdict(timed_run)) == []


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("draft", "pays"), [(0.0001, True), (0.1, False)])
def test_the_engines_times_decide_what_to_run_and_ours_stay_beside_them(
    timed_run: Path, capsys: pytest.CaptureFixture[str], draft: float, pays: bool
) -> None:
    ours = Verdict.read(timed_run / VERDICT)
    (timed_run / EngineCosts.FILE).write_text(costs_of(draft=draft).model_dump_json())
    verdict = load_verdict(timed_run)
    run = {row.concurrency: row for row in verdict.engine_rows}[1]
    assert (verdict.pays, bool(run.gamma), verdict.to_run()) == (pays, pays, DRAFT if pays else TARGET)
    assert verdict.to_run(4) == (DRAFT if verdict.engine_runs[4].gamma else TARGET)
    assert verdict.outcome == ("pays_off" if pays else "no_speed")
    begins = (
        f"Run the draft in vLLM 0.32.0: {run.speed_up:.2f}x" if pays else "Run the target alone in vLLM 0.32.0: by its"
    )
    assert verdict.headline.startswith(begins)
    assert len(verdict.headline.split()) <= 25
    assert verdict.facts == [f"Timed {OUR_DECODER}: {ours.headline.replace(f' {OUR_DECODER}', '')}", *ours.facts]
    assert (ours.run, ours.headline) == (verdict.run, Verdict.read(timed_run / VERDICT).headline), "as it was timed"
    table = ways_tables(verdict)[0]
    alone, drafted = table.cells[-2:]
    assert (alone[0].value, drafted[0].value) == ("target alone in vLLM 0.32.0", "draft in vLLM 0.32.0")
    best = run if pays else max(verdict.engine_rows[:2], key=lambda row: row.speed_up)
    assert (drafted[1].value, drafted[-1].value, drafted[-1].note) == (best.gamma, best.speed_up, "predicted")
    assert [row[0].value for row in table.cells if row[0].mark] == [(drafted if pays else alone)[0].value], (
        "the engine's"
    )
    last_screen(Console(width=300), timed_run, verdict, [], None)
    for text in (capsys.readouterr().out, write_page(timed_run).read_text()):
        assert html.unescape(verdict.headline) in html.unescape(text)
        assert "draft in vLLM 0.32.0" in text


def test_an_outcome_of_training_is_not_changed_by_an_engine() -> None:
    for outcome in ("loss", "no_measurable_gain"):
        assert verdict_of().model_copy(update={"outcome": outcome}).in_engine(costs_of()).outcome == outcome
    untimed = verdict_of().in_engine(costs_of())
    assert untimed.facts == [], "our decoder timed nothing"
    assert verdict_of().in_engine(None) == verdict_of()


def test_probe_plans_with_the_engines_times(timed_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    shutil.copy(timed_run / EngineCosts.FILE, file)
    for options in (ProbeOptions("embedded", ["x"], times=str(file)), ProbeOptions("embedded", [str(timed_run)])):
        plan = read_plan(options)
        assert (plan.batch_sizes, plan.gammas) == ([1, 4], [1, 3])
        assert "times are those of vLLM 0.32.0" in assumptions(plan)[0]
        assert "--gammas and --batch-sizes are not used" in assumptions(plan)[0]
        assert plan.costs_of(None, 4).target_seconds == pytest.approx(0.014)
        assert plan.costs_of(SimpleNamespace(parallel=False), 4) == plan.costs_of(None, 4)
        told = refused(plan.costs_of, SimpleNamespace(parallel=True), 4)
        assert "engine_costs.json was timed for `draft, token by token`" in told
    assert read_plan(ProbeOptions("embedded", [str(timed_run), "x"])).given is None, "whose draft it was is not known"
    assert read_plan(ProbeOptions("embedded", [str(timed_run)], times="2ms,1ms")).engine is None
    assert "costs.json: not there" in refused(
        read_plan, ProbeOptions("e", ["x"], times=str(tmp_path / "no" / "costs.json"))
    )


def verdict_of(**more: Any) -> Verdict:
    return Verdict(
        version="1",
        rule="sample",
        gamma=3,
        prompts=8,
        tokens=80,
        outcome="no_speed",
        headline="",
        drafts=[{"way": "draft"}],
        replay={0: 1.0, 1: 1.6, 2: 2.1, 3: 2.5},
        **more,
    )


def test_only_the_engine_that_was_timed_gets_its_gammas() -> None:
    verdict = verdict_of(engine=costs_of())
    runs = {row.concurrency: row.gamma for row in verdict.engine_rows}
    plan = gamma_plan(verdict, engine="vLLM")
    assert plan.gamma == runs[1] > 0
    assert plan.by_load[0][2] == runs[1]
    assert plan.source == "predicted (engine vLLM 0.32.0)"
    assert gamma_plan(verdict, engine="SGLang") == gamma_plan(verdict) == gamma_plan(verdict_of())
    never = gamma_plan(verdict_of(engine=costs_of(draft=0.1)), engine="vLLM")
    assert (never.gamma, never.gain, never.by_load) == (3, False, ((1, 4096, 0),))


def asked(seconds: float, blocks: int, tokens: int = 11, load: int = 4) -> Replies:
    """Eight answers of `tokens` tokens each; without the draft they take 0.14 s, as ten steps at four requests do."""
    kept = tokens - 1 - blocks
    counts = DraftCounts("vllm", kept, 3 * blocks, blocks, 3)
    own = [Answer(str(n), None, "", False, seconds * (0.9 + 0.2 * (n % 2)), counts, tokens, {}) for n in range(8)]
    plain = [replace(one, seconds=0.14, counts=None) for one in own]
    return Replies(None, [], own, plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "blocks", "holds", "told"),
    [
        (0.116, 4, True, ""),  # four blocks of 0.029 s, tau 2.5
        (0.145, 5, False, "tau 2.00 served by rule sample, 2.50 predicted, which chance does not explain"),
        (0.174, 4, False, "blocks take 1.50 times as long"),
    ],
)
def test_the_difference_is_split_into_acceptance_and_steps(seconds: float, blocks: int, holds: bool, told: str) -> None:
    verdict = verdict_of(engine=costs_of())
    found = check_speed(verdict, 4, asked(seconds, blocks), ["vLLM 0.32.0: seen"], "sample")
    predicted = 2.5 * 0.014 / 0.029
    assert found.predicted.speed_up == pytest.approx(predicted)
    assert found.served.speed_up == pytest.approx(0.14 / seconds)
    assert found.difference == pytest.approx(0.14 / seconds / predicted - 1)
    assert found.of_tau == pytest.approx(10 / blocks / 2.5 - 1)
    assert (1 + found.of_tau) * (1 + found.of_costs) == pytest.approx(1 + found.difference)
    assert found.holds == holds
    assert told in "; ".join(found.causes)
    assert ("vLLM 0.32.0: seen" in found.causes) == ("blocks" in told), (
        "slow steps are a cause only where steps are slow"
    )


def test_the_log_of_each_engine_is_read(tmp_path: Path) -> None:
    """Waiting requests explain slow steps only where there are more requests than the engine decodes at a time."""
    assert seen_in(tmp_path, "vLLM 0.32.0", 4) == []
    (tmp_path / "vllm.log").write_text("x enforce_eager=True, y\n")
    (tmp_path / "llama.cpp.log").write_text(
        "cmn init: llama threadpool init, n_threads = 1\nsrv load_model: initializing, n_slots = 4, n_ctx_slot = 384, kv_unified = 'true'\n"
    )
    (told,) = seen_in(tmp_path, "vLLM 0.32.0", 4)
    assert told.startswith("vLLM 0.32.0: graphs are not engaged")
    assert told.endswith("(vllm.log)")
    (shared,) = seen_in(tmp_path, "llama.cpp b1-0c1e570", 4)
    assert "cache of all requests" in shared
    waiting, _ = seen_in(tmp_path, "llama.cpp b1-0c1e570", 5)
    assert "it decodes 4 requests at a time and the others wait" in waiting


def test_gamma_by_load_is_refused() -> None:
    """More tokens than blocks can give: the engine decoded without the draft at this load."""
    given = asked(0.1, 4)
    few = [replace(one, counts=DraftCounts("vllm", 3, 3, 1, 3)) for one in given.answers]
    told = refused(check_speed, verdict_of(engine=costs_of()), 4, replace(given, answers=few), [], "sample")
    assert "at 4 requests steps were not drafted" in told
    more = [replace(one, counts=DraftCounts("vllm", 6, 160, 4, 40)) for one in given.answers]
    told = refused(check_speed, verdict_of(engine=costs_of()), 4, replace(given, answers=more), [], "sample")
    assert "drafts 40 tokens; replay knows tau up to 3" in told


def test_a_gamma_beyond_replay_has_no_prediction() -> None:
    costs = costs_of()
    far = [replace(one, verify_seconds=one.verify_seconds | {40: 1.0}) for one in costs.costs]
    table = engine_parts(verdict_of(engine=costs.model_copy(update={"costs": far})))[1]
    assert [row[-1] for row in table.texts()] == ["\N{EN DASH}"] * 2


def test_another_rule_is_named() -> None:
    (told,) = check_speed(verdict_of(engine=costs_of()), 4, asked(0.145, 5), [], "greedy-draft").causes
    assert told.startswith("tau 2.00 served by rule greedy-draft, 2.50 predicted by rule sample")


@pytest.fixture
def judged(run: Path, tmp_path: Path) -> Path:
    """The run with a verdict and engine_costs.json."""
    made = tmp_path / "run"
    shutil.copytree(run, made, symlinks=True)
    verdict = json.loads((made / "result.json").read_text())["verdict"]
    (made / VERDICT).write_text(json.dumps(verdict))
    (made / EngineCosts.FILE).write_text(costs_of().model_dump_json())
    return made


@pytest.mark.usefixtures("_quick")
def test_servers_are_asked_one_at_a_time_at_each_load(
    make: Callable[..., FakeEngine], judged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow screen breaks the table's headings
    busy, most, lock, usual = list[AnswerFile](), dict[int, int](), threading.Lock(), AnswerFile.answer

    def answer(own: AnswerFile, text: Any, settings: Any) -> Answer:
        with lock:
            busy.append(own)
            assert all(one is own for one in busy), "two servers at once"
            most[settings.seed] = max(most.get(settings.seed, 0), len(busy))
        try:
            return usual(own, text, settings)
        finally:
            with lock:
                busy.remove(own)

    spare, spared = AnswerFile.spare, list[AnswerFile]()
    monkeypatch.setattr(AnswerFile, "spare", lambda own, *asked: (spared.append(own), spare(own, *asked))[1])
    places, ask = list[Any](), EngineClient.ask

    def record(own: EngineClient, ids: Any, settings: Any, key: str) -> Answer:
        if own.timed:
            places.append((own.root, tuple(ids), settings.seed))
        return ask(own, ids, settings, key)

    monkeypatch.setattr(EngineClient, "ask", record)
    monkeypatch.setattr(AnswerFile, "answer", answer)
    (judged / "vllm.log").write_text(
        "x enforce_eager=True, y\nAsync scheduling will be disabled because it is not supported\n"
    )
    with running_engine(make(slow=0.02)) as url, running_engine(make(draft=None, slow=0.02)) as plain:
        found = readback_command(ReadbackOptions(url, judged, plain=plain, gamma=GAMMA, speed=True, concurrency=3))
    assert [one.served.concurrency for one in found.speed] == [1, 4]
    assert sorted(most.values()) == [1, 3, 4], "load 1, the readback itself, load 4"
    count, files = found.served.prompts, set(spared)
    turns = [-(-count // (4 * load)) for load in (1, 4)]
    # Before and after each turn, as many as are decoded at a time or as the turn has.
    assert len(spared) == 2 * 2 * sum(
        min(load, count - 4 * load * turn) for load, turns in zip((1, 4), turns, strict=True) for turn in range(turns)
    )
    assert all(len(one.path.read_text().splitlines()) == 2 * count for one in files), "and they are not kept"
    counted = [place for place in places if place[2] >= 0]
    assert len(counted) == len(set(counted)) == 4 * count, "a prompt that counts is in no cache"
    verdict = load_verdict(judged)
    for one in found.speed:
        expected = verdict.engine.row(
            next(of for of in verdict.engine.costs if of.batch_size == one.served.concurrency),
            GAMMA,
            verdict.replay[GAMMA],
            verdict.rule,
            verdict.tokens / verdict.prompts,
        )
        assert one.predicted == expected
        assert one.served.gamma == GAMMA
        assert one.served.how["speed_up"] == "served"
        assert one.holds == (abs(one.difference) <= 0.1)
    assert ReadbackRecord.stored(judged) == found
    table, printed = speed_table(found), capsys.readouterr().out
    assert [row[0] for row in table.texts()] == ["1", "4"]
    assert "within 10 %" in printed


@pytest.mark.usefixtures("_quick")
def test_an_engine_that_counts_by_counters_alone_is_compared_at_every_load(
    make: Callable[..., FakeEngine], judged: Path
) -> None:
    with running_engine(make(detail="none")) as url, running_engine(make(draft=None)) as plain:
        found = readback_command(ReadbackOptions(url, judged, plain=plain, gamma=GAMMA, speed=True))
    assert [one.served.tau for one in found.speed] == pytest.approx([found.served.tau] * 2, rel=0.3), "other seeds"


@pytest.mark.usefixtures("_quick")
def test_missing_inputs_of_speed_are_reported_before_any_request(judged: Path) -> None:
    url = "http://127.0.0.1:9"
    assert "with --plain" in refused(readback_command, ReadbackOptions(url, judged, speed=True))
    (judged / EngineCosts.FILE).unlink()
    told = refused(readback_command, ReadbackOptions(url, judged, plain=url, speed=True))
    assert "has no engine_costs.json; make it with `understudy time" in told
