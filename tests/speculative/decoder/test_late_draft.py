"""A draft that reads the prompt behind the first token: the target's text, the blocks of replay, and a first token that did not wait."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from host_rows import SMALL_DRAFT, TARGET, repeating_prompts, sampled_text_p_value
from simulation import trials
from tiny_models import VOCAB, perturbed, texts, tiny_model

from speculative.decode import decode, generate
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import ParallelDrafter
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.measure.engine_blocks import after_prefill, tau_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree

DRAFT, MARKED = perturbed(TARGET), perturbed(TARGET)
MARKED.config.pard_token = VOCAB - 1
DRAFTERS = {
    "draft": lambda: ModelDrafter(DRAFT),
    "parallel": lambda: ParallelDrafter(MARKED),
    "lookup-draft": lambda: LookupDraft(PromptLookup(min_ngram=2), ModelDrafter(DRAFT), then_gamma=2),
}
PROMPTS = repeating_prompts()
GREEDILY = DecodeSettings(GREEDY, 4, Rule.named("greedy"), max_tokens=24, eos_ids=(7, 19))


class Watched(ModelDrafter):
    """Notes the rows that read their prompts, and how long the texts were."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.read: list[tuple[list[int], list[int]]] = []

    def admit(self, rows, tokens_RC, lengths_R) -> None:
        self.read.append((list(rows), lengths_R[rows].tolist()))
        super().admit(rows, tokens_RC, lengths_R)


@pytest.mark.parametrize("runner", ["eager", "compile"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_plain_text_with_rows_recycled(name, runner):
    plain, _ = decode(TARGET, None, PROMPTS, replace(GREEDILY, gamma=0))
    for batch_size in (1, 3, 8):
        late, _ = decode(
            TARGET, DRAFTERS[name](), PROMPTS, GREEDILY, batch_size=batch_size, runner=runner, draft_reads_late=True
        )
        assert texts(late) == texts(plain)
        assert all((one.drafted_counts[0], one.accepted_counts[0], one.commit_sizes[0]) == (0, 0, 1) for one in late)
        assert {count for one in late for count in one.accepted_counts[1:]} >= {0, 1}, (
            "tokens of the draft are right and wrong"
        )


def test_the_target_says_the_first_token_before_the_draft_reads_anything():
    watched, first = Watched(DRAFT), []
    settings = replace(GREEDILY, max_tokens=6, eos_ids=())
    stream = generate(TARGET, watched, PROMPTS[:4], settings, batch_size=2, draft_reads_late=True, in_order=True)
    for event in stream:
        if len(event.response.response_ids) == len(event.token_ids):
            first.append((event.index, event.token_ids, sum(len(rows) for rows, _ in watched.read)))
    assert [index for index, _, _ in first] == [0, 1, 2, 3], "prompts get rows in their own order"
    assert all(len(ids) == 1 for _, ids, _ in first)
    assert [read for _, _, read in first][:2] == [0, 0]
    assert all(before <= index for index, _, before in first), "no prompt was read before its first token"
    lengths = sorted(length for _, of_rows in watched.read for length in of_rows)
    assert lengths == sorted(len(ids) + 1 for _, ids in PROMPTS[:4])


def test_a_response_of_one_token_never_meets_the_draft():
    watched = Watched(DRAFT)
    settings = replace(GREEDILY, max_tokens=1)
    late, timing = decode(TARGET, watched, PROMPTS, settings, batch_size=3, draft_reads_late=True)
    plain, _ = decode(TARGET, None, PROMPTS, replace(settings, gamma=0))
    assert (texts(late), watched.read) == (texts(plain), [])
    assert 0.0 < timing.prefill_seconds < timing.total_seconds


@pytest.mark.parametrize("runner", ["eager", "compile"])
@pytest.mark.parametrize("gamma", [1, 3])
def test_blocks_are_those_of_replay_behind_the_first_token(gamma, runner):
    """Under `greedy-draft` nothing is random given the text, so they are equal one by one."""
    settings = DecodeSettings(SamplingSettings(0.8), gamma, Rule.named("greedy-draft"), max_tokens=30, seed=3)
    late, _ = decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings, batch_size=3, runner=runner, draft_reads_late=True)
    scores = score_tokens(DRAFT, [after_prefill(one) for one in late], settings.sampling)
    _, blocks_N = tau_of(scores, Rule.named("greedy-draft"), gamma)
    np.testing.assert_allclose([one.blocks - 1 for one in late], blocks_N, atol=1e-9)  # counts, summed in float64


def test_a_sampled_response_ignores_the_batch_and_begins_as_plain_decoding():
    settings = DecodeSettings(SamplingSettings(0.6, top_k=20), 4, Rule.named("sample"), max_tokens=24, seed=5)
    plain, _ = decode(TARGET, None, PROMPTS, replace(settings, gamma=0))
    found = [
        decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings, batch_size=rows, draft_reads_late=True)[0]
        for rows in (1, 3, 8)
    ]
    assert all(texts(one) == texts(two) for one, two in pairwise(found))
    assert [ids[0] for ids in texts(found[0])] == [ids[0] for ids in texts(plain)]


@pytest.mark.simulation
@pytest.mark.parametrize("rule", ["sample", "block", "greedy-draft"])
def test_sampled_text_has_the_targets_distribution(rule):
    way = DecodeSettings(gamma=3, rule=Rule.named(rule))
    assert sampled_text_p_value(ModelDrafter(SMALL_DRAFT), way, trials(3000, 6000), draft_reads_late=True) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_pair_says_the_same():
    target = tiny_model("lfm2", layer_types=["conv", "full_attention"])
    plain, _ = decode(target, None, PROMPTS[:4], replace(GREEDILY, gamma=0))
    late, _ = decode(
        target, ModelDrafter(perturbed(target)), PROMPTS[:4], GREEDILY, batch_size=2, draft_reads_late=True
    )
    assert texts(late) == texts(plain)


@pytest.mark.parametrize("drafter", [PromptLookup(), EarlyExit(TARGET, 1), None], ids=["lookup", "early exit", "tree"])
def test_where_no_draft_reads_a_prompt_nothing_changes(drafter):
    tree = TokenTree.from_branching((2, 1)) if drafter is None else None
    settings = replace(GREEDILY, gamma=2 if tree else 4, tree=tree)
    drafter = drafter or ModelDrafter(DRAFT)
    usual, _ = decode(TARGET, drafter, PROMPTS, settings)
    late, _ = decode(TARGET, drafter, PROMPTS, settings, draft_reads_late=True)
    assert [(one.response_ids, one.accepted_counts) for one in late] == [
        (one.response_ids, one.accepted_counts) for one in usual
    ]
