"""A row of the table of architectures is all that compiled code and fused kernels know of one."""

from dataclasses import fields, replace

import pytest
import torch
from tiny_models import texts, tiny_model

from speculative.decode import DecodeSettings, decode
from speculative.engine.architectures import ARCHITECTURES, Architecture, Parts, is_plain, rotary_of
from speculative.engine.cached_model import CachedModel
from speculative.rules.sampling import GREEDY


def test_a_row_is_enough_for_another_architecture(monkeypatch):
    model, settings = tiny_model("seed_oss"), DecodeSettings(GREEDY, max_tokens=12)
    prompts = [("a", [1, 2, 3])]
    eager, _ = decode(model, None, prompts, settings)
    assert CachedModel(model, "model", 1, 8, "compile").compiled is None
    monkeypatch.setitem(ARCHITECTURES, "seed_oss", Architecture())
    assert CachedModel(model, "model", 1, 8, "compile").compiled is not None
    compiled, _ = decode(model, None, prompts, settings)
    assert texts(compiled) == texts(eager)


@pytest.mark.parametrize("field", [field.name for field in fields(Architecture)])
def test_every_name_of_a_row_is_read(field, monkeypatch):
    model = tiny_model("qwen3")
    Parts(model), rotary_of(model)
    monkeypatch.setitem(ARCHITECTURES, "qwen3", replace(ARCHITECTURES["qwen3"], **{field: "absent"}))
    with pytest.raises(AttributeError, match="absent"):
        Parts(model), rotary_of(model)
    assert is_plain(model)
    assert CachedModel(model, "model", 1, 8, "compile").compiled is None


def test_parts_are_those_of_the_first_layers_only():
    model = tiny_model("mistral", num_hidden_layers=3, sliding_window=12)
    model.config.num_hidden_layers = 2
    parts = Parts(model)
    assert [layer.window for layer in parts.layers] == [12, 12]
    assert torch.equal(parts.norm, model.model.norm.weight)
