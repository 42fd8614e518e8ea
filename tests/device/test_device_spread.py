"""A target whose layers lie on two devices: the text, the teacher's word and the judgement of the same target on one."""

import copy
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tiny_models import perturbed, prompts_of, texts, tiny_model

from distill.models.heads import SplitModel
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import devices_of
from speculative.measure.self_checks import self_checks
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings
from speculative.rules.tree import TokenTree

pytestmark = pytest.mark.device

CPU, GPU = torch.device("cpu"), "cuda:0"
SETTINGS = DecodeSettings(SamplingSettings(0.9, top_p=0.95), 3, Rule.named("sample"), max_tokens=6, eos_ids=(5,))
PROMPTS = prompts_of([7, 3, 12])


def spread(model: Any) -> Any:
    """The model on the pretend device but for its last layer and head, hooked as accelerate's `dispatch_model` hooks them."""
    model = copy.deepcopy(model)
    away = {"model.layers.1": model.model.layers[1], "lm_head": model.lm_head}
    for part in away.values():
        add_hook_to_module(part, AlignDevicesHook(CPU, place_submodules=True))
    for part in (model.model.embed_tokens, model.model.layers[0], model.model.norm, model.model.rotary_emb):
        add_hook_to_module(part.to("cuda"), AlignDevicesHook(GPU, place_submodules=True))
    add_hook_to_module(model, AlignDevicesHook(GPU, io_same_device=True))
    model.hf_device_map = {"model": "cuda:0"} | dict.fromkeys(away, "cpu")
    return model


@pytest.mark.parametrize("tree", [None, TokenTree.from_branching((2, 1))])
def test_a_spread_target_decodes_as_a_whole_one(tree: TokenTree | None) -> None:
    target = tiny_model()
    draft = perturbed(target)
    settings = (
        SETTINGS
        if tree is None
        else DecodeSettings(SETTINGS.sampling, 2, Rule.named("sample"), max_tokens=6, tree=tree)
    )
    expected, _ = decode(target, ModelDrafter(draft), PROMPTS, settings, batch_size=2)
    parts = spread(target)
    assert [device.type for device in devices_of(parts)] == ["cuda", "cpu"]
    found, _ = decode(parts, ModelDrafter(copy.deepcopy(draft).to("cuda")), PROMPTS, settings, batch_size=2)
    assert texts(found) == texts(expected)


def test_a_spread_target_teaches_and_is_checked() -> None:
    target = tiny_model()
    ids_BT = torch.tensor([PROMPTS[0][1]])
    split, parts = SplitModel(target), SplitModel(spread(target))
    hidden_BTD = parts.hidden(ids_BT.to("cuda"))
    assert hidden_BTD.device.type == parts.head(hidden_BTD).device.type == "cuda"
    torch.testing.assert_close(parts.head(hidden_BTD).cpu(), split.head(split.hidden(ids_BT)))
    assert self_checks(parts.model, PROMPTS[:2], SETTINGS)["alpha_live"] == pytest.approx(1.0, abs=1e-3)
