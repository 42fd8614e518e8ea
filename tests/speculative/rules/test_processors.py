"""Logits rules against transformers' own processors, one ragged row at a time, and against its `generate`."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import prompts_of, tiny_model
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from speculative.rules.processors import LogitsRules
from speculative.rules.sampling import SamplingSettings, logits_to_probs

V, COLUMNS = 12, 9
SCRATCH = 10**9  # Not a token id: reading it would raise.


def processors_of(rules: LogitsRules, prompt_length: int) -> list[LogitsProcessor]:
    """The same rules as transformers spells and orders them."""
    made: list[LogitsProcessor] = []
    if rules.bias:
        made.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in rules.bias]))
    if rules.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(float(rules.repetition_penalty)))
    if rules.min_tokens > 0 and rules.eos_ids:
        made.append(MinNewTokensLengthLogitsProcessor(prompt_length, rules.min_tokens, list(rules.eos_ids)))
    if rules.allowed_ids:
        made.append(PrefixConstrainedLogitsProcessor(lambda row, text: list(rules.allowed_ids), 1))
    if rules.banned_ids:
        made.append(SuppressTokensLogitsProcessor(rules.banned_ids))
    return made


def row_by_row(rules, logits, texts, prompt_lengths):
    """The slow twin: transformers on the exact text of each row."""
    rows = []
    for scores, text, prompt_length in zip(logits, texts, prompt_lengths, strict=True):
        scores = scores.unsqueeze(0)
        for processor in processors_of(rules, prompt_length):
            scores = processor(torch.tensor([text]), scores)
        rows.append(scores)
    return torch.cat(rows)


def padded(texts):
    tokens = torch.full((len(texts), COLUMNS), SCRATCH)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    return tokens, torch.tensor([len(text) for text in texts])


token_ids = st.integers(0, V - 1)
texts_and_prompts = st.lists(
    st.lists(token_ids, min_size=1, max_size=COLUMNS).flatmap(
        lambda text: st.tuples(st.just(text), st.integers(1, len(text)))
    ),
    min_size=1,
    max_size=4,
)
all_rules = st.builds(
    LogitsRules,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 2]),
    bias=st.dictionaries(token_ids, st.floats(-8, 8, width=32), max_size=3).map(lambda pairs: tuple(pairs.items())),
    allowed_ids=st.one_of(st.just(()), st.sets(token_ids, min_size=8).map(tuple)),
    banned_ids=st.sets(token_ids, max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    eos_ids=st.sets(token_ids, max_size=2).map(tuple),
)


@given(all_rules, texts_and_prompts, st.integers(0, 1000), st.sampled_from([torch.float32, torch.float64]))
def test_every_combination_equals_transformers_row_by_row(rules, rows, seed, dtype):
    texts, prompt_lengths = [text for text, _ in rows], [length for _, length in rows]
    logits = 3 * torch.randn(len(rows), V, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    before = logits.clone()
    tokens, lengths = padded(texts)
    got = rules(logits, tokens, lengths, torch.tensor(prompt_lengths))
    expected = row_by_row(rules, logits, texts, prompt_lengths)
    assert torch.equal(got, expected.to(dtype))
    assert torch.equal(logits, before), "the model's logits are the model's"
    assert got.data_ptr() != logits.data_ptr()
    if not rules.active:
        assert torch.equal(got, logits)


@given(all_rules, texts_and_prompts, st.integers(0, 1000))
def test_the_positions_of_a_block_equal_rows_of_their_own(rules, rows, seed):
    gamma = 3
    generator = torch.Generator().manual_seed(seed)
    texts = [text[: COLUMNS - gamma] for text, _ in rows]
    prompt_lengths = torch.tensor([min(length, COLUMNS - gamma) for _, length in rows])
    logits = 3 * torch.randn(len(rows), gamma + 1, V, generator=generator)
    tokens, lengths = padded(texts)
    drafted = torch.randint(V, (len(rows), gamma), generator=generator)
    tokens.scatter_(1, lengths[:, None] + torch.arange(gamma), drafted)
    block = rules(logits, tokens, lengths[:, None] + torch.arange(gamma + 1), prompt_lengths)
    for place in range(gamma + 1):
        alone = rules(logits[:, place], tokens, lengths + place, prompt_lengths)
        assert torch.equal(block[:, place], alone), place


@pytest.mark.parametrize("sampled", [False, True])
def test_the_order_is_that_of_transformers_generate(sampled):
    """Penalties do not commute with biases: the text of `generate` and the probabilities behind it tell the order."""
    model = tiny_model()
    end = 9
    rules = LogitsRules(1.7, ((4, 6.0), (end, 9.0)), tuple(range(0, 30)), (5, 6), 6, (end,))
    options = {
        "sequence_bias": [[[token], value] for token, value in rules.bias],
        "repetition_penalty": rules.repetition_penalty,
        "min_new_tokens": rules.min_tokens,
        "suppress_tokens": list(rules.banned_ids),
        "prefix_allowed_tokens_fn": lambda row, text: list(rules.allowed_ids),
        "eos_token_id": end,
        "pad_token_id": 0,
        "max_new_tokens": 12,
        "return_dict_in_generate": True,
        "output_scores": True,
        "do_sample": sampled,
        **({"temperature": 0.7, "top_k": 8} if sampled else {}),
    }
    sampling = SamplingSettings(0.7, top_k=8) if sampled else SamplingSettings()
    torch.manual_seed(0)
    seen = set()
    for _, prompt in prompts_of([3, 7, 1]):
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        for step, scores in enumerate(out.scores):
            length = len(prompt) + step
            with torch.no_grad():
                logits = model(out.sequences[:, :length]).logits[:, -1]
            got = rules(logits, out.sequences, torch.tensor([length]), torch.tensor([len(prompt)]))
            # transformers reads its cache, this a fresh forward: float32 rounding.
            torch.testing.assert_close(logits_to_probs(got, sampling), scores.softmax(-1).float(), rtol=1e-3, atol=1e-5)
            seen.add(int(out.sequences[0, length]))
        assert end not in out.sequences[0, len(prompt) : len(prompt) + rules.min_tokens].tolist()
    assert len(seen) >= 3
    assert seen <= set(rules.allowed_ids) - set(rules.banned_ids)


def test_changed_rules_do_not_inherit_what_was_made_for_the_old_ones():
    call = (torch.zeros(1, V), torch.tensor([[1]]), torch.tensor([1]), torch.tensor([1]))
    rules = LogitsRules(banned_ids=(1,))
    rules(*call)
    assert rules(*call)[0].isneginf().nonzero().flatten().tolist() == [1]
    assert replace(rules, banned_ids=(2,))(*call)[0].isneginf().nonzero().flatten().tolist() == [2]
    wider = rules(torch.zeros(1, V + 3), *call[1:])
    assert wider.shape == (1, V + 3)


@pytest.mark.device
@pytest.mark.gpu
def test_they_run_in_a_captured_graph():
    rules = LogitsRules(1.4, ((3, 2.5),), tuple(range(10)), (7,), 4, (1, 2))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, V, generator=generator)
    tokens = torch.randint(V, (3, COLUMNS), generator=generator)
    lengths, prompt_lengths = torch.tensor([[1], [3], [5]]) + torch.arange(4), torch.tensor([1, 2, 3])
    call = [tensor.cuda() for tensor in (logits, tokens, lengths, prompt_lengths)]
    rules(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rules(*call)
    call[1].copy_(tokens.flip(1))
    graph.replay()
    # Division rounds alike on both.
    torch.testing.assert_close(captured.cpu(), rules(logits, tokens.flip(1), lengths, prompt_lengths))
