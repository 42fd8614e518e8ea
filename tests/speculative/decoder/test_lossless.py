"""Every rule through the whole decoder: the target's text, with every drafter, however rows come and go.

Two-layer random models in float32 on one CPU thread: near-ties do not occur with these seeds, so equality is exact.
"""

import dataclasses

import numpy as np
import pytest
from host_rows import SMALL_DRAFT, sampled_text_p_value
from simulation import trials
from tiny_models import generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit, first_layers
from speculative.drafters.gamma import FixedGamma
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import TokenTree

TARGET = tiny_model()
DRAFT = perturbed(TARGET)
RAGGED = [9, 1, 23, 4, 70, 2, 15, 6]
TREE = TokenTree.from_branching((3, 2, 1))
SAMPLED = SamplingSettings(0.9, top_k=20, top_p=0.95)
# Name -> settings of everything that verifies differently.
WAYS = {
    "plain": DecodeSettings(SAMPLED, 0, Rule.named("sample")),
    "sample": DecodeSettings(SAMPLED, 3, Rule.named("sample")),
    "greedy-draft": DecodeSettings(SAMPLED, 3, Rule.named("greedy-draft")),
    "sample-untruncated": DecodeSettings(SAMPLED, 3, Rule.named("sample-untruncated")),
    "block": DecodeSettings(SAMPLED, 3, Rule.named("block")),
    "tree, drawn": DecodeSettings(SAMPLED, 3, Rule.named("sample"), tree=TREE),
    "tree, fixed": DecodeSettings(SAMPLED, 3, Rule.named("greedy-draft"), tree=TREE),
    "greedy": DecodeSettings(GREEDY, 3, Rule.named("greedy")),
    "tree, greedy": DecodeSettings(GREEDY, 3, Rule.named("greedy"), tree=TREE),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_every_end_token_and_budget_cuts_a_block_where_it_stands(way):
    """Whatever a block holds, the text is a prefix of the text without that end token or budget."""
    prompts = prompts_of(RAGGED[:4])
    settings = dataclasses.replace(WAYS[way], max_tokens=7)
    full, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings)
    for length in range(1, 7):
        cut, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, dataclasses.replace(settings, max_tokens=length))
        assert texts(cut) == [text[:length] for text in texts(full)]
        assert {response.finish_reason for response in cut} == {"length"}
        end = full[0].response_ids[length]
        ended, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, dataclasses.replace(settings, eos_ids=(end,)))
        for response, text in zip(ended, texts(full), strict=True):
            place = text.index(end) + 1 if end in text else len(text)
            assert response.response_ids == text[:place]
            assert response.finish_reason == ("end" if end in text else "length")
            assert len(response.proposed_mask) == len(response.log_target_probs) == place


@pytest.mark.simulation
@pytest.mark.parametrize("way", [way for way in WAYS if "greedy" not in way.replace("greedy-draft", "")])
def test_the_same_seed_and_prompt_give_the_same_tokens_at_every_batch_size(way):
    prompts = prompts_of(RAGGED)
    settings = dataclasses.replace(WAYS[way], max_tokens=12, eos_ids=(3, 17), seed=5)
    together, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=8)
    for batch_size, count in ((1, 3), (3, 8)):
        apart, _ = decode(TARGET, ModelDrafter(DRAFT), prompts[:count][::-1], settings, batch_size=batch_size)
        assert texts(apart[::-1]) == texts(together[:count])
    other, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, dataclasses.replace(settings, seed=6))
    assert texts(other) != texts(together)


@pytest.mark.simulation
@pytest.mark.parametrize("way", [way for way in WAYS if "greedy" not in way.replace("greedy-draft", "")])
def test_sampled_text_of_recycled_rows_has_the_targets_distribution(way):
    assert sampled_text_p_value(ModelDrafter(SMALL_DRAFT), WAYS[way], trials(2000, 6000)) > 1e-3


