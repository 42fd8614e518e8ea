"""Settings of a source of prompts, and the rows that are read from it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Turn = dict[str, Any]  # role, content, and other fields that the chat template reads
Turns = tuple[Turn, ...]


class Section(BaseModel):
    """A frozen section of a config. An unknown key or a wrong type is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class PromptSource(Section):
    """One source of prompts. The fields are keys of a config."""

    path: str = Field(
        description="file, directory, glob, `datasets` hub id, or `stdlib` (built-in Python prompts); an .arrow file of a run's prompts/ "
        "or of `understudy traffic export` holds token ids, which are used unchanged"
    )
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "txt", "arrow"] = Field(
        "auto", description="file format; auto = by suffix"
    )
    split: str = Field("train", description="split of a hub id; `train` or `heldout` of stdlib")
    subset: str | None = Field(None, description="configuration name of a hub dataset")
    revision: str | None = Field(None, description="hub revision")
    streaming: bool = Field(False, description="read a hub dataset as it comes, without a copy on this disk")
    prompt_column: str | None = Field(
        None,
        description="column with a prompt, or a template of columns, such as `{instruction}\\n\\n{input}`; an empty column leaves out "
        "the text before it",
    )
    reference_column: str | None = Field(None, description="column with the dataset's answer, as text or turns")
    messages_column: str | None = Field(
        None, description="column with chat messages (role, content), as a list or as JSON text"
    )
    turns: Literal["last", "all"] = Field(
        "last",
        description="assistant turns of a conversation to train on: the last, or all (each becomes a prompt)",
    )
    tools_column: str | None = Field(
        None,
        description="column with tool definitions for the chat template, as a list or JSON; null = `tools`, if there is one",
    )
    system: str | None = Field(None, description="system message to put before every prompt (chat)")
    domain: str | None = Field(None, description="domain label for all rows")
    domain_column: str | None = Field(None, description="column with the domain label")
    limit: int | None = Field(None, ge=1, description="most rows to use, chosen over the whole source by content hash")


class Template(Section):
    """How a prompt becomes tokens. The fields are keys of a config."""

    mode: Literal["auto", "chat", "plain"] = Field(
        "auto", description="chat = use the target's chat template; plain = do not; auto = chat if there is one"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="more arguments for the chat template, e.g. {enable_thinking: false}"
    )


@dataclass(frozen=True)
class PromptRow:
    """One prompt: ``text`` (plain) or ``messages`` (chat, up to the assistant turn to be written), never both.

    ``tools``: tool definitions for the chat template. ``reference``: the dataset's answer, if a column is mapped. ``origin``: where the
    row is, counted from 1: ``file.jsonl:17`` (line), ``file.parquet:17`` (row) or ``hub-id[train]:17``. Of a prompt that was rendered
    earlier: ``prompt_ids`` and ``prompt_id``, its tokens and id; ``tokenizer``, the fingerprint of theirs, empty where a manifest has it.
    ``logged``: of a row of a log, its answer as JSON; see `data/prompts/logs.py`, which may give ``prompt_ids`` too.
    """

    text: str | None
    messages: Turns | None
    reference: str | None
    domain: str
    origin: str
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_id: str = ""
    tokenizer: str = ""
    logged: str = ""


def row_before(text: str, turns: str, domain: str, origin: str) -> PromptRow:
    """The prompt before it was rendered. ``turns``: JSON of {messages, tools} for a conversation, else empty."""
    if not turns:
        return PromptRow(text, None, None, domain, origin)
    said = json.loads(turns)
    messages = tuple(map(dict, said["messages"]))
    return PromptRow(None, messages, None, domain, origin, tuple(said.get("tools") or ()) or None)


def rendered_row(values: Mapping[str, Any], domain: str, origin: str) -> PromptRow:
    """A prompt that was rendered earlier, from the columns of a file. Raises ValueError, TypeError or KeyError for other contents."""
    prompt_id, turns, tokenizer = words = [values.get(name) or "" for name in ("prompt_id", "turns", "tokenizer")]
    text = values.get("text") or values.get("prompt") or ""  # a stored prompt, or a row of a dataset of responses
    ids = values.get("prompt_ids")
    if not (prompt_id and ids and all(type(token) is int and 0 <= token < 1 << 31 for token in ids)):
        raise ValueError("no prompt_ids or no prompt_id")
    if not all(isinstance(word, str) for word in (*words, text, domain)):
        raise ValueError("prompt_id, text, turns, tokenizer or domain is not text")
    before = row_before(text, turns, domain, origin)
    return replace(before, prompt_ids=tuple(ids), prompt_id=prompt_id, tokenizer=tokenizer)
