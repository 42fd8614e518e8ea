"""Drafts side by side: the same number twice differs by nothing, gates open and shut, strangers are refused by name."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refused
from rich.console import Console
from tiny_training import write_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.files import read_manifest, write_manifest
from data.responses.endpoint_keys import Endpoint
from distill.commands.compare import compare
from distill.commands.compare.compare import compare_command, judge_gates, load_text, parse_gate, read_drafts
from distill.commands.compare.comparison import comparison
from distill.commands.compare.options import CompareOptions
from distill.commands.compare.screen import compare_table, cost_lines, difference_lines, domain_table, print_comparison
from speculative.errors import UserError
from speculative.measure.baseline_replay import found_blocks, kept_by_lookup, tuned_lookup
from speculative.measure.cost import StepCosts
from speculative.measure.effects import Gain
from speculative.measure.replay import expected_blocks_of, texts_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule


@pytest.fixture(scope="module")
def worse(tiny_run, tmp_path_factory):
    """A draft of another shape and of no run: the best one's with noise on its weights, one layer less."""
    folder = tmp_path_factory.mktemp("foreign") / "worse"
    best = str(tiny_run / "best" / "student")
    draft = AutoModelForCausalLM.from_pretrained(best, num_hidden_layers=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 1.0 * weight.std() * torch.randn(weight.shape, generator=generator)
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(best).save_pretrained(folder)
    return folder


def options(*drafts, **others) -> CompareOptions:
    return CompareOptions([str(draft) for draft in drafts], **{"timing": False, **others})


def drawn(*renderables) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for one in renderables:
        console.print(one)
    return console.export_text()


@pytest.fixture(scope="module")
def untimed(tiny_run, worse):
    """The run against a worse draft and its own first checkpoint, on the run's text."""
    result, status = compare_command(options(tiny_run, worse, tiny_run / "checkpoints" / "step-000000"))
    assert status == 0
    return result


def rows(result):
    """The row of each way on the whole text."""
    return [result.row(one.way) for one in result.ways]


def test_the_run_s_own_numbers_come_back(untimed, tiny_run):
    verdict = json.loads((tiny_run / "verdict.json").read_text())
    best, _, baseline = rows(untimed)
    judged, undistilled = (
        json.loads((tiny_run / place / "judgement.json").read_text()) for place in ("best", "checkpoints/step-000000")
    )
    # The same held-out responses and weights in another process state: batches are the same, so is every rounding.
    assert best.alpha == pytest.approx(judged["alpha"], abs=1e-9)
    assert baseline.alpha == pytest.approx(undistilled["alpha"], abs=1e-9)
    assert untimed.ways[0].taus[3] == best.tau == pytest.approx(verdict["replay"]["3"], abs=1e-9)
    assert (untimed.gamma, untimed.rule, untimed.on) == (3, "sample", str(tiny_run))
    assert (best.prompts, best.tokens) == (verdict["prompts"], verdict["tokens"])
    gain = {row.way: row for row in untimed.differences}[baseline.way].alpha.gain
    assert gain == pytest.approx(baseline.alpha - best.alpha)


def test_differences_are_paired_and_corrected_for_their_number(untimed):
    first, worse, _ = rows(untimed)
    own = untimed.differences[0]
    assert [row.way for row in untimed.differences] == [one.way for one in untimed.ways[1:]]
    assert own.tau.gain == pytest.approx(worse.tau - first.tau)
    assert (own.looks, own.corrected_confidence) == (2, pytest.approx(0.975))
    assert own.certain_tau == own.certain == "loss"
    assert own.tau.ci[0] < own.tau.gain < own.tau.ci[1] < 0
    assert (own.speed_up, untimed.target_step_seconds, first.speed_up) == (None, None, None)
    assert first.how == {"alpha": "replay", "tau": "replay"}
    json.dumps(untimed.record(), allow_nan=False)


def test_the_same_draft_twice_differs_by_exactly_nothing(tiny_run, monkeypatch):
    timed = []

    def one_price(*args):
        timed.append(args)
        return StepCosts(1.0, {g: 0.1 * g for g in (1, 3)}, {1: 1.1, 3: 1.2}, 1, 64)

    monkeypatch.setattr(compare, "step_costs", one_price)
    result, _ = compare_command(options(tiny_run, tiny_run, tiny_run / "best" / "student", timing=True))
    assert len(timed) == 1, "drafts of one shape share a measurement"
    assert [one.way for one in result.ways][:2] == [str(tiny_run), f"{tiny_run} #2"]
    for other in result.differences:
        for metric in ("alpha", "tau", "speed_up"):
            assert getattr(other, metric) == Gain(gain=0.0, ci=(0.0, 0.0))
        assert other.certain_tau == "none"
    assert "no certain difference" in difference_lines(result)[0]


def test_without_timing_the_target_s_weights_stay_where_they_are(tiny_run, worse, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("distill.models.target.load_model", loaded)
    compare_command(options(tiny_run, worse))
    with pytest.raises(AssertionError, match="was loaded"):
        compare_command(options(tiny_run, worse, timing=True))


@pytest.fixture(scope="module")
def timed(tiny_run, worse, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "deep" / "compare.json"
    result, status = compare_command(options(worse, tiny_run, timing=True, out=out, gamma=2))
    assert status == 0
    return result, out


def test_timing_prices_each_draft_beside_one_target(timed):
    result, out = timed
    small, large = rows(result)
    assert result.ways[0].parameters < result.ways[1].parameters
    for one, row in zip(result.ways, (small, large), strict=True):
        assert one.cost_ratio == pytest.approx(one.draft_step_seconds / result.target_step_seconds)
        assert row.speed_up > 0.0
        assert row.speed_up_ci[0] < row.speed_up < row.speed_up_ci[1]
        assert row.how["speed_up"] == "predicted"
        assert one.best_gamma in range(17)
    own = result.differences[0]
    assert own.speed_up.gain == pytest.approx(large.speed_up - small.speed_up)
    assert own.speed_up.ci[0] < own.speed_up.gain < own.speed_up.ci[1]
    assert json.loads(out.read_text()) == json.loads(json.dumps(result.record()))


def test_the_screen_shows_every_draft(timed, untimed):
    result, _ = timed
    console = Console(width=200, record=True, file=io.StringIO())
    print_comparison(console, result)
    text = console.export_text()
    for one, row in zip(result.ways, rows(result), strict=True):
        assert f"{row.tau:.2f}" in text
        assert f"{row.speed_up:.2f}x" in text
        assert f"{one.parameters:,}" in text
    assert "better" in text
    assert not any("draft step" in line for line in cost_lines(untimed))
    assert "widened for 2 comparisons" in difference_lines(untimed)[-1]


def test_domains_are_compared_each_by_itself(tiny_run, worse):
    asked = options(tiny_run, worse, "prompt-lookup")
    text = load_text(asked)
    text = replace(text, responses=[replace(one, domain=f"half-{n % 2}") for n, one in enumerate(text.responses)])
    entries = read_drafts(text, asked.drafts, 3, timing=False)
    result = comparison(text, entries, 3)
    assert result.domains == ["half-0", "half-1"]
    for row in rows(result):
        parts = [result.row(row.way, domain) for domain in result.domains]
        assert sum(part.tokens for part in parts) == row.tokens
        assert sum(part.tokens / part.tau for part in parts) == pytest.approx(row.tokens / row.tau)
    assert [result.row("prompt-lookup", domain).alpha for domain in result.domains] == [None, None]
    for number, domain in enumerate(result.domains):
        taus = []
        for entry in entries[:2]:
            scores = entry.scores[number::2]
            taus.append(sum(map(len, scores)) / expected_blocks_of(scores, Rule.named("sample"), (3,)).sum())
        own, _ = result.differences_on(domain)
        assert own.tau.gain == pytest.approx(taus[1] - taus[0])
        assert own.looks == 4, "two comparisons in each of two domains"
        assert [result.row(entry.name, domain).tau for entry in entries[:2]] == pytest.approx(taus)
    text_of = drawn(domain_table(result))
    assert "half-0" in text_of
    assert "all 4 comparisons" in text_of
    json.dumps(result.record(), allow_nan=False)


def test_few_prompts_are_certain_of_nothing_on_the_table_by_domain_or_at_the_gate(tiny_run, worse):
    """Four prompts that agree are luck one time in eight, whatever a bootstrap of them says."""
    asked = options(worse, tiny_run, on=tiny_run)
    text = load_text(asked)
    seen = list(dict.fromkeys(one.prompt for one in text.responses))[:4]
    chosen = [one for one in text.responses if one.prompt in seen]
    few = replace(text, responses=[replace(one, domain=f"half-{seen.index(one.prompt) % 2}") for one in chosen])
    entries = read_drafts(few, asked.drafts, 3, timing=False)
    result = comparison(few, entries, 3)
    (own,) = result.differences_on()
    assert own.tau.ci[0] > 0, "the bootstrap of four is sure"
    assert own.certain_tau == "none"
    (line,) = difference_lines(result)
    assert "no certain difference" in line
    assert line.endswith("4 prompts are too few to be certain; give at least 6")
    assert "would have been detected" not in line
    assert drawn(domain_table(result)).count("*") == 1, "in the caption only"
    assert judge_gates(result, [], others_too=True)[1] == []


@pytest.mark.parametrize(
    ("gate", "shut", "words"),
    [
        ("tau=99", True, "tau at gamma 3 is "),
        ("tau=1", False, ""),
        ("alpha=0.9999", True, "alpha is "),
        ("tau.ci_low=98.5", True, "the lower end of the 95 % interval of tau at gamma 3 is "),
        ("alpha.ci_low=0", False, ""),
    ],
)
def test_a_gate_is_about_the_first_draft(tiny_run, worse, gate, shut, words):
    result, status = compare_command(options(tiny_run, worse, fail_below=[gate]))
    assert (status, result.gates[0].failed) == (int(shut), shut)
    assert len(result.failures) == shut
    if shut:
        assert result.failures[0].startswith(f"{tiny_run}: {words}")
        assert f"below {float(gate.split('=')[1]):g} (--fail-below {gate})" in result.failures[0]


def test_several_gates_and_being_worse_are_reported_in_a_line_each(tiny_run, worse):
    home = tiny_run
    result, status = compare_command(
        options(worse, tiny_run, on=home, fail_below=["tau=50", "alpha=0", "alpha=2", "others"])
    )
    assert status == 1
    assert len(result.failures) == 3
    assert f"certainly worse than that of {tiny_run}, by " in result.failures[-1]
    assert "\n" not in "".join(result.failures)
    assert compare_command(options(tiny_run, worse, fail_below=["others"]))[1] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tua=2", "the metrics are alpha, tau, speed_up"),
        ("tau.low=2", "the metrics are alpha, tau, speed_up"),
        ("tau", "'nothing' is not a number"),
        ("tau=much", "'much' is not a number; write e.g. tau=2.1"),
        ("alpha=nan", "'nan' is not a number"),
        ("speed_up=1.5", "not known with --no-timing"),
    ],
)
def test_a_gate_that_means_nothing_is_refused(text, message):
    said = refused(parse_gate, text, timing=False)
    assert said.startswith(f"--fail-below {text}: ")
    assert message in said
    assert parse_gate("speed_up.ci_low=1.5").lower_end


def test_a_run_of_another_target_is_refused_by_name_unless_asked_for(tiny_run, tmp_path):
    other = shutil.copytree(tiny_run, tmp_path / "other", symlinks=True)
    for path in other.glob("responses/*/manifest.json"):
        write_manifest(path.parent, read_manifest(path.parent) | {"target": "abc"})
    said = refused(compare_command, options(tiny_run, other))
    assert f"{other}: distilled for another target (fingerprint abc" in said
    assert f"add --on {tiny_run}" in said
    result, _ = compare_command(options(tiny_run, other, on=tiny_run))
    assert result.differences[0].tau.gain == 0.0, "the same weights, judged as a stranger"


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["RUN"], {}, "at least two drafts"),
        (["WORSE", "WORSE"], {}, "is a run with held-out responses; give --on RUN"),
        (["RUN", "WORSE"], {"rule": "best"}, "--rule best: choose one of sample"),
        (["RUN", "WORSE"], {"out": Path(".")}, "exists and is not a regular file"),
        (["RUN", "STRANGER"], {}, "/stranger: draft and target do not share a vocabulary"),
        (["RUN", "./none"], {}, "no config.json there"),
        (["RUN", "UNFINISHED"], {}, "unfinished: this run has no best checkpoint yet"),
        (["prompt-lookup", "prompt-lookup"], {}, "one way needs a draft"),
        (["lookup+draft:nowhere", "prompt-lookup"], {}, "none of nowhere"),
        (["lookup+draft", "RUN"], {}, "lookup+draft: write lookup+draft:DRAFT"),
        (["prompt-lookup:x", "RUN"], {}, "prompt-lookup:x: write prompt-lookup alone"),
        (["token-tree:x", "RUN"], {}, "token-tree is not compared by replay"),
        (["lookup+x", "RUN"], {}, "`compare lookup+DRAFT` is retired"),
        (["lookup", "RUN"], {}, "`way: lookup` is retired; write prompt-lookup"),
        (["prompt-lookup", "RUN"], {"fail_below": ["alpha=.5"]}, "--fail-below alpha=.5: prompt-lookup has no alpha"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(tiny_run, worse, tmp_path, names, changes, message):
    places = {"RUN": tiny_run, "WORSE": worse, "STRANGER": tmp_path / "stranger", "UNFINISHED": tmp_path / "unfinished"}
    if "STRANGER" in names:
        write_target(tmp_path / "stranger")
    (tmp_path / "unfinished").mkdir()
    shutil.copy(tiny_run / "config.yaml", tmp_path / "unfinished")
    assert message in refused(compare_command, options(*(places.get(name, name) for name in names), **changes))


def test_a_draft_that_reads_less_than_the_text_is_refused(tiny_run, worse, monkeypatch):
    monkeypatch.setattr(compare, "max_positions", lambda config: 20)
    with pytest.raises(UserError, match=f"{worse}: its context is 20 tokens, but the text of"):
        compare_command(options(worse, tiny_run))


def test_a_target_on_a_server_cannot_be_timed(tiny_run, worse):
    asked = options(tiny_run, worse)
    text = load_text(asked)
    target = text.config.target.model_copy(update={"endpoint": Endpoint(urls=("http://a/v1",), weights="server")})
    text = replace(text, config=text.config.model_copy(update={"target": target}))
    with pytest.raises(UserError, match="on a server, so nothing can be timed here; add --no-timing"):
        read_drafts(text, asked.drafts, 3, timing=True)


@pytest.mark.parametrize("rule", ["greedy", "greedy-draft", "block"])
def test_every_rule_with_text_is_compared(tiny_run, worse, rule):
    result, _ = compare_command(options(tiny_run, worse, rule=rule))
    assert result.rule == rule
    assert (result.sampling["temperature"] == 0) == (rule == "greedy")
    assert np.isfinite([row.tau for row in rows(result)]).all()


def baseline_costs(monkeypatch):
    """c = .1, v(1) = 1.5 and v(3) = 2, whatever the draft."""
    costs = StepCosts(1.0, {1: 0.1, 3: 0.3}, {1: 1.5, 3: 2.0}, 1, 64)
    monkeypatch.setattr(compare, "step_costs", lambda *args: costs)
    return costs


def test_lookup_and_lookup_before_a_draft_are_contestants(tiny_run, monkeypatch):
    costs = baseline_costs(monkeypatch)
    names = [str(tiny_run), "prompt-lookup", f"lookup+draft:{tiny_run}"]
    result, _ = compare_command(options(*names, timing=True))
    draft, lookup, both = rows(result)
    ways = result.ways
    assert [one.way for one in ways] == names
    assert (lookup.alpha, lookup.alpha_ci, ways[1].survival, ways[1].parameters) == (None, None, None, 0)
    assert (ways[1].cost_ratio, ways[1].draft_step_seconds) == (None, None)
    assert (both.alpha, ways[2].parameters, ways[2].cost_ratio) == (None, ways[0].parameters, pytest.approx(0.1))
    text = load_text(options(*names))
    responses = text.responses
    tokens = sum(len(one.response_ids) for one in responses)
    # Of lookup: block by block at the sizes that were chosen.
    kept = [kept_by_lookup(one, 3, *lookup.ngrams) for one in responses]
    blocks = found_blocks(kept, (3,))
    assert lookup.tau == pytest.approx(tokens / (blocks.found_NK.sum() + blocks.others_NK.sum()))
    assert lookup.speed_up == pytest.approx(tokens / (2.0 * blocks.found_NK.sum() + blocks.others_NK.sum()))
    assert lookup.speed_up_ci[0] <= lookup.speed_up <= lookup.speed_up_ci[1]
    scores = score_tokens(text.draft(str(tiny_run)), responses, text.sampling)
    assert both.speed_up == pytest.approx(tuned_lookup(responses, costs, (3,), texts_of(scores, text.rule)).speed_up)
    assert ways[2].taus[0] == pytest.approx(1.0)
    for row, own in zip((lookup, both), result.differences, strict=True):
        assert (own.alpha, own.certain) == (None, None)
        assert own.tau.gain == pytest.approx(row.tau - draft.tau)
        assert own.speed_up.gain == pytest.approx(row.speed_up - draft.speed_up)
        assert own.tau.ci[0] <= own.tau.gain <= own.tau.ci[1]
    assert lookup.sizes in compare_table(result).texts()[1][0]
    assert all("alpha" not in line for line in difference_lines(result)[:2])
    json.dumps(result.record(), allow_nan=False)


def test_a_draft_is_compared_with_itself_drafting_in_one_pass(tiny_run, tmp_path, monkeypatch):
    by_block = StepCosts(1.0, {1: 0.2, 3: 0.25}, {1: 1.5, 3: 2.0}, 1, 64, parallel=True)
    by_token = baseline_costs(monkeypatch)
    monkeypatch.setattr(compare, "step_costs", lambda *args: by_block if args[3].parallel else by_token)
    both = shutil.copytree(tiny_run / "best" / "student", tmp_path / "both")
    (both / "config.json").write_text(json.dumps(json.loads((both / "config.json").read_text()) | {"pard_token": 7}))
    names = [str(both), f"parallel:{both}", f"lookup+parallel:{both}"]
    result, _ = compare_command(options(*names, timing=True, on=tiny_run))
    token, block, cascade = rows(result)
    ways = result.ways
    text = load_text(options(tiny_run, "prompt-lookup"))
    scores = score_tokens(text.draft(str(both)), text.responses, text.sampling, offsets=8)
    assert block.tau == pytest.approx(token.tokens / expected_blocks_of(scores, text.rule, (3,)).sum())
    assert (block.alpha, ways[1].taus[1]) == (pytest.approx(token.alpha), pytest.approx(ways[0].taus[1]))
    assert (ways[1].cost_ratio, block.speed_up) == (pytest.approx(0.225), pytest.approx(block.tau / 2.25))
    assert token.speed_up == pytest.approx(token.tau / 2.3)
    tuned = tuned_lookup(text.responses, by_block, (3,), texts_of(scores, text.rule))
    assert (cascade.tau, cascade.speed_up) == (pytest.approx(tuned.tau), pytest.approx(tuned.speed_up))
    assert [one.gammas[-1] for one in ways] == [32, 8, 8]
    for row, own in zip((block, cascade), result.differences, strict=True):
        assert own.tau.gain == pytest.approx(row.tau - token.tau)
        assert own.speed_up.gain == pytest.approx(row.speed_up - token.speed_up)
    assert sum("c = 0.23 a block" in line for line in cost_lines(result)) == 2
    with pytest.raises(UserError, match=f"^{tiny_run}: its config.json has no mask token"):
        compare_command(options(tiny_run, f"parallel:{tiny_run}"))
