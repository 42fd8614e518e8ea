"""Parts of a report's sections, their sentences and their registry.

A new section is a registered pure function in a file of distill/report/sections: a view of a result in; paragraphs, tables and pieces with
a template of their own out. Every sentence is from templates/sentences.j2: facts in, plain text out. The page escapes it, a terminal prints
it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distill.engines.protocol.verdict import environment
from distill.report.table import Table
from distill.report.view import View
from distill.run.readback_record import SERVED_TEXT
from distill.run.verdict_record import WAYS
from speculative.measure.effects import words
from speculative.measure.replay import WORRYING_Z, agreement_words


@dataclass(frozen=True)
class Piece:
    """A part that is neither a paragraph nor a table: the template branch `kind` (`fine`: small type; `heading`, ...), given `values`."""

    kind: str
    values: Any


Part = str | Table | Piece
# Parts from top to bottom. A plain string: why there is nothing to show. None: the section is left out of this report.
Content = Sequence[Part] | str | None


@dataclass(frozen=True)
class Section:
    """A titled part of the page. order: from top to bottom. nav: its text in the row of links, "" for none."""

    id: str
    title: str
    order: int
    nav: str
    make: Callable[[View], Content] = field(repr=False)


SECTIONS: dict[str, Section] = {}


def section(name: str, title: str, *, order: int, nav: str = "") -> Callable[[Callable[[View], Content]], Any]:
    """Register a function as the maker of a section."""

    def register(make: Callable[[View], Content]) -> Callable[[View], Content]:
        SECTIONS[name] = Section(name, title, order, nav, make)
        return make

    return register


def figures(view: View, *captions: tuple[str, str]) -> Piece:
    """Figures side by side: (name, caption) of each; those without data are left out."""
    return Piece("figures", [(name, caption, view.figures[name]) for name, caption in captions if name in view.figures])


TEMPLATES = Path(__file__).parent / "templates"


def say(name: str, *facts: Any) -> list[str]:
    """The paragraphs of a macro of sentences.j2, which blank lines separate; none if it has nothing to say about these facts."""
    text = str(getattr(_macros(), name)(*facts))
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def glossary() -> dict[str, str]:
    """Word -> meaning."""
    return dict(_macros().GLOSSARY)


@functools.cache
def _macros() -> Any:
    # The text is no markup; whoever shows it escapes it.
    templates = environment(TEMPLATES)
    templates.filters["f"] = format
    templates.globals |= {"words": words, "agreement_words": agreement_words, "WAYS": WAYS}
    templates.globals |= {"WORRYING_Z": WORRYING_Z, "SERVED_TEXT": SERVED_TEXT}
    return templates.get_template("sentences.j2").module
