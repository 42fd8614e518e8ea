"""Entropies and most probable tokens against one text at a time, computed by hand."""

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, perturbed, prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.explain.target_view import target_entropies, top_tokens
from speculative.measure import token_scores as scores_module
from speculative.measure.token_scores import values_by_text
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

TARGET = tiny_model()
SAMPLING = SamplingSettings(0.8, top_k=4)


@pytest.fixture(scope="module")
def texts():
    responses, _ = decode(
        TARGET, None, prompts_of([9, 1, 23, 4]), DecodeSettings(SAMPLING, max_tokens=15, eos_ids=(3,))
    )
    return [responses[0], type(responses[0])(key="empty", prompt_ids=[1, 2]), *responses[1:]]


def logits_of(model, text):
    with torch.no_grad():
        logits = model(torch.tensor([[*text.prompt_ids, *text.response_ids]])).logits[0]
    return logits[len(text.prompt_ids) - 1 : -1].double() if text.response_ids else logits[:0].double()


def test_entropies_equal_one_text_at_a_time(texts, monkeypatch):
    whole = target_entropies(TARGET, texts)
    assert [len(values) for values in whole] == [len(text.response_ids) for text in texts]
    for text, entropies in zip(texts, whole, strict=True):
        log_probs = logits_of(TARGET, text).log_softmax(-1)
        expected = -(log_probs.exp() * log_probs).sum(-1)
        np.testing.assert_allclose(entropies, expected, rtol=1e-4, atol=1e-5)  # float32, other shapes
    monkeypatch.setattr(scores_module, "LOGITS_PER_FORWARD", 1)
    monkeypatch.setattr(scores_module, "PROBS_PER_CHUNK", 150)
    for chunked, entropies in zip(target_entropies(TARGET, texts), whole, strict=True):
        np.testing.assert_allclose(chunked, entropies, rtol=1e-4, atol=1e-5)  # float32, other shapes


def test_tokens_of_probability_zero_do_not_spoil_the_entropy(texts):
    padded = tiny_model()
    hook = padded.lm_head.register_forward_hook(
        lambda module, args, logits: logits.index_fill(-1, torch.arange(40, VOCAB), -torch.inf)
    )
    try:
        entropies = np.concatenate(target_entropies(padded, texts))
        tops = top_tokens(padded, texts, VOCAB)
    finally:
        hook.remove()
    expected = np.concatenate(
        [torch.special.entr(logits_of(TARGET, text)[:, :40].softmax(-1)).sum(-1).numpy() for text in texts]
    )
    np.testing.assert_allclose(entropies, expected, rtol=1e-4, atol=1e-5)  # float32, other shapes
    assert all((probs[:, 40:] == 0).all() and np.isfinite(probs).all() for _, probs in tops)


@pytest.mark.parametrize("sampling", [None, GREEDY, SAMPLING])
def test_most_probable_tokens_equal_a_sorted_distribution(texts, sampling):
    draft = perturbed(TARGET)
    own = SAMPLING if sampling is SAMPLING else SamplingSettings()
    for text, (ids, probs) in zip(texts, top_tokens(draft, texts, 6, sampling), strict=True):
        assert ids.shape == probs.shape == (len(text.response_ids), 6)
        logits = logits_of(draft, text)
        order = logits.argsort(-1, descending=True)[:, :6]
        assert ids.tolist() == order.tolist()
        expected = logits_to_probs(logits, own).gather(-1, order)
        np.testing.assert_allclose(probs, expected, rtol=1e-4, atol=1e-5)  # float32, other shapes
        if sampling is SAMPLING:
            assert (probs[:, 4:] == 0).all()


def test_a_broken_model_is_named(texts):
    broken = tiny_model()
    with torch.no_grad():
        broken.lm_head.weight[7] = float("nan")
    for call in (lambda: target_entropies(broken, texts), lambda: top_tokens(broken, texts)):
        with pytest.raises(UserError, match="model returned NaN"):
            call()


def test_logits_come_without_gradients_and_leave_the_caller_his_own(texts):
    model = tiny_model().train()

    def seen(logits_RV, ids_R):
        assert torch.is_grad_enabled()
        assert model.training
        assert not logits_RV.requires_grad
        return ids_R.double().unsqueeze(1)

    found = values_by_text(model, texts, seen, 1, "model")
    assert [own[:, 0].tolist() for own in found] == [list(text.response_ids) for text in texts]
