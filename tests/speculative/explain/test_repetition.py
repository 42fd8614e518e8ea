"""Repetition against a slow twin, on loops made by hand, on a greedy model that loops, and on real source code."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import prompts_of, tiny_model
from transformers import AutoTokenizer

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.explain.repetition import RepetitionShares, repeats, repetition
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

ROOT = Path(__file__).parents[3]
EMBEDDED = ROOT / "distill" / "models" / "embedded"


def text_of(prompt, said, domain="x"):
    return HeldoutResponse("a", domain, list(prompt), list(said), [0.0] * len(said))


def slow_counts(text, ngram):
    """(repeated, looping) tokens of a response, token by token."""
    ids, begin = [*text.prompt_ids, *text.response_ids], len(text.prompt_ids)
    repeated, looping = set(), set()
    for start in range(len(ids) - ngram + 1):
        if any(ids[other : other + ngram] == ids[start : start + ngram] for other in range(start)):
            repeated |= set(range(start, start + ngram))
    for period in range(1, 65):
        for start in range(max(begin, period), len(ids)):
            end = start
            while end < len(ids) and ids[end] == ids[end - period]:
                end += 1
            if end - start >= max(2 * period, 16):
                looping |= set(range(start, end))
    return len([place for place in repeated if place >= begin]), len(looping)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 90), st.integers(1, 3), st.integers(0, 9)), max_size=4),
    st.integers(1, 5),
)
def test_counts_equal_the_slow_twin(shapes, ngram):
    texts = []
    for prompt, said, kinds, seed in shapes:
        ids = np.random.default_rng(seed).integers(0, kinds, prompt + said).tolist()
        texts.append(text_of(ids[:prompt], ids[prompt:]))
    found = repeats(texts, ngram)
    assert found.tokens_N.tolist() == [len(text.response_ids) for text in texts]
    expected = [slow_counts(text, ngram) for text in texts]
    assert list(zip(found.repeated_N.tolist(), found.looping_N.tolist(), strict=True)) == expected


def test_a_greedy_model_that_loops_is_called_looping():
    target = tiny_model(vocab_size=16)
    live, _ = decode(
        target, None, prompts_of([8] * 6, vocab_size=16), DecodeSettings(GREEDY, 0, Rule.named("greedy"), 120)
    )
    found = repetition([text_of(one.prompt_ids, one.response_ids) for one in live])
    assert found.looping > 0.3
    assert f"{100 * found.looping:.0f} % of the target's tokens are in a loop" in found.warning
    assert "serving.temperature" in found.warning


def test_ordinary_code_is_not_and_domains_are_distinguished():
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    texts = []
    for path in sorted((ROOT / "speculative").glob("*/*.py")):
        ids = tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
        texts += [text_of(ids[at : at + 64], ids[at + 64 : at + 256], "code") for at in range(0, len(ids) - 256, 256)]
    looped = text_of([1], [7, 8] * 40, "loops")
    assert len(texts) > 40
    found = repetition(texts)
    assert found.looping < 0.02
    assert 0 < found.repeated < 0.2
    assert found.warning is None
    both = repetition([*texts, looped])
    assert both.by_domain["code"] == RepetitionShares(
        repeated=found.repeated, looping=found.looping, tokens=192 * len(texts)
    )
    assert both.by_domain["loops"].looping == pytest.approx(78 / 80)
