"""Options of prompts that scripts share, and the rows that they name."""

from __future__ import annotations

from typing import Annotated

import typer

from data.prompts.prompt import PromptRow, PromptSource
from data.prompts.sources import load_source
from speculative.errors import UserError

PromptColumn = Annotated[str, typer.Option(help="column of --prompts; default: a common name like `prompt`")]
MessagesColumn = Annotated[str, typer.Option(help="column of --prompts with chat messages (role, content)")]


def load_rows(path: str, prompt_column: str, messages_column: str, domain_column: str | None = None) -> list[PromptRow]:
    """The rows of a source; their domain is that column's if there is one."""
    columns = {"prompt_column": prompt_column or None, "messages_column": messages_column or None}
    try:
        return load_source(PromptSource(path=path, domain_column=domain_column, **columns), preferred="prompt")
    except UserError:
        if domain_column is None:
            raise
        return load_rows(path, prompt_column, messages_column)
