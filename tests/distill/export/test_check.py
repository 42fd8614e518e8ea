"""The outside check: transformers' own assisted decoding, its calls counted, its settings really in force."""

import logging

import pytest
import torch
from tiny_models import tiny_model

from distill.export.check import check_with_transformers, counted_calls, difference
from speculative.decoder.responses import Response

PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44], [10], [0, 9]]  # the last starts with the pad id, as bos often is


def make_llama(seed, layers=2, eos=None):
    return tiny_model(seed=seed, vocab_size=64, num_hidden_layers=layers, initializer_range=0.3, eos_token_id=eos)


@pytest.mark.parametrize("eos", [None, 60])
def test_the_target_as_its_own_draft_is_fully_accepted(tmp_path, eos, caplog, monkeypatch):
    target = make_llama(0, eos=eos)
    target.save_pretrained(tmp_path)
    logger = logging.getLogger("transformers.generation.utils")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    type(logger).warning_once.cache_clear()
    result = check_with_transformers(target, tmp_path, PROMPTS, 20, 4)
    assert "generation_config" not in caplog.text, "how transformers calls the draft is not for our users to mend"
    # 20 tokens are 4 blocks of 4 accepted tokens and one bonus token: the gate is off and gamma stays 4.
    assert result.tau == 5.0
    assert result.accepted == sum(result.drafted_N)
    assert result.target_calls_N == [4, 4, 4, 4]
    assert result.drafted_N == [16, 16, 16, 16]
    assert not target._forward_hooks


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_another_draft_gives_the_same_text_and_consistent_counts(tmp_path, gamma):
    target = make_llama(0, eos=3)
    make_llama(1, layers=1, eos=3).save_pretrained(tmp_path)
    result = check_with_transformers(target, tmp_path, PROMPTS, 16, gamma)
    assert (result.equal_N, result.first_difference) == ([True] * 4, "")
    assert sum(result.drafted_N) <= gamma * sum(result.target_calls_N)
    assert 1.0 <= result.tau <= gamma + 1


def test_a_difference_is_located_with_its_gap():
    target = make_llama(0)
    plain, other, shorter = (Response("0", [5, 6, 7], response_ids=ids) for ids in ([11, 12, 13], [11, 20], [11, 12]))
    with torch.no_grad():
        logits_V = target(input_ids=torch.tensor([[5, 6, 7, 11]])).logits[0, -1]
    gap = float((logits_V.max() - logits_V[[12, 20]].min()) / logits_V.abs().max())
    assert f"differs from plain greedy at token 1 of prompt '0': the logits are {gap:.1e} apart" in difference(
        target, plain, other
    )
    assert "ends after 2 tokens" in difference(target, plain, shorter)
    with torch.no_grad():
        target.lm_head.weight[:] = target.lm_head.weight[0].clone()  # every token ties
    assert difference(target, plain, other).startswith("a near-tie at token 1 of prompt 0")


def test_hooks_are_removed_after_an_error():
    target = make_llama(0)
    with pytest.raises(RuntimeError), counted_calls(target):
        raise RuntimeError
    assert not target._forward_hooks
