"""A head of the most frequent tokens: what it computes, that other tokens are never proposed, and that the text stays the target's."""

import copy
from typing import Any

import pytest
import torch
from host_rows import SMALL_DRAFT, sampled_text_p_value
from refusals import refused
from simulation import trials
from tiny_models import VOCAB, logits, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.compiled_loop import CompiledLoop
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.frequent_head import HEAD_IDS, FrequentHead, trim_head
from speculative.engine.models import vocab_rows
from speculative.evaluate import HeldoutResponse
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.sampling import GREEDY, SamplingSettings

TARGET = tiny_model("qwen3", seed=3)
KEPT = [0, 1, 2, 5, 6, 9, *range(20, 41), 47]
OTHERS = sorted(set(range(VOCAB)) - set(KEPT))
SETTINGS = {
    "greedy": DecodeSettings(GREEDY, 3, "greedy", 24),
    "sample": DecodeSettings(SamplingSettings(1.0), 3, "sample", 24),
    "cut off": DecodeSettings(SamplingSettings(0.8, 20, 0.9, 0.02), 4, "sample", 24),
    "greedy-draft": DecodeSettings(SamplingSettings(1.2, 0, 0.95), 3, "greedy-draft", 24),
    "block": DecodeSettings(SamplingSettings(1.0), 3, "block", 24),
}


def trimmed(model: Any, ids: list[int] = KEPT) -> Any:
    model = copy.deepcopy(model)
    setattr(model.config, HEAD_IDS, ids)
    return trim_head(model)


WHOLE = perturbed(TARGET, 0.03)
DRAFT = trimmed(WHOLE)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi"])  # tied, tied with other names, with a bias
def test_kept_tokens_have_the_same_logits_and_others_none(kind: str) -> None:
    whole = tiny_model(kind, tie_word_embeddings=kind != "phi")
    own = trimmed(whole)
    found, expected = logits(own), logits(whole)
    torch.testing.assert_close(found[..., KEPT], expected[..., KEPT], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(found[..., OTHERS]).all()
    assert vocab_rows(own) == VOCAB
    assert own.get_input_embeddings().weight.shape[0] == VOCAB  # inputs stay whole
    assert trim_head(own).get_output_embeddings() is own.get_output_embeddings()
    assert Draft(own).shape != Draft(whole).shape


@pytest.mark.parametrize("rule", SETTINGS)
@pytest.mark.parametrize("runner", ["compile", "eager"])
def test_only_kept_tokens_are_proposed_and_greedy_text_is_the_targets(rule: str, runner: str) -> None:
    prompts, settings = prompts_of([1, 2, 9, 30, 17]), SETTINGS[rule]
    responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=3, runner=runner)
    proposed = {
        token for one in responses for token, was in zip(one.response_ids, one.proposed_mask, strict=True) if was
    }
    assert proposed
    assert proposed <= set(KEPT)
    if rule == "greedy":
        plain, _ = decode(TARGET, None, prompts, DecodeSettings(GREEDY, 0, "greedy", 24))
        assert texts(responses) == texts(plain)
        assert set(OTHERS) & {token for text in texts(plain) for token in text}  # the target says what the draft cannot


@pytest.mark.parametrize("rule", ["greedy", "sample", "cut off", "greedy-draft"])
def test_compiled_code_draws_what_python_draws(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, returned = [], CompiledLoop._next
    monkeypatch.setattr(CompiledLoop, "_next", lambda self: counted.append(1) or returned(self))

    def said(runner: str) -> list[Any]:
        prompts = prompts_of([1, 2, 9, 30, 17])
        return decode(TARGET, ModelDrafter(DRAFT), prompts, SETTINGS[rule], batch_size=3, runner=runner)[0]

    for own, other in zip(said("compile"), said("eager"), strict=True):
        assert own.response_ids == other.response_ids
        assert own.accepted_counts == other.accepted_counts
        assert own.overlap_sum == pytest.approx(other.overlap_sum, rel=1e-4)
    assert counted


@pytest.mark.simulation
@pytest.mark.parametrize("rule", ["sample", "greedy-draft", "block"])
def test_sampled_text_has_the_targets_distribution(rule: str) -> None:
    settings = DecodeSettings(SamplingSettings(0.9), 3, rule)
    few = trimmed(SMALL_DRAFT, list(range(0, vocab_rows(SMALL_DRAFT), 2))[:4])
    assert sampled_text_p_value(ModelDrafter(few), settings, trials(2000, 6000)) > 1e-3


def test_replay_agrees_with_decoding_and_a_token_outside_is_never_accepted() -> None:
    settings = DecodeSettings(SamplingSettings(1.0), 4, "sample", 40)
    prompts = [(str(number), ids) for number, (_, ids) in enumerate(prompts_of([5] * 64))]
    responses, _ = decode(TARGET, ModelDrafter(DRAFT), prompts, settings, batch_size=16)
    stored = [
        HeldoutResponse(one.key, "d", one.prompt_ids, one.response_ids, one.log_target_probs) for one in responses
    ]
    scores = score_tokens(DRAFT, stored, settings.sampling)
    for text, own in zip(stored, scores, strict=True):
        outside = [token in OTHERS for token in text.response_ids]
        assert (own.accept_probs("sample")[outside] == 0).all()
        assert not own.matches[outside].any()
    tokens = sum(map(len, scores))
    replayed = tokens / expected_blocks_of(scores, "sample", (4,)).sum()
    assert replayed == pytest.approx(tokens / sum(one.blocks for one in responses), rel=0.05)


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], [4, 3, 2, 1], [1, 1, 2, 3], [1, 2, 3, VOCAB], [-1, 2, 3, 4], "all", [1.0, 2, 3, 4]]
)
def test_ids_that_cannot_be_are_refused(ids: Any) -> None:
    assert HEAD_IDS in refused(trimmed, WHOLE, ids)


def test_a_head_with_a_cap_is_refused() -> None:
    assert "student.head_tokens" in refused(trimmed, tiny_model("gemma2"))


def test_a_copy_is_trimmed_too() -> None:
    again = copy.deepcopy(DRAFT)
    assert isinstance(again.get_output_embeddings(), FrequentHead)
    torch.testing.assert_close(logits(again)[..., KEPT], logits(DRAFT)[..., KEPT], rtol=0, atol=0)
