"""Where a prompt comes from, as a user says it, and what is then read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Turn = dict[str, Any]  # role, content, and what else of a message the chat template reads
Turns = tuple[Turn, ...]


class PromptSource(BaseModel):
    """One place prompts come from; a config's keys are these."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    path: str = Field(
        description="file, directory, glob, `datasets` hub id, or `stdlib` (the embedded Python domain); an .arrow file of a run's prompts/ "
        "or of `understudy traffic export` gives token ids, which are taken as they are"
    )
    format: Literal["auto", "jsonl", "json", "parquet", "csv", "txt", "arrow"] = Field(
        "auto", description="auto = by suffix"
    )
    split: str = Field("train", description="split of a hub id; `train` or `heldout` of stdlib")
    subset: str | None = Field(None, description="configuration name of a hub dataset")
    revision: str | None = Field(None, description="hub revision")
    prompt_column: str | None = Field(None, description="column with a plain prompt")
    reference_column: str | None = Field(None, description="column with the dataset's own answer")
    messages_column: str | None = Field(None, description="column with chat messages (role, content)")
    turns: Literal["last", "all"] = Field(
        "last",
        description="of a conversation: the last assistant turn is to be written, or each of them, a prompt of its own",
    )
    tools_column: str | None = Field(
        None,
        description="column with tool definitions for the chat template, a list or its JSON; null = `tools` beside messages",
    )
    system: str | None = Field(None, description="system message put before every prompt (chat)")
    domain: str | None = Field(None, description="domain label of every row")
    domain_column: str | None = Field(None, description="column with the domain label")
    limit: int | None = Field(None, ge=1, description="use only this many rows, spread over the source by content hash")


class Template(BaseModel):
    """How a prompt becomes tokens; a config's keys are these."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    mode: Literal["auto", "chat", "plain"] = Field(
        "auto", description="chat = the target tokenizer's chat template; auto = chat when there is one"
    )
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="e.g. {enable_thinking: false}")


@dataclass(frozen=True)
class PromptRow:
    """One prompt: ``text`` (plain) or ``messages`` (chat, up to the assistant turn to be written), never both.

    ``tools`` are what the chat template may offer. ``reference`` is the dataset's own answer when one is mapped. ``origin`` tells the user where the row stands:
    ``file.jsonl:17`` (line), ``file.parquet:17`` (row) or ``hub-id[train]:17``, counted from 1. ``prompt_ids``, ``prompt_id``: of one
    that was rendered before: its tokens are these, and it is known by this id.
    """

    text: str | None
    messages: Turns | None
    reference: str | None
    domain: str
    origin: str
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_id: str = ""


def row_before(text: str, turns: str, domain: str, origin: str) -> PromptRow:
    """A prompt as it was before it was rendered. turns: JSON of {messages, tools} of a conversation, else empty."""
    if not turns:
        return PromptRow(text, None, None, domain, origin)
    said = json.loads(turns)
    messages = tuple(map(dict, said["messages"]))
    return PromptRow(None, messages, None, domain, origin, tuple(said.get("tools") or ()) or None)


def rendered_row(values: Mapping[str, Any], domain: str, origin: str) -> PromptRow:
    """A prompt that was rendered before, from the columns of a file. Raises ValueError, TypeError or KeyError: they hold something else."""
    prompt_id, text, turns = words = [values.get(name) or "" for name in ("prompt_id", "text", "turns")]
    ids = values.get("prompt_ids")
    if not (prompt_id and ids and all(type(token) is int and 0 <= token < 1 << 31 for token in ids)):
        raise ValueError("no prompt_ids or no prompt_id")
    if not all(isinstance(word, str) for word in (*words, domain)):
        raise ValueError("prompt_id, text, turns or domain is no text")
    return replace(row_before(text, turns, domain, origin), prompt_ids=tuple(ids), prompt_id=prompt_id)
