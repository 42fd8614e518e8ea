"""Ways to decode by name. To add a way, add a file to this folder that registers one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from speculative.drafters.drafter import Drafter
from speculative.errors import UserError
from speculative.rules.tree import TokenTree


class DraftModel(Protocol):
    """A draft model and how it drafts: `draft.Draft`."""

    @property
    def model(self) -> PreTrainedModel: ...

    def drafter(self) -> Drafter: ...


@dataclass(frozen=True)
class Parts:
    """Inputs for making a drafter; None selects its default. past: responses to other prompts
    (`past_responses.ResponseIndex`). layers: of an early
    exit. ngrams: (longest, shortest) to look up. then_gamma: tokens that the draft proposes after a lookup.
    """

    target: PreTrainedModel
    draft: DraftModel | None = None
    past: Any = None
    layers: int | None = None
    ngrams: tuple[int, int] | None = None
    then_gamma: int | None = None

    def drafter(self) -> Drafter:
        """The drafter of the draft model."""
        assert self.draft is not None, "Recipe.drafter refuses a way whose draft is missing"
        return self.draft.drafter()


@dataclass(frozen=True)
class Recipe:
    """How a way to decode is built. needs: "draft" (a draft model), "past" (past responses). served: whether an engine can run it.
    replayed: whether replay predicts it. looks_up: prompt lookup comes first. parallel: the draft proposes a block in one call.
    tree: what it drafts, if not chains.
    """

    name: str
    make: Callable[[Parts], Drafter]
    needs: tuple[str, ...] = ()
    served: bool = True
    replayed: bool = True
    looks_up: bool = False
    parallel: bool = False
    tree: TokenTree | None = None

    def drafter(self, parts: Parts) -> Drafter:
        """A new drafter. Raises UserError for a part that is missing."""
        for part in self.needs:
            if getattr(parts, part) is None:
                raise UserError(f"{self.name} needs {'a draft model' if part == 'draft' else 'past responses'}")
        return self.make(parts)


_RECIPES: dict[str, Recipe] = {}


def way(name: str, **details: Any) -> Callable[[Callable[[Parts], Drafter]], Callable[[Parts], Drafter]]:
    """Decorator: register the function that makes the drafter of this way. details: the other fields of `Recipe`."""

    def register(make: Callable[[Parts], Drafter]) -> Callable[[Parts], Drafter]:
        _RECIPES[name] = Recipe(name, make, **details)
        return make

    return register


@functools.cache
def recipes() -> dict[str, Recipe]:
    """Every way by name."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        importlib.import_module(f"{__package__}.{file.stem}")
    return _RECIPES
