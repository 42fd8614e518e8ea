"""Parts of a report's sections and their registry. A new section is a registered pure function in a file of distill/report/sections: a
view of a result in; paragraphs, tables and pieces with a template of their own out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distill.report.table import Table
from distill.report.view import View


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
