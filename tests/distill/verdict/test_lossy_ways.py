"""LOSSY ways in a timing: what they cost is measured, they are not recommended, and the word is wherever they are shown."""

import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from function_heads import write_heads
from rich.console import Console
from tiny_models import perturbed, prompts_of, tiny_model

from distill.commands.evaluate.evaluate import evaluate
from distill.config.load import load_config
from distill.config.sections import JudgeConfig
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.report.measured import load_table, ways_tables
from distill.report.page import write_page
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import Evidence, Loads
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import ScoredDrafts, ways_of
from distill.verdict.timing import Timing, time_ways
from distill.verdict.verdict import verdict_of
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.evaluate import decode_heldout, judge_by_replay
from speculative.measure.cost import StepCosts
from speculative.measure.intervals import Interval
from speculative.measure.measured import DRAFT as BEST
from speculative.measure.measured import TARGET as ALONE
from speculative.measure.metrics import ratio_with_interval
from speculative.measure.replay import expected_blocks, texts_of
from speculative.measure.timing import Speed
from speculative.measure.token_scores import score_tokens
from speculative.rules.sampling import SamplingSettings

TARGET = tiny_model()
DRAFT = perturbed(TARGET, 0.05)
SETTINGS = DecodeSettings(SamplingSettings(1.0), 3, max_tokens=24)
COSTS = StepCosts(0.010, {1: 0.002, 4: 0.008, 6: 0.012}, {1: 0.011, 4: 0.012, 6: 0.013}, 1, 32)
LENIENT = "draft, LOSSY lenience 2"


class FixedSpeeds:
    """Estimates with an interval of 1 % around each."""

    def __init__(self, speeds: dict[str, float]) -> None:
        self.speeds = {ALONE: 1.0, **speeds}

    def against(self, name: str, other: str, confidence: float = 0.95) -> tuple[float, Interval | None]:
        ratio = self.speeds[name] / self.speeds[other]
        return ratio, (0.99 * ratio, 1.01 * ratio)

    def errors_of(self, names: Sequence[str], other: str) -> np.ndarray:
        return np.eye(len(names))

    def speed(self, name: str, confidence: float = 0.95) -> Speed:
        return Speed(100.0 * self.speeds[name], *self.against(name, ALONE), 8)


@pytest.fixture(scope="module")
def asked():
    """(setup with a lossy way, one scored draft)."""
    heldout = decode_heldout(TARGET, prompts_of([6, 9, 5, 7, 8, 6, 4, 5]), SETTINGS, "made up")
    judging = JudgeConfig(speed_seconds=1e-6, speed_prompts=8, lenience=(2.0,))
    scores = {SETTINGS.rule: {BEST: score_tokens(DRAFT, heldout, SETTINGS.sampling)}}
    scored = ScoredDrafts(drafts=(NamedDraft(BEST, "", 0, Draft(DRAFT)),), scores=scores, costs={BEST: COSTS})
    return JudgingSetup(judging, SETTINGS, {SETTINGS.rule: heldout}), scored


@pytest.fixture(scope="module")
def timing_of_ways(asked):
    setup, scored = asked
    return time_ways(setup, TARGET, ways_of(setup, TARGET, scored), BEST)


def with_speeds(timing: Timing, concurrency: int = 1) -> Timing:
    """The same timing, where the lossy ways are certainly the fastest."""
    speeds = {one.name: 1.1 for one in timing.ways} | {BEST: 1.5, LENIENT: 1.8}
    return replace(timing, estimates=FixedSpeeds(speeds), concurrency=concurrency)


def verdict_with(asked, timing: Timing):
    setup, scored = asked
    judged = {
        BEST: judge_by_replay(
            scored.drafts[0].draft, setup.heldout, SETTINGS, scores=scored.scores[SETTINGS.rule][BEST]
        )
    }
    loads = Loads((replace(timing, concurrency=4),))
    evidence = Evidence(
        drafts=scored.drafts,
        scores=scored.scores,
        costs=scored.costs,
        setup=timing.setup,
        judged=judged,
        timing=timing,
        loads=loads,
    )
    return verdict_of(evidence, checkpoints=[judged[BEST]], self_checks={})


def test_a_lossy_way_is_timed_with_its_price(asked, timing_of_ways):
    rows = {one.way: one for one in timing_of_ways.rows(asked[1].scores[SETTINGS.rule])}
    row = rows[LENIENT]
    assert row.tokens_per_second > 0
    how = {key: how for key, how in row.how.items() if not key.endswith("_ms")}
    assert how == {"tau": "live", "speed_up": "timed", "total_variation": "replay", "differing": "live"}
    assert row.tau == pytest.approx(
        np.divide(*np.sum([(one.tokens, one.blocks) for one in timing_of_ways.samples[LENIENT].values()], axis=0))
    )
    assert 0 < row.total_variation < 1
    assert row.total_variation_ci[0] <= row.total_variation <= row.total_variation_ci[1]
    assert rows[BEST].total_variation is None
    assert row.tau > rows[BEST].tau * 0.9, "lenience keeps more, up to chance"
    greedy, prompts = (
        SETTINGS.at_temperature_0(timing_of_ways[LENIENT].gamma),
        [(one.key, one.prompt_ids) for one in asked[0].heldout],
    )
    ours, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, replace(greedy, rule=greedy.rule.lenient(2.0)))
    theirs, _ = decode(TARGET, None, prompts, replace(greedy, gamma=0))
    differ = [one.response_ids != two.response_ids for one, two in zip(ours, theirs, strict=True)]
    assert row.differing == pytest.approx(np.mean(differ))


