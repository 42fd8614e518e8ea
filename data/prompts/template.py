"""Render a prompt row to token ids, with the target's chat template or as plain text.

Shapes: ids are flat Python lists; a mask has one flag per id of prompt + response, True on tokens that the loss uses.
"""

import contextlib
import copy
import difflib
import functools
import hashlib
import json
import logging
import re
from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

import jinja2
import jinja2.meta

from data.prompts.conversation import served_turn
from data.prompts.prompt import PromptRow, Template, Turn, Turns
from speculative.errors import UserError

log = logging.getLogger(__name__)

# Arguments of apply_chat_template that Understudy sets; the user may not.
_RESERVED = """
add_generation_prompt chat_template continue_final_message conversation max_length messages padding
return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs truncation
"""
RESERVED_KWARGS = frozenset(_RESERVED.split())
WORD = "understudy"  # Placeholder for a user turn; templates must leave it unchanged.
# How a template, such as that of Llama 3, writes the date.
_DATE_CALL = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")
# Used by apply_chat_template itself, whether or not the template has these variables.
COMMON_KWARGS = frozenset({"tools", "documents", "sanitize_control_tokens"})


def render_prompt(row: PromptRow, tokenizer: Any, template: Template) -> list[int]:
    """Ids of the prompt, ready for the first response token.

    ``chat``: the chat template with its generation prompt; a plain text becomes one user turn. ``plain``: the text with
    the tokenizer's special tokens in front (BOS) and none after it. ``auto``: chat if the tokenizer has a template. A row that was
    rendered earlier keeps its ids.

    Raises UserError: chat without a template, plain with a conversation, a template that refuses the row or an argument, a prompt without
    tokens.
    """
    if row.prompt_ids is not None:
        ids = list(row.prompt_ids)
    elif _is_chat(row, tokenizer, template):
        ids = _apply(row, _turns(row), tokenizer, template, tokenize=True, add_generation_prompt=True)
    elif row.text is None:
        raise UserError(f"{row.origin}: a conversation cannot be a plain prompt; set data.template.mode: chat")
    else:
        ids = _plain_ids(row.text, tokenizer)
    if not ids:
        raise UserError(f"{row.origin}: the prompt has no token, because the tokenizer drops all of it; remove the row")
    return ids


def render_text(row: PromptRow, tokenizer: Any, template: Template, answer: str | None = None) -> str | None:
    """The text of a chat prompt, or of the conversation that ends with ``answer``; None for plain prompts and rows that are refused."""
    if template.mode == "plain" or chat_template_of(tokenizer) is None:
        return None
    turns = _turns(row) if answer is None else (*_turns(row), {"role": "assistant", "content": answer})
    with contextlib.suppress(UserError):
        text: str = _apply(row, turns, tokenizer, template, tokenize=False, add_generation_prompt=answer is None)
        return text
    return None


def turn_end(tokenizer: Any, template: Template) -> int | None:
    """The special token with which the chat template ends an assistant turn; None if prompts are plain, or if there is none."""
    text = render_text(PromptRow(WORD, None, None, "", ""), tokenizer, template, WORD) or ""
    _, word, closing = text.rpartition(WORD)
    ids = tokenizer(closing, add_special_tokens=False).input_ids if word else []
    return next((token for token in ids if token in special_tokens(tokenizer)), None)


def on_day(tokenizer: Any, day: date) -> Any:
    """The tokenizer with a chat template that writes this day instead of today; the same object if it writes no date."""

    def dated(template: str) -> str:
        return _DATE_CALL.sub(lambda call: json.dumps(day.strftime(call[2])), template)

    given = tokenizer.chat_template
    frozen = {name: dated(text) for name, text in given.items()} if isinstance(given, dict) else given and dated(given)
    if frozen == given:
        return tokenizer
    own = copy.copy(tokenizer)
    own.chat_template = frozen
    return own


def loss_mask(prompt_length: int, total_length: int) -> list[bool]:
    """One flag per token of prompt + response: False for the prompt, True for the response."""
    assert 0 <= prompt_length <= total_length, (prompt_length, total_length)
    return [False] * prompt_length + [True] * (total_length - prompt_length)


def check_learnable(rows: int, tokens: int, learned: int, where: str) -> None:
    """Raise UserError if none of ``tokens`` is a response token (``learned``: their number). Single rows may have none."""
    if learned == 0:
        raise UserError(
            f"{where}: {rows} rows with {tokens} tokens have no response token, because every response is empty or cut; "
            "check serving.max_tokens and data.context_length"
        )


def check_lengths(
    prompt_ids: Sequence[int],
    row_origin: str,
    context_length: int,
    max_new_tokens: int,
    too_long: Literal["error", "drop"],
) -> bool:
    """Whether prompt and response fit the target's context. If not: False (`too_long` drop), or UserError, as when no prompt could fit."""
    if max_new_tokens >= context_length:
        raise UserError(
            f"serving.max_tokens = {max_new_tokens} leaves no space for a prompt in the context of {context_length} "
            "tokens; lower it"
        )
    if len(prompt_ids) + max_new_tokens <= context_length:
        return True
    if too_long == "drop":
        return False
    raise UserError(
        f"{row_origin}: a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones do not fit the "
        f"context of {context_length}; shorten it, lower serving.max_tokens, or set data.too_long: drop"
    )