def test_block_verification_and_trees_emit_more_per_call_than_token_wise_sampling():
    prompts = [(str(number), ids) for number, (_, ids) in enumerate(prompts_of([5] * 48))]
    taus = {}
    for way in ("sample", "block", "tree, drawn"):
        settings = dataclasses.replace(WAYS[way], sampling=SamplingSettings(1.0), max_tokens=40)
        responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings)
        taus[way] = sum(map(len, texts(responses))) / sum(response.blocks for response in responses)
    assert taus["block"] > 0.99 * taus["sample"]  # never less in expectation; one run has noise
    assert taus["tree, drawn"] > 1.05 * taus["sample"]


class RandomGamma(FixedGamma):
    """Another gamma for every block, plain decoding among them."""

    def __init__(self, largest, seed=0):
        super().__init__(largest)
        self._random = np.random.default_rng(seed)

    def choose(self, active_R):
        return int(self._random.integers(0, self.max_gamma + 1))


@pytest.mark.parametrize("rule", ["greedy", "sample", "block"])
def test_a_target_as_its_own_draft_is_always_accepted_whatever_gamma_does(rule):
    """Draft positions or cache off by one only lower acceptance, never the text: so acceptance is what is checked."""
    prompts = prompts_of(RAGGED)
    sampling = GREEDY if rule == "greedy" else SamplingSettings(1.0)
    settings = DecodeSettings(sampling, 5, Rule.named(rule), max_tokens=40)
    for batch_size, count in ((1, 3), (3, 8)):
        responses, _ = decode(
            TARGET, ModelDrafter(TARGET), prompts[:count], settings, batch_size=batch_size, policy=RandomGamma(5)
        )
        assert all(response.accepted_counts == response.drafted_counts for response in responses)
        assert {count for response in responses for count in response.drafted_counts} == {0, 1, 2, 3, 4, 5}


RULES = {
    "repetition penalty": LogitsRules(repetition_penalty=1.7),
    "bias": LogitsRules(bias=((4, 3.0), (9, -2.0))),
    "allowed tokens": LogitsRules(allowed_ids=tuple(range(5, 30))),
    "banned tokens": LogitsRules(banned_ids=(3, 11, 12)),
    "min tokens": LogitsRules(min_tokens=12, eos_ids=tuple(range(0, 50, 5))),
    "all of them": LogitsRules(1.3, ((4, 1.0),), tuple(range(2, 45)), (6, 7), 5, (9, 10)),
}


@pytest.mark.parametrize("rule", ["greedy", "sample", "block"])
@pytest.mark.parametrize("name", list(RULES))
def test_logits_rules_reach_both_models_alike(name, rule):
    sampling = GREEDY if rule == "greedy" else SamplingSettings(1.0, min_p=0.02)
    settings = DecodeSettings(sampling, 4, Rule.named(rule), max_tokens=20, rules=RULES[name])
    prompts = prompts_of(RAGGED[:5])
    itself, _ = decode(TARGET, ModelDrafter(TARGET), prompts, settings, batch_size=3)
    assert all(response.accepted_counts == response.drafted_counts for response in itself)
    if rule == "greedy":
        drafted, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=3)
        plain, _ = decode(TARGET, None, prompts, dataclasses.replace(settings, gamma=0))
        assert texts(drafted) == texts(plain)
        without, _ = decode(TARGET, None, prompts, dataclasses.replace(settings, gamma=0, rules=None))
        assert texts(plain) != texts(without)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "gpt_neox", "opt"])
def test_early_exit_shares_the_targets_cache_and_weights(kind):
    overrides = {"n_layer" if kind == "gpt2" else "num_hidden_layers": 4}
    overrides |= {"opt": {"word_embed_proj_dim": 32, "ffn_dim": 64}, "gemma2": {"sliding_window": 6}}.get(kind, {})
    target, prompts = tiny_model(kind, **overrides), prompts_of([5, 1, 12, 30, 8])
    settings = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=24)
    responses, _ = decode(target, EarlyExit(target, 3), prompts, settings, batch_size=3)
    assert texts(responses) == generated(target, prompts, 24)
    assert sum(response.accepted for response in responses) > 0
    shorter = first_layers(target, 3)
    assert {id(weight) for weight in shorter.parameters()} < {id(weight) for weight in target.parameters()}
    assert target.config.num_hidden_layers == 4
