"""Drafters by name. To add a drafter, add a file to this folder that registers one."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from speculative.drafters.drafter import Drafter
from speculative.drafters.gamma import GammaPolicy
from speculative.errors import UserError
from speculative.rules.tree import TokenTree


@dataclass(frozen=True)
class Parts:
    """Inputs for making a drafter; None selects its default. draft: makes the drafter of a draft model. datastore: of past responses
    (`retrieval.Datastore`). layers: of an early exit. ngrams: (longest, shortest) to look up. then_gamma: tokens that the draft proposes
    after a lookup.
    """

    target: PreTrainedModel
    draft: Callable[[], Drafter] | None = None
    datastore: Any = None
    layers: int | None = None
    ngrams: tuple[int, int] | None = None
    then_gamma: int | None = None

    def drafter(self) -> Drafter:
        """The drafter of the draft model. Raises UserError if there is none."""
        if self.draft is None:
            raise UserError("this drafter needs a draft model: give one")
        return self.draft()


Make = Callable[[Parts], Drafter]


class Registered(NamedTuple):
    """A function that makes a drafter, its token tree if it does not draft chains, and what makes its policy for a largest gamma, if not
    every block has the same.
    """

    make: Make
    tree: TokenTree | None = None
    policy: Callable[[int], GammaPolicy] | None = None


_REGISTERED: dict[str, Registered] = {}


def registers(
    name: str, tree: TokenTree | None = None, policy: Callable[[int], GammaPolicy] | None = None
) -> Callable[[Make], Make]:
    """Decorator: register the function that makes the drafter of this name."""

    def kept(make: Make) -> Make:
        _REGISTERED[name] = Registered(make, tree, policy)
        return make

    return kept


def registered() -> dict[str, Registered]:
    """All registered drafters by name."""
    for file in Path(__file__).parent.glob("*.py"):
        importlib.import_module(f"{__package__}.{file.stem}")
    return _REGISTERED


def make_drafter(name: str, parts: Parts) -> Drafter:
    """Make a new drafter. Raises UserError for a name that is not registered and for a part that is missing."""
    found = registered().get(name)
    if found is None:
        raise UserError(f"unknown drafter {name!r}: must be one of {', '.join(sorted(registered()))}")
    return found.make(parts)
