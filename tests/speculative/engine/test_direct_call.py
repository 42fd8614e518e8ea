"""A plain decoder called layer by layer gives the very logits of its own call; whatever is otherwise is left to its own call."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine import cached_model
from speculative.engine.cached_model import CachedModel
from speculative.engine.calls import PLAIN_DECODERS, DirectCall, _same, direct_call
from speculative.rules.sampling import SamplingSettings


def logits(model) -> list[torch.Tensor]:
    """One token and several, of rows of one length, of ragged ones and of one row among others."""
    cached = CachedModel(model, "model", 2, 64)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, VOCAB, (2, 30)))
    with torch.no_grad():
        cached.prefill(tokens.numpy(), [0, 1], np.array([9, 9]))
        found = [
            cached.feed(tokens[:, 10 : 10 + count], np.array(starts), count)
            for count, starts in ((1, [9, 9]), (4, [10, 10]), (1, [14, 11]), (3, [15, 12]))
        ]
        found.append(cached.feed(tokens[:1, 20:22], np.array([18]), 1, rows=[1]))
    cached.close()
    return found


@pytest.mark.parametrize("kind", sorted(PLAIN_DECODERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_are_those_of_the_models_own_call(kind: str, dtype: torch.dtype, monkeypatch) -> None:
    model = tiny_model(kind, dtype=dtype)
    with patch.object(cached_model, "direct_call", lambda model: None):
        own = logits(model)
    logits(model)  # compares

    def refused(*args, **kwargs):
        raise AssertionError("the model's own call")

    # The prompts are read by it: their calls have no mask of ours.
    body, prefill = type(model.base_model), type(model.base_model).forward
    monkeypatch.setattr(
        body, "forward", lambda self, *a, **k: prefill(self, *a, **k) if k["input_ids"].shape[1] == 9 else refused()
    )
    for ours, theirs in zip(logits(model), own, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "phi3", "gpt2", "falcon"])
def test_a_model_of_another_kind_is_called_as_it_wants(kind: str) -> None:
    assert direct_call(tiny_model(kind)) is None


def test_a_call_that_somebody_listens_to_or_has_replaced_is_made() -> None:
    model = tiny_model()
    assert direct_call(model) is not None
    for module in (model, model.model):
        hook = module.register_forward_hook(lambda *args: None)
        assert direct_call(model) is None
        hook.remove()
        before = module.register_forward_pre_hook(lambda *args: None)
        assert direct_call(model) is None
        before.remove()
        module.forward = module.forward
        assert direct_call(model) is None
        del module.forward
    assert direct_call(model) is not None
    model.model.compile()
    assert direct_call(model) is None
    assert direct_call(torch.compile(tiny_model())) is None
    assert direct_call(get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))) is None


def test_layers_that_see_a_window_are_not_called_directly_once_it_counts() -> None:
    model = tiny_model("mistral", sliding_window=16)
    assert CachedModel(model, "model", 1, 64)._direct is None
    assert CachedModel(model, "model", 1, 16)._direct is not None


@pytest.mark.parametrize("itself", [False, True])
def test_one_that_gives_other_logits_is_never_trusted(itself: bool, monkeypatch) -> None:
    """As a release of transformers might that puts something between the layers and the head; also as its own draft."""
    prompts, settings = prompts_of([5, 9]), DecodeSettings(SamplingSettings(0.7), 3, max_tokens=20)

    def pair():
        target = tiny_model(seed=3)
        return target, target if itself else tiny_model(seed=4)

    def said(target, draft):
        return texts(decode(target, ModelDrafter(draft), prompts, settings)[0])

    own, changed, called, calls = said(*pair()), pair(), DirectCall.__call__, []

    def other(self, *args):
        calls.append(self)
        return called(self, *args) * 1.5

    monkeypatch.setattr(DirectCall, "__call__", other)
    assert [said(*changed), said(*changed)] == [own, own]
    assert len(calls) == (1 if itself else 2)


def test_layers_that_want_something_else_are_called_by_their_model(monkeypatch) -> None:
    model, own = tiny_model(), logits(tiny_model())

    def refused(self, *args):
        raise TypeError("forward() missing 1 required positional argument")

    monkeypatch.setattr(DirectCall, "__call__", refused)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits(model), own, strict=True))


def test_as_many_layers_are_called_as_the_config_says() -> None:
    model = tiny_model(num_hidden_layers=3)
    model.config.num_hidden_layers = 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits(model), logits(model), strict=True))


def test_logits_that_are_broken_are_no_difference(monkeypatch) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    logits(model)
    assert _same[model]
