"""Convert a conversation of a dataset into prompts: the turns before an assistant turn, and the dataset's answer."""

import json
import logging
from collections.abc import Collection
from typing import Any

from data.prompts.prompt import Turn, Turns
from speculative.errors import UserError

log = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
ENGINE_ROLES = {"model": "assistant", "ipython": "tool"}  # of Gemini and Llama 3
MOST_DEPTH = 100
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")  # of engines, and of older logs
OPTIONAL_TURN_KEYS = ("name", "tool_calls", "tool_call_id", *REASONING_KEYS)
TEXT_PARTS = ("text", "input_text", "output_text")
_named_keys = {"role", "from", "content", "value", *OPTIONAL_TURN_KEYS}  # that are read, or were named in a warning
# Columns of a benchmark's questions: Spec-Bench's question.jsonl, and SPEED-Bench, which has more of them.
QUESTION_COLUMNS = {"question_id", "category", "turns"}


def first_question(value: Any) -> Any:
    """The first of a list of a user's turns; any other value unchanged. Later turns follow answers that the target has yet to write."""
    texts = isinstance(value, list) and value and all(isinstance(turn, str) for turn in value)
    return value[0] if texts else value


def conversation_prompts(
    value: Any, column: str, origin: str, system: str | None, every_turn: bool
) -> list[tuple[Turns, str | None, str]]:
    """(turns up to the assistant turn to be written, the dataset's answer or None, origin) of each prompt.

    By default one prompt: assistant turns at the end are removed, and the first of them is the answer to the last user turn.
    ``every_turn``: one prompt for each assistant turn after a user or tool turn, and one for an unanswered last turn. With several
    prompts, the origin ends in the number of the turn to be written, such as ``#4``.

    Raises UserError: not a list of turns, a turn without role or text, no user turn to answer.
    """
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a {type(value).__name__}" if value is not None else "nothing"
        raise UserError(
            f"{origin}: column {column!r} contains {kind}; give a list of turns with role and content, or its JSON"
        )
    turns = [_turn(turn, f"{origin}: turn {number} of {column!r}") for number, turn in enumerate(value, start=1)]
    roles = [turn["role"] for turn in turns]
    # Places after a turn of another speaker, where the assistant speaks next or the conversation ends, from the first user turn on.
    asked = range(roles.index("user") + 1 if "user" in roles else len(turns) + 1, len(turns) + 1)
    ends = [end for end in asked if roles[end - 1] != "assistant" and roles[end : end + 1] in ([], ["assistant"])]
    if not ends:
        raise UserError(f"{origin}: the conversation in {column!r} has no user turn to answer; remove the row")
    for number, turn in enumerate(turns[: ends[-1]], start=1):
        if not turn["content"].strip() and not turn.get("tool_calls"):
            raise UserError(f"{origin}: turn {number} of {column!r} is empty; fill it or remove the row")
    headed = system is None or roles[0] in ("system", "developer")
    head: Turns = () if headed else ({"role": "system", "content": system},)
    wanted = ends if every_turn else ends[-1:]
    return [
        (
            (*head, *turns[:end]),
            (turns[end]["content"] or None) if end < len(turns) else None,
            f"{origin}#{end + 1}" if len(wanted) > 1 else origin,
        )
        for end in wanted
    ]


def tools_of(value: Any, column: str, origin: str) -> Turns | None:
    """Tool definitions for a chat template, from a list or its JSON; None if there are none; UserError if they are not objects."""
    try:
        value = json.loads(value.strip() or "null") if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: column {column!r} is not JSON ({error}); fix or remove the row") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{origin}: column {column!r} contains a {type(value).__name__}; tools are a list of objects")
    return tuple(_without_nulls(tool, f"{origin}: column {column!r}") for tool in value)


def _without_nulls(value: Any, where: str, depth: int = 0) -> Any:
    """Remove keys with null values, because `datasets` gives every object the keys of all others. Raises UserError if nested too deep."""
    if depth > MOST_DEPTH:
        raise UserError(f"{where} is nested more than {MOST_DEPTH} levels deep; fix or remove the row")
    if isinstance(value, dict):
        return {key: _without_nulls(inner, where, depth + 1) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner, where, depth + 1) for inner in value] if isinstance(value, list) else value


def served_turn(turn: Turn, words: Collection[str], where: str) -> Turn:
    """A turn as engines give it to a template: arguments of tool calls as objects, a thought under every name that a template may read.

    A developer is the system unless the role is among ``words``, the template's strings.

    Raises UserError: arguments that are not JSON.
    """
    thought = next((turn[key] for key in REASONING_KEYS if key in turn), None)
    served = turn | (dict.fromkeys(REASONING_KEYS, thought) if thought else {})
    if turn["role"] == "developer" and "developer" not in words:
        served["role"] = "system"
    if "tool_calls" in turn:
        served["tool_calls"] = [_with_object(call, where) for call in turn["tool_calls"]]
    return served


def _with_object(call: Any, where: str) -> Turn:
    try:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = (json.loads(arguments) or {}) if isinstance(arguments, str) else arguments
    except (AttributeError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: arguments of a tool call are not JSON ({error}); fix or remove the row") from error
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _text_of(content: Any, where: str) -> Any:
    """The text of a list of parts, joined by line breaks; other content unchanged. UserError: a part that is not text."""
    if not isinstance(content, list):
        return content
    parts = [part if isinstance(part, dict) else {"text": part} for part in content]
    for part in parts:
        if part.get("type", "text") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise UserError(f"{where} has a part of type {part.get('type')!r}, which is not text; remove it or the row")
    return "\n".join(part["text"] for part in parts)


def role_of(turn: Turn) -> str | None:
    """The role of a turn, one of `ROLES`, to which ShareGPT's and engines' are translated; None for any other."""
    role = turn.get("role") or turn.get("from")
    role = (SHAREGPT_ROLES | ENGINE_ROLES).get(role, role) if isinstance(role, str) else None
    return role if role in ROLES else None


def _turn(turn: Any, where: str) -> Turn:
    """One turn as role, content and the optional keys that chat templates read; ShareGPT's from/value are accepted."""
    if not isinstance(turn, dict):
        raise UserError(f"{where} is a {type(turn).__name__}; a turn is an object with role and content")
    role = role_of(turn)
    if role is None:
        said = turn.get("role") or turn.get("from")
        raise UserError(f"{where} has the role {said!r}; use {', '.join(ROLES)}, or ShareGPT's human and gpt")
    if unread := {str(key) for key, value in turn.items() if value is not None} - _named_keys:
        _named_keys.update(unread)
        log.warning("warning: %s: no chat template gets %s, so it is left out", where, ", ".join(sorted(unread)))
    content = _text_of(turn.get("content") if turn.get("content") is not None else turn.get("value"), where)
    optional = {key: _without_nulls(turn[key], where) for key in OPTIONAL_TURN_KEYS if turn.get(key)}
    if content is None and optional.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        kind = "no content" if content is None else f"content of type {type(content).__name__}"
        raise UserError(f"{where} has {kind}; write the text of the turn as one string")
    return {"role": role, "content": content, **optional}
