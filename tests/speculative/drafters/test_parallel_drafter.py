"""The parallel drafter: its proposals by definition, the text it leaves the target's, the blocks that its own replay predicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_rows import (
    SMALL_TARGET,
    SMALL_VOCAB,
    TARGET,
    HostRows,
)
from tiny_models import perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import ParallelDrafter, drafts_of
from speculative.drafters.drafter import CATCH_UP_TOKENS, ModelDrafter
from speculative.drafters.gamma import AdaptiveGamma
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.measure.baseline_replay import kept_by_lookup
from speculative.measure.metrics import live_metrics
from speculative.measure.replay import agreement_of, expected_blocks_of, survival_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree


def marked(model: Any, token: int) -> Any:
    """The model, told that this token stands for one not known yet."""
    model.config.pard_token = token
    return model


DRAFT = marked(perturbed(TARGET), 49)
SMALL = marked(perturbed(SMALL_TARGET, 0.03), SMALL_VOCAB - 1)
SAMPLED = SamplingSettings(1.0)


def proposed_by_definition(text: list[int], gamma: int) -> list[int]:
    with torch.no_grad():
        logits_TV = DRAFT(torch.tensor([text + [49] * (gamma - 1)])).logits[0]
    return logits_TV[len(text) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("runner", ["eager", "static"])
def test_proposals_are_those_of_the_definition(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = HostRows(ParallelDrafter(DRAFT), rows=3)
    if runner == "static":  # The shapes of a recorded call, run one by one.
        recorded = type(rows.drafter.cached.runner)
        monkeypatch.setattr(recorded, "static", True)
        monkeypatch.setattr(recorded, "run", lambda self, call, tensors, constants: call(*tensors, *constants))
        monkeypatch.setattr(recorded, "prefixes", 1, raising=False)
    for row, length in enumerate((5, 1, 30)):
        rows.apply(("admit", (row, list(range(2, 2 + length)))))
    rng = np.random.default_rng(0)
    for gamma, grown in ((4, (1, 5, 3)), (4, (5, 1, 1)), (1, (2, 2, 1)), (6, (1, 1, 1)), (3, (7, 2, 4))):
        assert rows.proposed(gamma) == [proposed_by_definition(text, gamma) for text in rows.texts]
        for row, count in enumerate(grown):
            rows.apply(("grow", (row, rng.integers(0, 48, count).tolist())))
        assert rows.proposed(0) == [[], [], []]


def test_text_that_piled_up_is_caught_up_with_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.drafters.drafter.CATCH_UP_TOKENS", 4)
    assert CATCH_UP_TOKENS == 64
    rows = HostRows(ParallelDrafter(DRAFT), rows=2)
    rows.apply(("admit", (0, [3, 4])))
    rows.apply(("admit", (1, [5, 6, 7, 8, 9])))
    rows.proposed(2)
    rows.apply(("grow", (0, list(range(10, 21)))))
    rows.apply(("grow", (1, [11])))
    assert rows.proposed(3) == [proposed_by_definition(text, 3) for text in rows.texts]


def test_a_block_is_one_call_of_the_draft() -> None:
    widths: list[int] = []
    hook = DRAFT.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    settings = DecodeSettings(GREEDY, 5, Rule.named("greedy"), max_tokens=20)
    decode(TARGET, ParallelDrafter(DRAFT), prompts_of([6]), settings)  # what a model is asked once
    widths.clear()
    _, timing = decode(TARGET, ParallelDrafter(DRAFT), prompts_of([6]), settings)
    hook.remove()
    assert len(widths) == timing.target_calls + 1, "and one for the prompt"
    assert widths[0] == 5
    assert min(widths[1:]) == 5
    assert max(widths) <= 10


def small_prompts(count: int) -> list[tuple[str, list[int]]]:
    return prompts_of([5, 3, 9, 4] * (count // 4), vocab_size=SMALL_VOCAB)


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_greedy_replay_equals_live_block_counts_exactly(gamma: int) -> None:
    settings = DecodeSettings(GREEDY, gamma, Rule.named("greedy"), max_tokens=40, eos_ids=(3,))
    responses, _ = decode(SMALL_TARGET, ParallelDrafter(SMALL), small_prompts(8), settings)
    counted = [response.blocks for response in responses]
    scores = score_tokens(SMALL, responses, GREEDY, offsets=gamma)
    assert expected_blocks_of(scores, Rule.named("greedy"), (gamma,))[:, 0].tolist() == counted
    assert max(count for one in responses for count in one.accepted_counts) >= min(gamma, 2), "offsets are reached"


@pytest.mark.parametrize("rule", ["sample", "greedy-draft", "block"])
def test_replay_agrees_with_live_decoding_and_with_its_survival(rule: str) -> None:
    settings = DecodeSettings(SAMPLED, 4, Rule.named(rule), max_tokens=40)
    live, _ = decode(SMALL_TARGET, ParallelDrafter(SMALL), small_prompts(120), settings, batch_size=120)
    scores, counted = score_tokens(SMALL, live, SAMPLED, offsets=4), [response.blocks for response in live]
    assert abs(agreement_of(scores, Rule.named(rule), counted, 4).z) < 3.5
    np.testing.assert_allclose(survival_of(scores, Rule.named(rule), 4), live_metrics(live, 4)["survival"], atol=0.03)
    # As one that drafts token by token it would keep another number.
    assert not agreement_of(score_tokens(SMALL, live, SAMPLED), Rule.named(rule), counted, 4).agrees


def test_replay_knows_a_lookup_before_a_parallel_draft() -> None:
    settings = DecodeSettings(SAMPLED, 4, Rule.named("sample"), max_tokens=40)
    both = LookupDraft(PromptLookup(min_ngram=2), ParallelDrafter(SMALL))
    live, _ = decode(SMALL_TARGET, both, small_prompts(60), settings, batch_size=60)
    scores, counted = score_tokens(SMALL, live, SAMPLED, offsets=4), [response.blocks for response in live]
    sure = [kept_by_lookup(text, 4, min_ngram=2) for text in live]
    assert abs(agreement_of(scores, Rule.named("sample"), counted, 4, sure=sure).z) < 3.5


def test_other_ways_to_decode_leave_the_text_alone() -> None:
    """A gamma chosen block by block, a token tree (answered with a chain), logits rules, windows and learned positions."""
    plain, _ = decode(TARGET, None, prompts_of([4, 9]), DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=24))
    tree = TokenTree.from_branching((2, 1, 1))
    for settings, policy in (
        (DecodeSettings(GREEDY, 5, Rule.named("greedy"), max_tokens=24), AdaptiveGamma(5)),
        (DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=24, tree=tree), None),
    ):
        found, _ = decode(TARGET, ParallelDrafter(DRAFT), prompts_of([4, 9]), settings, policy=policy)
        assert [one.response_ids for one in found] == [one.response_ids for one in plain]
    penalty = DecodeSettings(GREEDY, 4, Rule.named("greedy"), max_tokens=24, rules=LogitsRules(repetition_penalty=1.5))
    texts = [
        [one.response_ids for one in decode(TARGET, drafter, prompts_of([4, 9]), penalty)[0]]
        for drafter in (ParallelDrafter(DRAFT), ModelDrafter(DRAFT))
    ]
    assert texts[0] == texts[1] != [one.response_ids for one in plain]
    for kind, size in (("gpt2", {"n_positions": 32}), ("mistral", {"sliding_window": 4})):
        target = tiny_model(kind, vocab_size=SMALL_VOCAB, **size)
        draft, settings = marked(perturbed(target), 7), DecodeSettings(GREEDY, 4, Rule.named("greedy"), max_tokens=26)
        live, _ = decode(target, ParallelDrafter(draft), small_prompts(4)[:2], settings)
        scores = score_tokens(draft, live, GREEDY, offsets=4)
        assert expected_blocks_of(scores, Rule.named("greedy"), (4,))[:, 0].tolist() == [one.blocks for one in live]


def test_a_draft_is_asked_for_the_ways_it_knows() -> None:
    assert [one.drafting for one in drafts_of(TARGET)] == ["autoregressive"]
    assert [one.drafting for one in drafts_of(DRAFT)] == ["autoregressive", "parallel"]
