"""With every drafter the text is the target's: greedy text is plain text, sampled text has its law and ignores the batch."""

import numpy as np
import pytest
from host_rows import SMALL_DRAFT, SMALL_TARGET, SMALL_VOCAB, TARGET, repeating_prompts, sampled_text_p_value
from simulation import trials
from tiny_models import VOCAB, perturbed

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import ParallelDrafter
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.lookup import Lookahead, PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

DRAFT = perturbed(TARGET)
MARKED, SMALL_MARKED = perturbed(TARGET), perturbed(SMALL_TARGET, 0.03)
MARKED.config.pard_token, SMALL_MARKED.config.pard_token = VOCAB - 1, SMALL_VOCAB - 1
PROMPTS = repeating_prompts()
GREEDY_TEXT = DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=40, eos_ids=(7, 19))
PLAIN = decode(TARGET, None, PROMPTS, GREEDY_TEXT)[0]


def past_responses() -> ResponseIndex:
    """What the target says, every third token of every second response spoiled: whole blocks are right, others soon wrong."""
    said = [one.response_ids for one in PLAIN[::2]]
    said += [[token if place % 3 else 11 for place, token in enumerate(one.response_ids)] for one in PLAIN[1::2]]
    return ResponseIndex.build(said, VOCAB)


def random_responses(count: int, length: int, **sizes: int) -> ResponseIndex:
    said = np.random.default_rng(0).integers(0, SMALL_VOCAB, (count, length)).tolist()
    return ResponseIndex.build(said, SMALL_VOCAB, **sizes)


def prompts_store() -> ResponseIndex:
    return ResponseIndex.build([ids for _, ids in PROMPTS], VOCAB, min_ngram=2)


DRAFTERS = {
    "lookup": PromptLookup,
    "pool": Lookahead,
    "past responses": lambda: PastResponses(past_responses()),
    "parallel": lambda: ParallelDrafter(MARKED),
    "lookup-draft": lambda: LookupDraft(PromptLookup(min_ngram=2), ModelDrafter(DRAFT)),
    "lookup-short draft": lambda: LookupDraft(PromptLookup(min_ngram=2), ModelDrafter(DRAFT), then_gamma=2),
    "lookup-past-draft": lambda: LookupDraft(
        PromptLookup(3, 3), LookupDraft(PastResponses(prompts_store()), ModelDrafter(DRAFT), 2)
    ),
    "lookup-exit": lambda: LookupDraft(PromptLookup(min_ngram=2), EarlyExit(TARGET, 1)),
    "past-pool": lambda: LookupDraft(PastResponses(past_responses()), Lookahead()),
    "lookup-pool": lambda: LookupDraft(PromptLookup(min_ngram=2), Lookahead()),
}
SMALL = {
    "lookup": PromptLookup,
    "pool": Lookahead,
    "past responses": lambda: PastResponses(random_responses(40, 12)),
    "parallel": lambda: ParallelDrafter(SMALL_MARKED),
    "lookup-draft": lambda: LookupDraft(PromptLookup(2, 2), ModelDrafter(SMALL_DRAFT)),
    "lookup-past-draft": lambda: LookupDraft(
        PromptLookup(3, 3),
        LookupDraft(PastResponses(random_responses(12, 6, max_ngram=2)), ModelDrafter(SMALL_DRAFT), 2),
    ),
    "lookup-parallel": lambda: LookupDraft(PromptLookup(min_ngram=2), ParallelDrafter(SMALL_MARKED)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_plain_text_at_every_batch_size(name):
    """With rows recycled and compacted."""
    drafter = DRAFTERS[name]()
    assert len({len(one.response_ids) for one in PLAIN}) > 1, "rows must end at different times"
    settings = DecodeSettings(GREEDY, 5, Rule.named("greedy"), max_tokens=40, eos_ids=(7, 19))
    for batch_size, count in ((1, 3), (3, 8), (8, 8)):
        responses, _ = decode(TARGET, drafter, PROMPTS[:count], settings, batch_size=batch_size)
        assert [one.response_ids for one in responses] == [one.response_ids for one in PLAIN[:count]], batch_size
    counts = {count for one in responses for count in one.accepted_counts}
    assert 0 in counts
    assert max(counts) >= 3, "its tokens must be right and wrong for this test to mean anything"


@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_text_ignores_the_batch(name):
    """It depends on (seed, key) only."""
    drafter = DRAFTERS[name]()
    settings = DecodeSettings(
        SamplingSettings(0.6, top_k=20), 4, Rule.named("sample"), max_tokens=24, eos_ids=(3,), seed=5
    )
    together, _ = decode(TARGET, drafter, PROMPTS, settings, batch_size=8)
    for batch_size, count in ((1, 3), (3, 8)):
        apart, _ = decode(TARGET, drafter, PROMPTS[:count][::-1], settings, batch_size=batch_size)
        assert [one.response_ids for one in apart[::-1]] == [one.response_ids for one in together[:count]]


SAMPLED = [(name, "sample") for name in SMALL]
OTHER_RULES = [(name, rule) for name in ("lookup", "parallel", "lookup-draft") for rule in ("greedy-draft", "block")]


@pytest.mark.simulation
@pytest.mark.parametrize(("name", "rule"), [*SAMPLED, *OTHER_RULES])
def test_sampled_text_has_the_targets_distribution(name, rule):
    assert (
        sampled_text_p_value(SMALL[name](), DecodeSettings(gamma=3, rule=Rule.named(rule)), trials(3000, 6000)) > 1e-3
    )
