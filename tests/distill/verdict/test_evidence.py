"""Evidence is gathered with one pass of each draft over the held-out responses, for every part that uses its numbers."""

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from distill.commands.evaluate.evaluate import evaluate
from distill.config.load import load_config
from distill.export.facts import ways_to_serve
from distill.models.carving.layers import carve
from distill.models.target import Target
from distill.run.responses import decode_settings
from distill.verdict.conclusion import curves_of
from distill.verdict.decoding import NamedDraft
from distill.verdict.evidence import Evidence, gather, gather_by_replay
from distill.verdict.judging_setup import JudgingSetup
from distill.verdict.scored_drafts import score_and_time
from distill.verdict.verdict import verdict_of
from speculative.decode import decode
from speculative.drafters.draft import Draft
from speculative.evaluate import HeldoutResponse
from speculative.measure.cost import given_costs
from speculative.measure.measured import BY_BLOCK, BY_TOKEN, DRAFT, UNDISTILLED
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule


class Passes:
    """How often each draft read each whole text, prompt and response."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
        real = LlamaForCausalLM.forward

        @functools.wraps(real)
        def counted(model, input_ids=None, **rest):
            self.seen.update((id(model), tuple(row)) for row in input_ids.tolist())
            return real(model, input_ids=input_ids, **rest)

        monkeypatch.setattr(LlamaForCausalLM, "forward", counted)

    def over(self, texts: list[HeldoutResponse], model: LlamaForCausalLM | None = None) -> set[int]:
        """Passes over each of the texts, of one model or of all but the target, which reads them through its cache."""
        return {
            sum(
                count
                for (who, row), count in self.seen.items()
                if row[: len(ids)] == ids and (model is None or who == id(model))
            )
            for ids in (tuple(one.prompt_ids + one.response_ids) for one in texts)
        }


@pytest.fixture
def pair(tiny_config: Path):
    """(config, target, settings, baseline and best, heldout text that the target sampled)."""
    config = load_config(tiny_config)
    target = Target(config.target, torch.device("cpu"))
    settings = decode_settings(config.serving, config.seed, target)
    prompts = [(f"key{index}", [5 + index, 9, 11 + index]) for index in range(6)]
    with target.loaded() as model:
        students = (carve(model, (0, -1)), carve(model, (0, 1)))
        responses, _ = decode(model, None, prompts, settings)
    drafts = [
        NamedDraft(name, name, 0, Draft(student)) for name, student in zip((UNDISTILLED, DRAFT), students, strict=True)
    ]
    heldout = [
        HeldoutResponse(one.key, "code", one.prompt_ids, one.response_ids, one.log_target_probs) for one in responses
    ]
    return config, model, settings.under(Rule.named("sample"), 2), drafts, heldout


def records_are_of_the_scores(evidence: Evidence) -> None:
    for one in evidence.drafts:
        scores, tokens = evidence.own_scores(one.name), sum(len(text.response_ids) for text in evidence.setup.heldout)
        alpha = sum(own.accept_probs(evidence.setup.rule).sum() for own in scores) / tokens
        assert evidence.judged[one.name].alpha == pytest.approx(alpha, rel=1e-12)


@pytest.mark.parametrize("live", [True, False])
def test_each_draft_reads_the_heldout_responses_once(pair, monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    config, target, settings, drafts, heldout = pair
    passes = Passes(monkeypatch)
    setup = JudgingSetup(config.judge, settings, {Rule.named("sample"): heldout}, 100)
    if live:
        evidence = gather(setup, target, score_and_time(setup, target, drafts))
    else:
        evidence = gather_by_replay(setup, drafts, {})
    assert [passes.over(heldout, one.draft.model) for one in drafts] == [{1}, {1}]
    records_are_of_the_scores(evidence)
    assert evidence.judged[DRAFT].live is live


def test_an_evaluation_reads_the_heldout_responses_once(
    tiny_config: Path, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_config)
    read: list[list[HeldoutResponse]] = []
    passes = Passes(monkeypatch)

    def scored(draft, texts, *rest, **options):
        read.append(list(texts))
        return score_tokens(draft, texts, *rest, **options)

    monkeypatch.setattr("distill.verdict.scored_drafts.score_tokens", scored)
    evaluate(config, str(tiny_run), 2, Rule.named("sample"))
    (heldout,) = read
    assert passes.over(heldout) == {2}, "the draft once, and the target once, for its entropies"


def test_a_draft_that_can_draft_both_ways_is_judged_by_the_faster_and_timed_by_both(pair, monkeypatch) -> None:
    config, target, settings, drafts, heldout = pair
    drafts[-1].draft.model.config.pard_token = 0
    setup = JudgingSetup(config.judge, settings, {Rule.named("sample"): heldout}, 100)
    # A draft step that costs as much as a target step: a pass a block is faster whatever it proposes; and one that is free.
    for seconds, chosen, other in ((1.0, "parallel", BY_TOKEN), (1e-6, "autoregressive", BY_BLOCK)):
        monkeypatch.setattr(
            "distill.verdict.scored_drafts.step_costs",
            lambda *rest, seconds=seconds: given_costs(1.0, seconds, max_gamma=8, parallel=rest[3].parallel),
        )
        scored = score_and_time(setup, target, drafts)
        assert (scored.drafts[-1].draft.drafting, scored.drafts[0].draft.drafting) == (chosen, "autoregressive")
        assert [one.name for one in scored.others] == [other]
        assert scored.costs[DRAFT].parallel == (chosen == "parallel")
        evidence = gather(setup, target, scored)
        records_are_of_the_scores(evidence)
        assert (evidence.own_scores(DRAFT)[0].by_start is not None) == (chosen == "parallel")
        check = evidence.judged[DRAFT].replay_check
        assert check is not None
        assert check.agrees
        verdict = verdict_of(evidence, checkpoints=[evidence.judged[DRAFT]], self_checks={})
        assert verdict.drafts[-1].drafting == chosen
        row = verdict.row(other)
        assert row is not None
        assert (row.tokens_per_second or 0) > 0
        curves = curves_of(evidence)
        _, served = ways_to_serve(verdict, curves, drafts[-1].draft.model.config)
        single, taus, one_pass = (served.get(key) for key in ("gamma", "taus", "one_pass"))
        assert (one_pass is not None) == (chosen == "parallel" if verdict.to_run() != other else other == BY_BLOCK)
        name = other if chosen == "parallel" else DRAFT
        by_token = verdict.row(name)
        assert by_token is not None
        assert single == by_token.gamma, "the gamma that was timed as best"
        assert taus == {"sample": pytest.approx(curves.taus_at(single, name)["sample"])} | taus
    plain = score_and_time(setup, target, drafts[:1])
    assert (plain.others, plain.drafts[-1].draft.drafting) == ((), "autoregressive")
