"""From a prompt row to token ids: the target tokenizer's chat template, or plain completion.

Shapes: ids are flat Python lists; a mask is one flag per id of prompt + response, True where the loss looks.
"""

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

from data.prompts.prompt import PromptRow, Template, Turn, Turns
from speculative.errors import UserError

log = logging.getLogger(__name__)

# Arguments of apply_chat_template that decide what we rely on: never the user's.
RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "truncation",
    }
)  # fmt: skip
WORD = "understudy"  # stands for a user's turn; any word that a template leaves as it is
# How a template asks for the date, e.g. Llama 3's.
_DATE_CALL = re.compile(r"""strftime_now\s*\(\s*(["'])(.*?)\1\s*\)""")
# Read by apply_chat_template itself, whatever the template's own variables are.
COMMON_KWARGS = frozenset({"tools", "documents", "sanitize_control_tokens"})


def render_prompt(row: PromptRow, tokenizer: Any, template: Template) -> list[int]:
    """Ids of the prompt, ready for the first response token.

    ``chat``: the chat template with its generation prompt; a plain text becomes one user turn. ``plain``: the text with
    the tokenizer's own special tokens in front (BOS) and none behind. ``auto``: chat when the tokenizer has a template. A row that was
    rendered before keeps its ids.

    Raises:
        UserError: chat without a template, plain with a conversation, a template that refuses the row or an argument; a prompt
            without a token.
    """
    if row.prompt_ids is not None:
        ids = list(row.prompt_ids)
    elif _is_chat(row, tokenizer, template):
        ids = _apply(row, _turns(row), tokenizer, template, tokenize=True, add_generation_prompt=True)
    elif row.text is None:
        raise UserError(f"{row.origin}: a conversation cannot be a plain prompt: set the template's mode to chat")
    else:
        ids = _plain_ids(row.text, tokenizer)
    if not ids:
        raise UserError(f"{row.origin}: the prompt has no token: the tokenizer drops all of it, remove the row")
    return ids


def render_opening(row: PromptRow, tokenizer: Any, template: Template) -> list[int]:
    """Ids of a chat prompt up to where its last user's turn has its first word: whoever goes on there writes such a turn.

    Raises:
        UserError: no chat template, one that refuses the row, or one that does not show what the user says.
    """
    turns = _turns(row)
    last = max((number for number, turn in enumerate(turns) if turn["role"] == "user"), default=len(turns))
    asked = (*turns[:last], {"role": "user", "content": WORD})
    text = _apply(row, asked, tokenizer, template, tokenize=False, add_generation_prompt=False)
    opening, word, _ = text.rpartition(WORD)
    if not word:
        raise UserError(f"{row.origin}: the chat template does not show the user's turn, so none can be made")
    return list(tokenizer(opening, add_special_tokens=False).input_ids)


def render_reference(row: PromptRow, tokenizer: Any, template: Template) -> tuple[list[int], list[int]]:
    """(prompt ids, response ids) of a row with the dataset's own answer, its end of turn or EOS included.

    The prompt ids equal ``render_prompt``'s. Text that would be one token across the border of prompt and answer is
    tokenised in two parts, as at serving time, where the prompt's ids are fixed before the answer exists.

    Raises:
        UserError: no reference, or a chat template that shows the same history differently once an answer follows it.
    """
    if row.reference is None:
        raise UserError(f"{row.origin}: no reference answer: map one with reference_column, or let the target answer")
    prompt_ids = render_prompt(row, tokenizer, template)
    if _is_chat(row, tokenizer, template):
        answered = (*_turns(row), {"role": "assistant", "content": row.reference})
        prompt_text = _apply(row, _turns(row), tokenizer, template, tokenize=False, add_generation_prompt=True)
        whole_text = _apply(row, answered, tokenizer, template, tokenize=False, add_generation_prompt=False)
        response_text = _answer_part(row, prompt_text, whole_text, tokenizer)
        joint_ids = _apply(row, answered, tokenizer, template, tokenize=True, add_generation_prompt=False)
        response_ids = _split_off(prompt_ids, joint_ids, response_text, tokenizer)
        closing_text = response_text[response_text.rindex(row.reference.strip()) + len(row.reference.strip()) :]
        response_ids = _end_at_closing_token(response_ids, closing_text, tokenizer)
    else:
        assert row.text is not None
        response_ids = _split_off(prompt_ids, _plain_ids(row.text + row.reference, tokenizer), row.reference, tokenizer)
        response_ids = _end_at_closing_token(response_ids, "", tokenizer)
    return prompt_ids, response_ids


