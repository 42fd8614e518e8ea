"""One walk through a model's modules for a decode call; what is remembered of a model is forgotten once it changes."""

import pytest
from peft import LoraConfig, get_peft_model
from tiny_models import perturbed, prompts_of, tiny_model
from torch import nn

from speculative.decode import DecodeSettings, decode
from speculative.drafters.drafter import ModelDrafter
from speculative.engine import survey as module_of_survey
from speculative.engine.survey import Survey
from speculative.rules.sampling import SamplingSettings


def test_a_decode_call_walks_each_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = []

    class Counted(Survey):
        def __init__(self, model: nn.Module) -> None:
            walked.append(model)
            super().__init__(model)

    target = tiny_model()
    draft = perturbed(target)
    settings = DecodeSettings(SamplingSettings(0.7), 3, max_tokens=12)
    decode(target, ModelDrafter(draft), prompts_of([5, 9]), settings)  # checks of a first use walk too
    monkeypatch.setattr(module_of_survey, "Survey", Counted)
    decode(target, ModelDrafter(draft), prompts_of([5, 9]), settings)
    assert walked == [target, draft]


def test_adapters_that_are_switched_or_merged_change_the_state() -> None:
    model = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    before = Survey(model).state
    with model.disable_adapter():
        assert Survey(model).state != before
    assert Survey(model).state == before
    model.merge_adapter()
    assert Survey(model).state != before
