"""A drafted token that is discarded changes nothing later: no random number is used twice, and sampled text keeps its law even if the
width of the next block is chosen by what was discarded.
"""

import math

import numpy as np
import pytest
import torch
from host_rows import TARGET, repeating_prompts
from simulation import trials
from tiny_models import VOCAB, perturbed, texts, tiny_model

from speculative import decode as decoding
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import ParallelDrafter
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.gamma import FixedGamma
from speculative.drafters.lookup import Lookahead, PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings
from speculative.rules.tree import TokenTree

DRAFT, MARKED = perturbed(TARGET), perturbed(TARGET)
MARKED.config.pard_token = VOCAB - 1
PROMPTS = repeating_prompts()
DRAFTERS = {
    "draft": lambda: ModelDrafter(DRAFT),
    "parallel": lambda: ParallelDrafter(MARKED),
    "early exit": lambda: EarlyExit(TARGET, 1),
    "lookup": PromptLookup,
    "pool": Lookahead,
    "past responses": lambda: PastResponses(ResponseIndex.build([ids for _, ids in PROMPTS], VOCAB)),
    "lookup, then draft": lambda: LookupDraft(PromptLookup(min_ngram=2), ModelDrafter(DRAFT), then_gamma=2),
    "no draft": lambda: None,
}


class ByWidth(FixedGamma):
    """Chooses gamma by the width of the block before: by whatever the draft drew, discarded or not."""

    width = 0

    def start(self, rows):
        self.width = 0

    def choose(self, active_R):
        return (self.max_gamma, 0, 2, 1)[self.width] if self.max_gamma else 0

    def record(self, width, *block):
        self.width = width


POLICIES = {"fixed": FixedGamma, "by width": ByWidth}


@pytest.fixture
def spent_numbers(monkeypatch):
    """Once a block is committed, every number of positions up to its end is spoiled; returns how many numbers were."""
    committed, spoiled = decoding._Call._committed, []

    def spoiling(call, loop, outcome):
        found = committed(call, loop, outcome)
        for row, length in enumerate(loop.lengths_R - loop.prompt_lengths_R):
            loop._uniforms_RLG1U[row, :length] = np.nan
            spoiled.append(length)
        return found

    return lambda: monkeypatch.setattr(decoding._Call, "_committed", spoiling) or spoiled


@pytest.mark.parametrize("runner", ["auto", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_block_reads_a_number_of_an_earlier_block(name, policy, runner, spent_numbers):
    drafter, gamma = DRAFTERS[name](), 0 if name == "no draft" else 3
    rules = ("sample", "greedy-draft", "block") if policy == "fixed" else ("sample",)

    def said():
        return [
            texts(
                decode(
                    TARGET,
                    drafter,
                    PROMPTS[:4],
                    DecodeSettings(SamplingSettings(0.9), gamma, Rule.named(rule), 12, seed=2),
                    policy=POLICIES[policy](gamma),
                    runner=runner,
                    batch_size=2,
                )[0]
            )
            for rule in rules
        ]

    untouched = said()
    spoiled = spent_numbers()
    assert said() == untouched
    assert sum(spoiled) > 0


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
def test_no_block_of_a_tree_and_none_behind_a_gate_reads_a_number_of_an_earlier_block(rule, spent_numbers):
    tree = TokenTree.from_branching((3, 2, 1))

    def gate(key, position, token, ids):
        return 5 if position % 4 == 2 else None

    def said():
        settings = DecodeSettings(SamplingSettings(0.9), 3, Rule.named(rule), 12)
        of_trees = decode(
            TARGET, ModelDrafter(DRAFT), PROMPTS, DecodeSettings(settings.sampling, 3, Rule.named(rule), 12, tree=tree)
        )
        gated = decode(TARGET, ModelDrafter(DRAFT), PROMPTS, settings, gate=gate)
        return [texts(responses) for responses, _ in (of_trees, gated)]

    untouched = said()
    spent_numbers()
    assert said() == untouched


def bigram(rows):
    """A model whose next token depends on the last one alone; tokens without a row are followed by themselves."""
    model = tiny_model(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, head_dim=4, num_attention_heads=2, rms_norm_eps=0.0
    )
    logits = torch.where(torch.eye(8) > 0, 0.0, -40.0)
    for last, probs in rows.items():
        logits[last] = -40.0
        for token, prob in probs.items():
            logits[last, token] = math.log(prob)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(8))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits.T / math.sqrt(8))
    return model


class AfterTwo(ByWidth):
    """After a block of two drafted tokens drafts one, after three none."""

    width = 0

    def choose(self, active_R):
        return {0: 3, 2: 1}.get(self.width, 0)


class Stopping(ModelDrafter):
    """Drafts no further than a certain token."""

    last = 4

    def propose(self, ask):
        proposal = super().propose(ask)
        ids = proposal.ids_RG[0].tolist()
        width = ids.index(self.last) + 1 if self.last in ids else len(ids)
        probs, peaks = proposal.probs_RGV, proposal.peaks_RG
        return proposal._replace(
            ids_RG=proposal.ids_RG[:, :width],
            probs_RGV=None if probs is None else probs[:, :width],
            peaks_RG=None if peaks is None else peaks[:, :width],
        )


@pytest.mark.simulation
@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_text_keeps_its_law_if_a_discarded_token_chooses_gamma(runner):
    """The draft says X, which is rejected for Y in half of the texts, and then A, or B, which ends the block: the width says
    which one was discarded. A block that drew with the same number would say B again, with probability 0.7 instead of 0.5.
    """
    start, x, y, a, b = range(5)
    target = bigram({start: {x: 0.5, y: 0.5}, x: {a: 0.5, b: 0.5}, y: {a: 0.5, b: 0.5}})
    draft = bigram({start: {x: 1.0}, x: {a: 0.6, b: 0.4}, y: {a: 0.6, b: 0.4}})
    said = []
    for seed in range(trials(400, 4000)):
        settings = DecodeSettings(SamplingSettings(1.0), 3, max_tokens=2, seed=seed)
        policy = AfterTwo(3)
        responses, _ = decode(target, Stopping(draft), [("x", [start])], settings, policy=policy, runner=runner)
        said += [text[1] == b for text in texts(responses) if text[0] == y]
    assert len(said) > trials(150, 1800)
    assert abs(sum(said) - len(said) / 2) < 4 * math.sqrt(len(said) / 4)
