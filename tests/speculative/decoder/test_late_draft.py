"""A draft that reads the prompt behind the first token: the target's text, the blocks of replay, and a first token that did not wait."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from host_rows import SMALL_DRAFT, TARGET, repeating_prompts, sampled_text_p_value
from simulation import trials
from tiny_models import VOCAB, perturbed, texts

from speculative.decode import decode, generate
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.measure.engine_blocks import after_prefill, tau_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

DRAFT, MARKED = perturbed(TARGET), perturbed(TARGET)
MARKED.config.pard_token = VOCAB - 1
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