def on_day(tokenizer: Any, day: date) -> Any:
    """A tokenizer whose chat template writes this day, not today; the same one where the template writes none."""

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
    """Refuse a set of rows in which nothing is to be predicted: `learned` of their `tokens` are.

    Raises:
        UserError: none is. Single rows may be without.
    """
    if learned == 0:
        raise UserError(
            f"{where}: the loss mask is 0 on all {tokens} tokens of {rows} rows: every response is empty or cut away; "
            "check max_new_tokens and the sequence length"
        )


def check_lengths(
    prompt_ids: Sequence[int],
    row_origin: str,
    context_length: int,
    max_new_tokens: int,
    too_long: Literal["error", "drop"],
) -> bool:
    """Whether prompt and response fit the target's context; False says drop the row.

    Raises:
        UserError: it does not fit and ``too_long`` is ``error``; no room for any prompt.
    """
    if max_new_tokens >= context_length:
        raise UserError(
            f"max_new_tokens {max_new_tokens} leaves no room for a prompt in the target's context of {context_length} "
            "tokens: lower it"
        )
    if len(prompt_ids) + max_new_tokens <= context_length:
        return True
    if too_long == "drop":
        return False
    raise UserError(
        f"{row_origin}: a prompt of {len(prompt_ids)} tokens and {max_new_tokens} new ones do not fit the target's "
        f"context of {context_length}: shorten it, lower max_new_tokens, or set too_long to drop"
    )


def template_fingerprint(tokenizer: Any, template: Template) -> str:
    """SHA-256 hex of all that turns a prompt into text around it: mode, template, its arguments, special tokens.

    Equal for ``auto`` and what ``auto`` means for this tokenizer. The vocabulary is not part of it.
    """
    mode, kwargs, text = template.mode, template.chat_template_kwargs, _template(tokenizer)
    chat = mode == "chat" or (mode == "auto" and text is not None)
    content: dict[str, Any] = {"mode": "chat" if chat else "plain", "special": tokenizer.special_tokens_map}
    if chat:
        text = _required_template(tokenizer, "set the template's mode to plain")
        _check_kwargs(text, tokenizer, kwargs)
        content |= {"template": text, "kwargs": kwargs}
    else:
        if kwargs:
            log.warning("chat_template_kwargs are not used: prompts are rendered plain")
        # Special tokens that surround a text depend on a post-processor that has no name: ask it.
        content["around"] = _plain_ids("a", tokenizer)
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _is_chat(row: PromptRow, tokenizer: Any, template: Template) -> bool:
    # A conversation in auto mode has no other way than the template: without one the error below says so.
    chat = row.messages is not None or _template(tokenizer) is not None
    return template.mode == "chat" or (template.mode == "auto" and chat)


def _turns(row: PromptRow) -> Turns:
    return row.messages if row.messages is not None else ({"role": "user", "content": row.text},)


def _template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    # Several named templates: apply_chat_template takes the one called default.
    return template.get("default") if isinstance(template, dict) else template


def _required_template(tokenizer: Any, other_way: str, where: str = "") -> str:
    template = _template(tokenizer)
    if template is None:
        name = tokenizer.name_or_path or "(unnamed)"
        raise UserError(
            f"{where}the tokenizer {name} has no chat template: {other_way}, or put a chat_template.jinja into its directory"
        )
    return template


@functools.lru_cache(maxsize=16)
def _template_variables(template: str) -> frozenset[str] | None:
    """Names a template reads from outside; None when plain jinja cannot parse it (then rendering will tell)."""
    # transformers' own tag around the assistant's text: transparent, and unknown to jinja.
    template = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    try:
        syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        return frozenset(jinja2.meta.find_undeclared_variables(syntax))
    except (jinja2.TemplateError, ValueError, RecursionError):
        return None


