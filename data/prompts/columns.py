"""What the columns of a table become: a prompt's text or turns, the dataset's answer, the domain."""

import contextlib
import difflib
import functools
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.prompts.conversation import QUESTION_COLUMNS, conversation_prompts, first_question, role_of, tools_of
from data.prompts.prompt import PromptRow, PromptSource, Turn
from speculative.errors import UserError

log = logging.getLogger(__name__)
say_once = functools.lru_cache(log.warning)  # A source may have many files, and be opened twice.

PROMPT_NAMES = ("prompt", "question", "instruction", "text", "input", "nl")
MESSAGES_NAMES = ("messages", "conversations", "conversation")
# Columns that are one prompt where their datasets (Alpaca, Dolly, SQuAD) have both.
TEMPLATES = ("{instruction}\n\n{input}", "{instruction}\n\n{context}", "{context}\n\n{question}")
SIDE_NAMES = ("input", "context", "system", "system_prompt")  # usually part of a prompt
TOOLS_NAME, ROLE_KEYS = "tools", {"role", "from"}
_FIELD = re.compile(r"\{([^{}]+)\}")


def near(name: str, names: Collection[str]) -> str:
    """The names most like one, as a phrase; empty if there are none."""
    alike = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return f" (near: {', '.join(alike)})" if alike else ""


@dataclass(frozen=True)
class Columns:
    """The columns of a table that become prompts. ``content``: of the text or turns, or a template of several ``fields``."""

    source: PromptSource
    content: str
    fields: Sequence[str]
    chat: bool
    questions: bool
    tools: str | None

    @property
    def wanted(self) -> list[str]:
        """All columns to read, in alphabetic order."""
        more = (self.source.reference_column, self.source.domain_column, self.tools)
        return sorted({*self.fields, *filter(None, more)})

    def rows(self, domain: str, values: Mapping[str, Any], origin: str) -> list[PromptRow]:
        """The prompts of one row. Raises UserError: a column is empty or contains something else."""
        source, named = self.source, self.source.reference_column
        reference = _answer(values.get(named), named, origin) if named else None
        label = domain_of(values, source.domain_column, domain, origin)
        value = first_question(values.get(self.content)) if self.questions else values.get(self.content)
        turns = turns_in(value, self.chat or self.content in MESSAGES_NAMES)
        if self.chat or turns:
            asked = conversation_prompts(turns or value, self.content, origin, source.system, source.turns == "all")
            rows = [PromptRow(None, before, reference or answer, label, at) for before, answer, at in asked]
        else:
            template = self.fields != [self.content]
            text = _joined(self.content, values, origin) if template else _filled(value, self.content, origin)
            rows = [prompt_row(text, reference, label, origin, source.system)]
        if self.tools and (self.chat or turns or source.tools_column):
            return [replace(row, tools=tools_of(values.get(self.tools), self.tools, origin)) for row in rows]
        return rows


def columns_of(name: str, columns: Sequence[str], source: PromptSource, preferred: str | None) -> Columns:
    """Choose the columns of a table: the configured ones, else the preferred or only common name, or a common pair.

    Raises UserError: no choice is clear, or a configured column is missing.
    """
    questions = set(columns) >= QUESTION_COLUMNS
    if questions and not (source.prompt_column or source.messages_column):
        log.info("%s: a benchmark's questions: a prompt is the first turn, a domain the category", name)
        label = source.domain_column or (None if source.domain else "category")
        source = source.model_copy(update={"prompt_column": "turns", "domain_column": label})
    content = source.prompt_column or source.messages_column or _usual_content(name, columns, source, preferred)
    chat = content == source.messages_column or (content in MESSAGES_NAMES and not source.prompt_column)
    fields = [content] if chat or content in columns else _FIELD.findall(content) or [content]
    tools = source.tools_column or (TOOLS_NAME if TOOLS_NAME in columns else None)
    chosen = Columns(source, content, fields, chat, questions, tools)
    for column in chosen.wanted:
        if column not in columns:
            raise UserError(f"{name}: no column {column!r}{near(column, columns)}; it has {', '.join(columns)}")
    side = SIDE_NAMES[: 2 if source.system else None]
    for column in [one for one in columns if one in side and one not in chosen.wanted]:
        whole = "\n\n".join(f"{{{one}}}" for one in columns if one in (column, content))
        fix = "add it to the turns" if chat else f"to join them set prompt_column: {json.dumps(whole)}"
        say_once(f"{source.path}: column {column!r} is not part of the prompts; {fix}")
    return chosen


