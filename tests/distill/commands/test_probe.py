"""`understudy probe` on tiny models: what it says, what it refuses in one line, and that its words follow from its numbers."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from rich.console import Console
from tiny_training import tiny_tokenizer

from distill.commands.probe import probe as program
from distill.commands.probe import texts as answers
from distill.commands.probe.options import ProbeOptions
from distill.commands.probe.plan import read_plan
from distill.commands.probe.probe import probe
from distill.commands.probe.result import ModelFacts, Probe, ProbedDraft, draft_sentence
from distill.commands.probe.screen import busy_machine, print_probe, probe_lines
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from speculative.evaluate import HeldoutResponse
from speculative.explain.ceilings import DecisionWord, Outlook, price_of
from speculative.measure.baseline_replay import NGRAM_SIZES
from speculative.measure.cost import StepCosts, given_costs, measure_costs
from speculative.measure.measured import Measured
from speculative.rules.rule import Rule


@pytest.fixture(autouse=True, scope="module")
def _timed_shortly() -> Iterator[None]:
    """Each pair of shapes is timed for a tenth of a second, not for two."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "measure_costs", functools.partial(measure_costs, seconds=0.1))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """carved: two layers of the target; broken, huge: with NaN, too large weights; foreign: other tokens; short: less context.

    both: carved, with a made-up mask token.
    """
    place = tmp_path_factory.mktemp("probe")
    target, tokenizer = load_model("target", str(tiny_target)), load_tokenizer(str(tiny_target))
    for name in ("carved", "both", "broken", "huge", "foreign", "short"):
        draft = carve(target, [0, -1])
        if name == "broken":
            with torch.no_grad():
                draft.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
        if name == "huge":
            with torch.no_grad():
                draft.model.norm.weight[:] = 3e38  # finite, but not what it makes of anything over 1.1
        if name == "both":
            draft.config.pard_token = 7
        if name == "short":
            draft.config.max_position_embeddings = 16
        draft.save_pretrained(str(place / name))
        (tiny_tokenizer() if name == "foreign" else tokenizer).save_pretrained(str(place / name))
    lines = [f"def f{index}(a{', b' * (index % 3)}):" for index in range(20)]
    (place / "prompts.txt").write_text("\n".join([*lines, lines[0]]), encoding="utf-8")
    (place / "long.jsonl").write_text(json.dumps({"prompt": "word " * 300}) + "\n", encoding="utf-8")
    (place / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": line}], "n": 1}) + "\n" for line in lines)
    )
    return place


@pytest.fixture(scope="module")
def given(folder: Path, tiny_target: Path) -> ProbeOptions:
    """Times given, so that nothing is timed: c = .12."""
    return ProbeOptions(
        str(tiny_target),
        [str(folder / "carved")],
        str(folder / "prompts.txt"),
        count=6,
        max_tokens=12,
        times="25ms,3ms",
        device="cpu",
    )


@pytest.fixture(scope="module")
def measured(folder: Path, tiny_target: Path) -> Probe:
    """A whole probe with a draft that can be used and one that cannot."""
    drafts = [str(folder / "carved"), str(folder / "foreign")]
    options = ProbeOptions(
        str(tiny_target),
        drafts,
        str(folder / "prompts.txt"),
        count=4,
        max_tokens=8,
        gammas="1,2",
        batch_sizes="1,2",
        out=folder / "out" / "probe.json",
        device="cpu",
    )
    return probe(options)


def text_of(result: Probe) -> str:
    console = Console(file=io.StringIO(), width=220)
    print_probe(console, result)
    return console.file.getvalue()  # type: ignore[attr-defined]


def rows_of(result: Probe) -> dict[tuple[str, str, str, int], Measured]:
    rows = {(row.way, row.text, row.rule, row.concurrency): row for row in result.measured}
    assert len(rows) == len(result.measured), "one row for one thing"
    return rows


def test_the_result_is_whole_and_written(measured, folder):
    assert json.loads((folder / "out" / "probe.json").read_text()) == json.loads(json.dumps(measured.record()))
    carved, foreign = measured.drafts
    assert [(one.now.text, one.now.rule) for one in carved.outlooks] == [
        ("temperature 0", "greedy"),
        ("temperature 1", "sample"),
        ("temperature 1", "greedy-draft"),
        ("temperature 1", "block"),
    ]
    # Every rule at the first batch size, the leading one first; that one at the others too.
    assert [(price.rule, price.batch_size) for price in carved.prices] == [
        ("sample", 1),
        ("greedy", 1),
        ("greedy-draft", 1),
        ("block", 1),
        ("sample", 2),
    ]
    assert all(price.draft_step_seconds > 0 and price.target_step_seconds > 0 for price in carved.prices)
    assert foreign.refused.startswith("it does not share the target's vocabulary: token id ")
    assert measured.checks["alpha_live"] == pytest.approx(1.0, abs=1e-3)
    assert (measured.settings.lead_text, measured.settings.lead_rule) == ("temperature 1", "sample")
    assert measured.best == carved.name
    assert [about.greedy_alpha is None for about in measured.texts] == [True, False]


def test_rows_and_repetition_are_reported_before_training(measured):
    carved, rows = measured.drafts[0], rows_of(measured)
    for text, rule in (("temperature 0", "greedy"), ("temperature 1", "sample")):
        assert rows["prompt-lookup", text, rule, 1].speed_up >= 1.0
        for way in (carved.name, f"lookup + {carved.name}"):
            now, distilled = rows[way, text, rule, 1], rows[f"{way}, distilled", text, rule, 1]
            assert 1.0 <= now.speed_up <= distilled.speed_up + 1e-9
            assert (now.how["tau"], now.how["speed_up"], distilled.how["tau"]) == ("replay", "predicted", "predicted")
        assert rows[f"lookup + {carved.name}", text, rule, 1].ngrams in NGRAM_SIZES
    assert ("lookup + " + carved.name, "temperature 1", "block", 1) not in rows
    assert (
        rows[carved.name, "temperature 1", "sample", 2].alpha == rows[carved.name, "temperature 1", "sample", 1].alpha
    )
    assert all(about.looping == about.repeated == 0 for about in measured.texts), "eight tokens a response"
    printed = text_of(measured)
    lead = carved.lead
    for words in (
        f"{lead.now.alpha:.3f}",
        f"{carved.prices[0].cost_ratio:.2f}",
        f"{lead.after_lookup[1].speed_up:.2f}x",
        "are in a loop",
        "refused",
        "4 prompts are too few to be certain; give at least 6",
        "measured times",
    ):
        assert words in printed
    assert probe_lines(measured)[-1] == f"Verdict: {measured.sentence}"
    assert draft_sentence(carved, measured.lookups[1].speed_up) in measured.sentence


def test_a_target_that_loops_is_reported_in_the_sentence(given, monkeypatch):
    answer = answers.decode_heldout

    def looping(*args: Any, **options: Any) -> list[HeldoutResponse]:
        return [replace(one, response_ids=(one.response_ids[:3] * 16)[:48]) for one in answer(*args, **options)]

    monkeypatch.setattr(answers, "decode_heldout", looping)
    result = probe(replace(given, temperatures="0", max_tokens=48))
    (about,), (lookup,) = result.texts, result.lookups
    assert about.looping >= 45 / 48
    assert result.sentence.endswith(f" Warning: {about.warning}.")
    assert lookup.speed_up > 3
    assert f"{lookup.speed_up:.2f}x" in result.sentence


def test_given_times_are_used_and_nothing_is_timed_and_all_is_the_same_twice(given, monkeypatch):
    def never(*args: Any, **options: Any) -> StepCosts:
        raise AssertionError("timed")

    monkeypatch.setattr(program, "measure_costs", never)
    result = probe(given)
    (carved,) = result.drafts
    assert carved.prices[0].cost_ratio == pytest.approx(0.12)
    assert (result.settings.batch_sizes, result.settings.times) == ([1], "given")
    assert "v = 1" in " ".join(result.assumptions)
    assert carved.lead.now.speed_up == pytest.approx(max(tau / (0.12 * g + 1) for g, tau in carved.lead.taus.items()))
    again = probe(given)
    assert {**result.record(), "seconds": None} == {**again.record(), "seconds": None}


@pytest.mark.parametrize(("prompts", "seen"), [(5, None), (6, 0.08), (6, None)])
def test_what_could_be_seen_is_reported_with_its_chance(measured, prompts, seen):
    probed = replace(measured.drafts[0], detectable_alpha=seen)
    settings = replace(measured.settings, prompts=prompts)
    text = "\n".join(probe_lines(replace(measured, drafts=[probed], settings=settings)))
    assert ("5 prompts are too few to be certain; give at least 6" in text) == (prompts == 5)
    assert ("detect a gain of 0.080 in alpha with 80 % probability" in text) == (seen is not None)


def test_memory_is_reported_on_request(given):
    result = probe(replace(given, server="1GB,4,64"))
    (row,) = result.memory.drafts
    assert row.capacity.fits
    assert row.capacity.requests_lost == row.capacity.requests_alone - row.capacity.requests_with_draft > 0
    assert any(f"so the draft costs {row.capacity.requests_lost:,} requests" in line for line in probe_lines(result))


@pytest.mark.parametrize(("c", "faster"), [(0.001, "token by token"), (0.1, None), (0.5, "parallel")])
def test_a_draft_that_can_draft_both_ways_is_two_and_the_faster_is_picked(given, folder, c, faster):
    draft = str(folder / "both")
    result = probe(replace(given, drafts=[draft], temperatures="1", times=f"100ms,{100 * c}ms", server="1GB,4,64"))
    names = {"token by token": draft, "parallel": f"{draft}, parallel"}
    assert {one.drafting: one.name for one in result.drafts} == names
    by_token, by_block = (one.lead.taus for one in result.drafts)
    assert by_token[1] == pytest.approx(by_block[1]), "a block of one needs no mask"
    assert by_token[16] != pytest.approx(by_block[16])
    by_hand = {
        "token by token": max(1.0, *(tau / (gamma * c + 1) for gamma, tau in by_token.items())),
        "parallel": max(1.0, *(tau / (c + 1) for tau in by_block.values())),
    }
    for one in result.drafts:
        assert one.lead.now.speed_up == pytest.approx(by_hand[one.drafting])
        assert one.prices[0].cost_ratio == pytest.approx(c)
    picked, other = max(by_hand, key=by_hand.__getitem__), min(by_hand, key=by_hand.__getitem__)
    assert faster in (picked, None)
    assert (result.drafting, result.best) == (picked, names[picked])
    assert (
        f"As it is, drafting {picked} gives {by_hand[picked]:.2f}x, {other} gives {by_hand[other]:.2f}x."
        in result.sentence
    )
    assert [row.name for row in result.memory.drafts] == [draft]


def test_each_way_to_draft_is_timed_by_its_own_costs(given, folder, monkeypatch):
    asked = []

    def one_price(_: Any, draft: Any, *__: Any, **___: Any) -> StepCosts:
        asked.append("none" if draft is None else draft.drafting)
        return StepCosts(1.0, {1: 0.3, 2: 0.4}, {1: 1.0, 2: 1.1}, 1, 64, parallel=asked[-1] == "parallel")

    monkeypatch.setattr(program, "measure_costs", one_price)
    options = replace(given, drafts=[str(folder / "both")], times="", gammas="1,2", batch_sizes="1")
    token, block = probe(replace(options, temperatures="0")).drafts
    assert asked == ["none", "autoregressive", "parallel"], "the target alone, and each way"
    assert (token.prices[0].cost_ratio, block.prices[0].cost_ratio) == pytest.approx((0.25, 0.35))
    assert list(block.lead.taus) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "decision", "words"),
    [
        (
            {"times": "25ms,15.5ms"},
            "hopeless",
            "at c = 0.62 even a draft that is always accepted would give 1.56x: use a shallower",
        ),
        ({"times": "25ms,1ms,250ms"}, "hopeless", "a shallower draft cannot help"),
        ({"drafts": [], "times": "25ms,15.5ms"}, "hopeless", "Hopeless: at c = 0.62"),
        (
            {"drafts": []},
            "no_draft",
            "at c = 0.12 a perfect draft gives 5.82x; alpha must be above 0.38 to pay off at gamma 5",
        ),
        ({"drafts": ["TARGET"]}, "no_headroom", "Its alpha is 1.000 and its ceiling 1.000"),
    ],
)
def test_the_decision_is_in_words_and_for_machines(given, changes, decision, words):
    if changes.get("drafts"):
        changes = {"drafts": [given.target]}
    result = probe(replace(given, temperatures="1", **changes))
    assert (result.decision, result.go) == (decision, False)
    assert words in result.sentence
    if decision == "no_headroom":
        assert any("this is the target itself" in line for line in probe_lines(result))


def test_without_a_draft_lookup_is_what_there_is(given):
    result = probe(replace(given, drafts=[], times="", gammas="1,2", batch_sizes="1", temperatures="0"))
    assert (result.decision, result.go, result.drafts, result.best) == ("no_draft", False, [], None)
    assert result.sentence.startswith("No draft was given. Prompt lookup ")
    assert list(result.target_prices[0].verify_seconds) == [1, 2]


def test_prompts_are_distinct_and_fit(given, folder, chat_target):
    assert probe(replace(given, prompts="stdlib", count=3, max_tokens=40, temperatures="0")).settings.prompts == 3
    result = probe(replace(given, count=32, max_tokens=2, temperatures="0"))
    assert result.settings.prompts == 20
    assert "20 distinct prompts instead of 32" in result.notes[0]
    bare = replace(given, target=str(chat_target), temperatures="0", max_tokens=4, drafts=[])
    chats = probe(replace(bare, prompts=str(folder / "chats.jsonl")))
    asked = probe(replace(bare, chat=True))
    assert chats.texts == asked.texts
    plain = probe(replace(bare, count=20))
    assert [any("--chat" in note for note in one.notes) for one in (chats, asked, plain)] == [False, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"times": "25ms,3ms,3ms"}, "--times 25ms,3ms,3ms: give a target step, a draft call"),
        ({"times": "25ms,3ms,28ms,1ms"}, "--times 25ms,3ms,28ms,1ms: give a target step"),
        ({"times": "fast,3ms"}, "--times fast: give a time"),
        ({"times": "fast"}, "fast: not there"),
        ({"temperatures": "warm"}, "--temperatures warm: give numbers from 0"),
        ({"gammas": "1,33"}, "--gammas 1,33: give numbers from 1 to 32"),
        ({"batch_sizes": "0"}, "--batch-sizes 0: "),
        ({"target": "./nowhere"}, "target './nowhere': no config.json there"),
        ({"drafts": ["./nowhere"]}, "draft './nowhere': no config.json there"),
        ({"chat": True}, "--chat: the target's tokenizer has no chat template"),
        ({"max_tokens": 125}, "that exceeds the target's context of 128"),
        ({"max_tokens": 1000, "prompts": "stdlib"}, "fills the target's context of 128"),
        ({"prompts": "long.jsonl"}, "prompt long.jsonl:1 has "),
        ({"prompts": "chats.jsonl"}, "chats.jsonl:1: the tokenizer"),
        ({"drafts": ["foreign"]}, "it does not share the target's vocabulary"),
        ({"drafts": ["short"]}, "its context of 16 tokens is too short"),
        ({"drafts": ["huge"]}, "the draft returned NaN or infinite logits"),
        ({"drafts": ["broken"]}, "down_proj.weight is not a number: the file is damaged"),
        ({"drafts": ["foreign", "broken"]}, "no draft can be used: "),
        ({"out": "prompts.txt/probe.json"}, "--out "),
    ],
)
def test_a_mistake_is_one_line(given, folder, changes, message):
    def placed(value: Any) -> Any:
        names = {path.name for path in folder.iterdir()}
        return str(folder / value) if isinstance(value, str) and value.split("/")[0] in names else value

    changes = {
        key: [placed(name) for name in value] if key == "drafts" else placed(value) for key, value in changes.items()
    }
    if "out" in changes:
        changes["out"] = Path(changes["out"])
    assert message in refused(probe, replace(given, **changes))


def test_a_draft_that_breaks_does_not_stop_the_others(given, folder):
    result = probe(replace(given, drafts=[str(folder / name) for name in ("huge", "carved", "short")]))
    assert [one.refused is None for one in result.drafts] == [False, True, False]
    assert result.best == str(folder / "carved")
    assert text_of(result).count("refused") == 2


def test_the_lead_is_the_first_temperature_that_samples():
    options = ProbeOptions("x", temperatures="0,0.7,1")
    assert read_plan(options).lead == (0.7, Rule.named("sample"))
    assert read_plan(replace(options, temperatures="0")).lead == (0.0, Rule.named("greedy"))


def probed_of(decision: DecisionWord) -> ProbedDraft:
    now = Measured("d", "sample", alpha=0.8, gamma=4, tau=3.0, speed_up=1.5)
    distilled, ceiling = replace(now, alpha=0.9, speed_up=1.8), replace(now, alpha=0.97, speed_up=2.5)
    both = replace(now, speed_up=1.9), replace(now, speed_up=2.2)
    lead = Outlook(now, distilled, ceiling, both, [], {}, decision)
    model = ModelFacts("d", 1, 1, None, 1, "float32")
    return ProbedDraft("d", model, "ok", prices=[price_of("d", "sample", given_costs(1.0, 0.7))], lead=lead)


@pytest.mark.parametrize(
    ("decision", "baseline", "words"),
    [
        ("hopeless", 1.0, "at c = 0.70 even a draft that is always accepted would give 1.39x: use a shallower draft."),
        ("no_headroom", 1.0, "Its alpha is 0.800 and its ceiling 0.970"),
        ("no_headroom", 1.9, "prompt lookup gives 1.90x"),
        ("already_pays", 1.0, "go. It pays off without training (alpha 0.800, 1.50x at gamma 4)"),
        ("needs_distillation", 1.7, "Prompt lookup gives 1.70x without training"),
        ("out_of_reach", 2.0, "below prompt lookup's 2.00x"),
        ("out_of_reach", 1.0, "below 1.1x"),
    ],
)
def test_each_decision_has_its_sentence(decision, baseline, words):
    sentence = draft_sentence(probed_of(decision), baseline)
    assert words in sentence
    assert sentence.startswith("d: ")
    both = "With prompt lookup before it: 1.90x at gamma 4 as it is, 2.20x distilled."
    assert (both in sentence) == (decision != "hopeless")
    assert ("go" in sentence.split()[1]) == (decision in ("already_pays", "needs_distillation"))


def test_a_busy_machine_is_named():
    assert busy_machine([]) == busy_machine([0.010, 0.011]) == []
    assert "between 10.0 and 20.0 ms" in busy_machine([0.010, 0.020])[0]
