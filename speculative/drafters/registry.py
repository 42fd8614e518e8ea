"""Drafters by name: a file of this folder that registers one is all that a new way to draft takes."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from speculative.drafters.drafter import Drafter
from speculative.errors import UserError
from speculative.rules.tree import TokenTree


@dataclass(frozen=True)
class Parts:
    """What a drafter may be made of; each takes what it needs, and where it finds None it does as it likes.

    draft: makes the drafter of a draft model. datastore: of past responses (`retrieval.Datastore`). layers: of an early exit.
    ngrams: (longest, shortest) to look up. then_gamma: tokens of the draft behind a lookup.
    """

    target: PreTrainedModel
    draft: Callable[[], Drafter] | None = None
    datastore: Any = None
    layers: int | None = None
    ngrams: tuple[int, int] | None = None
    then_gamma: int | None = None

    def drafter(self) -> Drafter:
        """Of the draft model. Raises UserError where there is none."""
        if self.draft is None:
            raise UserError("this drafter needs a draft model: give one")
        return self.draft()


Make = Callable[[Parts], Drafter]


class Registered(NamedTuple):
    """How a drafter is made, and the tree of candidates that it grows where it is no chain."""

    make: Make
    tree: TokenTree | None = None


_REGISTERED: dict[str, Registered] = {}


def registers(name: str, tree: TokenTree | None = None) -> Callable[[Make], Make]:
    """Decorator of the function that makes the drafter of this name."""

    def kept(make: Make) -> Make:
        _REGISTERED[name] = Registered(make, tree)
        return make

    return kept


def registered() -> dict[str, Registered]:
    """Every drafter by the name of its way to decode."""
    for file in Path(__file__).parent.glob("*.py"):
        importlib.import_module(f"{__package__}.{file.stem}")
    return _REGISTERED


def make_drafter(name: str, parts: Parts) -> Drafter:
    """A fresh drafter. Raises UserError for a name that is not registered and for a part that is missing."""
    found = registered().get(name)
    if found is None:
        raise UserError(f"unknown drafter {name!r}: must be one of {', '.join(sorted(registered()))}")
    return found.make(parts)
