"""The ways to decode by name."""

import pytest
from tiny_models import VOCAB, generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.drafters.past_responses import ResponseIndex
from speculative.drafters.registry import Parts, recipes
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

TARGET = tiny_model(num_hidden_layers=3)
DRAFT = perturbed(TARGET)
DRAFT.config.pard_token = VOCAB - 1
PARTS = Parts(TARGET, Draft(DRAFT), ResponseIndex.build([[1, 2, 3, 4]], VOCAB), ngrams=(3, 2))


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_way_decodes_the_text_of_the_target(name: str) -> None:
    recipe = recipes()[name]
    settings = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=12, tree=recipe.tree)
    prompts = prompts_of([5, 9])
    responses = decode(TARGET, recipe.drafter(PARTS), prompts, settings)[0]
    assert texts(responses) == generated(TARGET, prompts, 12)