def _check_kwargs(template: str, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> None:
    """A misspelt argument would be ignored by the template, and the prompts silently be others than asked for."""
    known = _template_variables(template)
    for name in chat_template_kwargs:
        if name in RESERVED_KWARGS:
            raise UserError(f"chat_template_kwargs.{name} is set by Understudy itself: leave it out")
        if known is not None and name not in known | COMMON_KWARGS:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ": leave it out"
            raise UserError(
                f"chat_template_kwargs.{name} is not read by the chat template of {tokenizer.name_or_path}{hint}"
            )


def _apply(row: PromptRow, turns: Sequence[Turn], tokenizer: Any, template: Template, **options: bool) -> Any:
    other_way = "set the template's mode to plain" if row.text is not None else "give prompts that are plain text"
    kwargs = template.chat_template_kwargs
    _check_kwargs(_required_template(tokenizer, other_way, f"{row.origin}: "), tokenizer, kwargs)
    if row.tools is not None:
        kwargs = {**kwargs, "tools": list(row.tools)}
    try:
        return tokenizer.apply_chat_template(list(turns), return_dict=False, **options, **kwargs)
    except Exception as error:
        # A template is a foreign program: it refuses by raising (roles that must alternate, no system turn), and may raise anything else.
        raise UserError(
            f"{row.origin}: the chat template of {tokenizer.name_or_path} refuses this conversation: "
            f"{' '.join(str(error).split())}: change the row, or its system message"
        ) from error


def _plain_ids(text: str, tokenizer: Any) -> list[int]:
    """The text's ids with the special tokens the tokenizer puts in front, and without those it puts behind."""
    bare_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    whole_ids = tokenizer(text, verbose=False).input_ids
    extra = len(whole_ids) - len(bare_ids)
    front = next((n for n in range(extra + 1) if whole_ids[n : n + len(bare_ids)] == bare_ids), None)
    # Some tokenizers write the text differently between special tokens: then only a final EOS is known to be extra.
    if front is None:
        return whole_ids[:-1] if whole_ids[-1:] == [tokenizer.eos_token_id] else whole_ids
    return whole_ids[: front + len(bare_ids)]


def _answer_part(row: PromptRow, prompt_text: str, whole_text: str, tokenizer: Any) -> str:
    assert row.reference is not None
    response_text = whole_text.removeprefix(prompt_text)
    if not whole_text.startswith(prompt_text):
        raise UserError(
            f"{row.origin}: the chat template of {tokenizer.name_or_path} rewrites the prompt once an answer follows "
            "(a thinking mode?): set chat_template_kwargs (enable_thinking: false), or let the target write the answers"
        )
    if row.reference.strip() not in response_text:
        raise UserError(
            f"{row.origin}: the chat template of {tokenizer.name_or_path} changes the answer (it removes thinking?): "
            "take the thinking out of the reference, or let the target write the answers"
        )
    return response_text


def _split_off(prompt_ids: list[int], joint_ids: list[int], response_text: str, tokenizer: Any) -> list[int]:
    """The response's ids: what follows the prompt in the joint ids, or its own ids where a token spans the border."""
    if joint_ids[: len(prompt_ids)] == prompt_ids:
        return joint_ids[len(prompt_ids) :]
    return tokenizer(response_text, add_special_tokens=False).input_ids


def _end_at_closing_token(response_ids: list[int], closing_text: str, tokenizer: Any) -> list[int]:
    """The response up to the token that ends it, which a target emits last; EOS is added where nothing closes it.

    ``closing_text`` is what the template writes behind the answer, such as an end-of-turn token and a line break: what
    follows the closing token belongs to the next turn and is never generated.
    """
    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special_ids |= set(tokenizer.all_special_ids)
    closing_ids = [i for i in tokenizer(closing_text, add_special_tokens=False).input_ids if i in special_ids]
    eos_id = tokenizer.eos_token_id
    if closing_ids:
        closing_id = eos_id if eos_id in closing_ids else closing_ids[-1]
        last = len(response_ids) - 1 - response_ids[::-1].index(closing_id)
        return response_ids[: last + 1]
    if eos_id is None or response_ids[-1:] == [eos_id]:
        return response_ids
    return [*response_ids, eos_id]