def test_the_fastest_way_is_not_recommended_if_it_is_lossy_and_every_table_and_sentence_says_so(asked, timing_of_ways):
    verdict = verdict_with(asked, with_speeds(timing_of_ways))
    assert set(verdict.run.values()) == {BEST}
    assert "LOSSY" not in verdict.headline
    facts = [fact for fact in verdict.facts if "lenience" in fact]
    assert any("Its text is not the target's" in fact for fact in facts)
    assert all("LOSSY" in fact for fact in facts)
    price = verdict.row(LENIENT).sizes
    assert f"total variation {verdict.row(LENIENT).total_variation:.3f}" in price
    console = Console(width=400, record=True, file=io.StringIO())
    for table in (*ways_tables(verdict), load_table(verdict)):
        console.print(table)
        shown = table.markdown()
        for line in shown.splitlines():
            assert ("lenience" in line) <= ("LOSSY" in line), line
    screen = console.export_text()
    assert screen.count("LOSSY") >= 2
    assert price in ways_tables(verdict)[0].markdown()
    assert json.loads(json.dumps(verdict.record()))["measured"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["judge.lenience=[0.5]"], "judge.lenience"),
        (["judge.lenience=[1.0]"], "judge.lenience"),  # nothing is lossy there
        (["judge.lenience=[2.0]", "serving.temperature=0"], "judge.lenience"),
        (["judge.lenience=[2.0]", "judge.live=never"], "judge.live"),
    ],
)
def test_a_setting_without_sense_is_refused(tiny_config, changes, told):
    with pytest.raises(UserError, match=told) as refused:
        load_config(tiny_config, changes)
    assert "\n" not in str(refused.value)
    assert load_config(tiny_config, ["judge.lenience=[1.5, 2.0]"]).judge.lenience == (1.5, 2.0)


def test_replay_agrees_with_live_decoding_on_the_embedded_target(tmp_path):
    """Every second layer of it. Of the same prompts: tau by replay of the target's text lies in the interval of tau
    counted in the lossy way's own text.
    """
    target, tokenizer = carve(load_model("target", "embedded"), range(0, 32, 2)), load_tokenizer("embedded")
    draft = perturbed(target, 0.012)
    write_heads(tmp_path / "heads.jsonl", ["random", "statistics", "shutil", "csv"], 32)
    heads = [json.loads(line)["prompt"] for line in (tmp_path / "heads.jsonl").read_text().splitlines()]
    prompts = [(str(number), tokenizer(head).input_ids[-60:]) for number, head in enumerate(heads)]
    settings = DecodeSettings(SamplingSettings(1.0), 3, max_tokens=24)
    heldout = decode_heldout(target, prompts, settings, "stdlib")
    scores = score_tokens(draft, heldout, settings.sampling)
    tokens_N, keys = np.array([len(one) for one in scores]), [one.prompt for one in heldout]
    taus = []
    for lenience in (1.0, 1.5, 2.5):
        rule = settings.rule.lenient(lenience)
        blocks_N = expected_blocks(texts_of(scores, rule), (3,)).others_NK[:, 0]
        responses, _ = decode(target, ModelDrafter(draft), prompts, replace(settings, rule=rule, seed=1))
        written_N, live_N = (
            np.array(counts) for counts in zip(*((len(one.response_ids), one.blocks) for one in responses), strict=True)
        )
        live, live_ci = ratio_with_interval(written_N, live_N, keys)
        replayed, replayed_ci = ratio_with_interval(tokens_N, blocks_N, keys)
        assert live_ci[0] <= replayed_ci[1], (lenience, live, live_ci, replayed, replayed_ci)
        assert replayed_ci[0] <= live_ci[1], (lenience, live, live_ci, replayed, replayed_ci)
        taus.append((live, replayed))
    for before, after in itertools.pairwise(taus):
        assert after[0] > before[0]
        assert after[1] > before[1]


@pytest.mark.usefixtures("without_pictures")
def test_an_evaluation_has_the_rows_at_every_load_and_its_report_the_word(tiny_config, tiny_run, tmp_path):
    config = load_config(tiny_config, ["judge.lenience=[2.0]", "judge.load=[2]"])
    result = evaluate(config, str(tiny_run), 2, SETTINGS.rule)
    for concurrency in (1, 2):
        row = result.verdict.row(LENIENT, concurrency)
        assert row is not None
        assert row.speed_up is not None
        assert row.total_variation == result.verdict.row(LENIENT).total_variation
        assert "LOSSY" not in result.verdict.to_run(concurrency)
    out = tmp_path / "result.json"
    out.write_text(json.dumps(result.record()))
    page = write_page(out).read_text()
    assert page.count("LOSSY lenience 2") == page.count("lenience 2") >= 3
