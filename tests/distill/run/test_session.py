"""A pair is opened in one place, and refuses there what cannot be judged."""

from pathlib import Path

import pytest

from distill.config.load import load_config
from distill.run.session import open_pair
from speculative.engine.models import max_positions
from speculative.errors import UserError


def test_a_pair_has_prompts_that_both_models_take(tiny_config: Path, tiny_run: Path) -> None:
    config = load_config(tiny_config)
    pair = open_pair(config, str(tiny_run), 5, "sample")
    assert pair.context == min(max_positions(pair.target.model.config), max_positions(pair.draft.config))
    assert len(pair.prompts) == 5
    assert max(len(ids) for _, ids in pair.keyed) + config.serving.max_tokens <= pair.context
    assert pair.draft.dtype == pair.target.dtype
    assert (pair.settings.gamma, pair.settings.sampling.temperature) == (0, config.serving.temperature)


@pytest.mark.parametrize(
    ("prompts", "rule", "overrides", "words"),
    [
        (0, "greedy", [], "--prompts 0: give at least 1"),
        (5, "sample", ["serving.temperature=0"], "--rule sample samples from the target"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    tiny_config: Path, tiny_run: Path, prompts: int, rule: str, overrides: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        open_pair(load_config(tiny_config, overrides), str(tiny_run), prompts, rule)  # type: ignore[arg-type]