def _usual_content(name: str, columns: Sequence[str], source: PromptSource, preferred: str | None) -> str:
    """The column, or template of columns, that a table without configured ones has."""
    # A column with another role cannot also be the prompt.
    free = [column for column in columns if column not in (source.reference_column, source.domain_column)]
    usual = [column for column in (*PROMPT_NAMES, *MESSAGES_NAMES) if column in free]
    for template in TEMPLATES:
        # Alpaca's `text` is prompt and answer in one.
        if set(usual) - {"text"} <= set(_FIELD.findall(template)) <= set(free):
            say_once(f"{source.path}: a prompt is {json.dumps(template)}; for another set prompt_column")
            return template
    if preferred in usual:
        usual = [preferred]
    if len(usual) != 1:
        matching = f"{len(usual)} columns match ({', '.join(usual)})" if usual else "no column has a common name"
        raise UserError(
            f"{name}: the prompt column is unclear, {matching}; set prompt_column or messages_column to one of "
            f"{', '.join(columns)}"
        )
    log.info("%s: taking column %r as the %s", name, usual[0], "prompt" if usual[0] in PROMPT_NAMES else "messages")
    return usual[0]


def _joined(template: str, values: Mapping[str, Any], origin: str) -> str:
    r"""A template with the row's values; ``\n`` is a line feed, and an empty column leaves out the text before it."""
    parts, end, whole = [""], 0, True
    for field in _FIELD.finditer(template):
        value = values.get(field[1])
        if filled := value is not None and bool(str(value).strip()):
            text = str(value) if isinstance(value, int | float) else _filled(value, field[1], origin)
            parts += [template[end : field.start()].replace("\\n", "\n"), text]
        whole, end = whole and filled, field.end()
    text = _filled("".join(parts), template, origin) + template[end:].replace("\\n", "\n")
    return text if whole else text.strip()


def turns_in(value: Any, chat: bool = False) -> list[Turn] | None:
    """The turns of a conversation: a list, a struct of lists, or either as JSON text; None for anything else.

    Text may be a prompt about JSON: unless the column is a ``chat``, an object with further keys or unknown roles is no conversation.
    """
    prompt, value = isinstance(value, str) and not chat, _parsed(_parsed(value))
    if isinstance(value, dict):
        inside = next((name for name in MESSAGES_NAMES if name in value), None)
        if prompt and value.keys() - ({inside, TOOLS_NAME, "id"} if inside else ROLE_KEYS | {"content", "value"}):
            return None
        value = _parsed(value[inside]) if inside else value
    lists = list(value.values()) if isinstance(value, dict) else []
    if lists and all(isinstance(one, list) and len(one) == len(lists[0]) for one in lists):
        value = [dict(zip(value, turn, strict=True)) for turn in zip(*lists, strict=True)]
    turns = [_parsed(turn) for turn in value] if isinstance(value, list) else []
    whole = all(isinstance(turn, dict) and (role_of(turn) if prompt else turn.keys() & ROLE_KEYS) for turn in turns)
    return turns if turns and whole else None


def _parsed(value: Any) -> Any:
    """The value of a text in JSON; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{", '"'):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _answer(value: Any, column: str, origin: str) -> str:
    """The dataset's answer: text, or turns of which the assistant's first is it; in a whole conversation the last answer."""
    turns = turns_in(value)
    if turns is None:
        return _filled(value, column, origin)
    if turns[0].get("role", turns[0].get("from")) in ("assistant", "gpt"):
        turns = [{"role": "user", "content": "?"}, *turns[:1]]
    return _filled(conversation_prompts(turns, column, origin, None, False)[0][1], column, origin)


def prompt_row(text: str, reference: str | None, domain: str, origin: str, system: str | None) -> PromptRow:
    """A plain prompt, or with a system message a conversation that starts with it."""
    if system is None:
        return PromptRow(text, None, reference, domain, origin)
    turns = ({"role": "system", "content": system}, {"role": "user", "content": text})
    return PromptRow(None, turns, reference, domain, origin)


def _filled(value: Any, column: str, origin: str) -> str:
    if isinstance(value, str) and value.strip():
        return value
    if value is None or isinstance(value, str):
        raise UserError(f"{origin}: column {column!r} is empty; fill it or remove the row")
    hint = "if it contains conversations, set it as messages_column" if isinstance(value, list) else "write it as text"
    raise UserError(f"{origin}: column {column!r} contains a {type(value).__name__}, not a string; {hint}")


def domain_of(values: Mapping[str, Any], column: str | None, default: str, origin: str) -> str:
    """The domain of a row; a list of strings (several services of one dialogue) is joined with ``+``."""
    value = values.get(column) if column else None
    if value is None or value == "" or value == []:
        return default
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "+".join(value)
    if isinstance(value, str | int):
        return str(value)
    raise UserError(f"{origin}: domain column {column!r} contains a {type(value).__name__}; a label must be a string")
