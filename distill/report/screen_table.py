"""The one look of a table on a screen."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table


def screen_table(title: str, columns: Sequence[str], *, words: Sequence[str] = ("",), **look: Any) -> Table:
    """A table with these heads; the columns named in `words` stand left, the others are numbers.

    look: `caption` and `padding` of the table; anything else is of every column.
    """
    table = Table(
        title=title, box=box.SIMPLE_HEAD, caption=look.pop("caption", None), padding=look.pop("padding", (0, 1))
    )
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", **look)
    return table