def template_fingerprint(tokenizer: Any, template: Template) -> str:
    """SHA-256 hex of everything that affects rendering: mode, template, its arguments, special tokens.

    ``auto`` has the same fingerprint as the mode that it stands for. The vocabulary is not part of it.
    """
    mode, kwargs, text = template.mode, template.chat_template_kwargs, chat_template_of(tokenizer)
    chat = mode == "chat" or (mode == "auto" and text is not None)
    content: dict[str, Any] = {"mode": "chat" if chat else "plain", "special": tokenizer.special_tokens_map}
    if chat:
        text = _required_template(tokenizer, "set data.template.mode: plain")
        _check_kwargs(text, tokenizer, kwargs)
        content |= {"template": text, "kwargs": kwargs}
    else:
        if kwargs:
            log.warning("data.template.chat_template_kwargs are ignored: prompts are rendered plain")
        # The special tokens around a text depend on a post-processor without a name, so render a sample.
        content["around"] = _plain_ids("a", tokenizer)
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _is_chat(row: PromptRow, tokenizer: Any, template: Template) -> bool:
    # A conversation in auto mode needs the template; without one an error is raised later.
    chat = row.messages is not None or chat_template_of(tokenizer) is not None
    return template.mode == "chat" or (template.mode == "auto" and chat)


def _turns(row: PromptRow) -> Turns:
    return row.messages if row.messages is not None else ({"role": "user", "content": row.text},)


def chat_template_of(tokenizer: Any) -> str | None:
    """The chat template that prompts are rendered with, if there is one."""
    template = tokenizer.chat_template
    # Of several named templates, apply_chat_template uses the one called default.
    return template.get("default") if isinstance(template, dict) else template


def _required_template(tokenizer: Any, other_way: str, where: str = "") -> str:
    template = chat_template_of(tokenizer)
    if template is None:
        name = tokenizer.name_or_path or "(unnamed)"
        raise UserError(
            f"{where}the tokenizer {name} has no chat template; {other_way}, or put a chat_template.jinja into its directory"
        )
    return template


@functools.lru_cache(maxsize=16)
def template_words(template: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """(variables that a template reads; attributes and strings in it); None if jinja cannot parse it, which rendering reports."""
    # transformers' tag around assistant text has no effect here, and jinja does not know it.
    template = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    try:
        syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        words = {node.attr for node in syntax.find_all(jinja2.nodes.Getattr)}
        words |= {node.value for node in syntax.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        return frozenset(jinja2.meta.find_undeclared_variables(syntax)), frozenset(words)
    except (jinja2.TemplateError, ValueError, RecursionError):
        return None


def _check_kwargs(template: str, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
    """Raise UserError for unknown arguments; a template would silently ignore a misspelt one."""
    words = template_words(template)
    for name in chat_template_kwargs:
        if name in RESERVED_KWARGS:
            raise UserError(f"chat_template_kwargs.{name} is set by Understudy; remove it")
        if words is not None and name not in words[0] | COMMON_KWARGS:
            near = difflib.get_close_matches(name, words[0], n=1)
            hint = f"; did you mean {near[0]}?" if near else "; remove it"
            raise UserError(
                f"chat_template_kwargs.{name} is not read by the chat template of {tokenizer.name_or_path}{hint}"
            )


def _apply(row: PromptRow, turns: Sequence[Turn], tokenizer: Any, template: Template, **options: bool) -> Any:
    other_way = "set data.template.mode: plain" if row.text is not None else "give prompts that are plain text"
    kwargs = template.chat_template_kwargs
    text = _required_template(tokenizer, other_way, f"{row.origin}: ")
    _check_kwargs(text, tokenizer, kwargs)
    words = (template_words(text) or ((), ("developer",)))[1]
    served = [served_turn(turn, words, row.origin) for turn in turns]
    if row.tools is not None:
        kwargs = {**kwargs, "tools": list(row.tools)}
    try:
        return tokenizer.apply_chat_template(served, return_dict=False, **options, **kwargs)
    except Exception as error:
        # A template is a program: it refuses rows by raising (roles must alternate, no system turn), and may raise any other error.
        raise UserError(
            f"{row.origin}: the chat template of {tokenizer.name_or_path} refuses this conversation "
            f"({' '.join(str(error).split())}); change the row, or its system message"
        ) from error


def _plain_ids(text: str, tokenizer: Any) -> list[int]:
    """Ids of the text with the tokenizer's special tokens in front, but without those after it."""
    bare_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    whole_ids = tokenizer(text, verbose=False).input_ids
    extra = len(whole_ids) - len(bare_ids)
    front = next((n for n in range(extra + 1) if whole_ids[n : n + len(bare_ids)] == bare_ids), None)
    # Some tokenizers encode the text differently between special tokens; then only a final EOS is known to be extra.
    if front is None:
        return whole_ids[:-1] if whole_ids[-1:] == [tokenizer.eos_token_id] else whole_ids
    return whole_ids[: front + len(bare_ids)]


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Special tokens by id, those of the vocabulary's added tokens too."""
    added = {i: str(token.content) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
