"""What rendering does to a row that its author may not expect."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from data.prompts.conversation import REASONING_KEYS
from data.prompts.prompt import PromptRow, Template, Turns
from data.prompts.template import WORD, chat_template_of, render_text, special_tokens, template_words

LEAST_MARKUP = 4  # characters of markup without a special token, such as `[/INST]`; fewer can be text


def render_notes(row: PromptRow, prompt_ids: Sequence[int], tokenizer: Any, template: Template) -> Iterator[str]:
    """What is odd about a row that was rendered to these ids, without its origin, so that it is equal for rows of a kind."""
    bos, text = tokenizer.bos_token_id, render_text(row, tokenizer, template)
    if bos is not None and list(prompt_ids[:2]) == [bos, bos]:
        yield f"the prompt begins with {tokenizer.bos_token!r} twice, because one is added to that in the text; remove it from the text"
    if text is None:
        return
    turns: Turns = row.messages or ({"role": "user", "content": row.text},)
    variables, words = template_words(str(chat_template_of(tokenizer))) or (None, None)
    if markup := _markup(tokenizer, template.mode).search("\n".join(turn["content"] for turn in turns)):
        fix = (
            "if the row is rendered already, leave the template out (data.template.mode: plain; in a command no --chat)"
        )
        yield f"the text has {markup[0]!r} in it, which is markup of the chat template; {fix}"
    if row.tools and variables is not None and "tools" not in variables:
        yield "the chat template does not read `tools`, so they are left out"
    for number, turn in enumerate(turns):
        role, content = turn["role"], turn["content"].strip()
        if role == "developer" and words is not None and role not in words:
            yield "the chat template does not know the role `developer`, so it is rendered as `system`"
        for key in turn.keys() - {"role", "content", "tool_call_id"}:
            if words is not None and words.isdisjoint(REASONING_KEYS if key in REASONING_KEYS else {key}):
                yield f"the chat template does not read `{key}` of the role `{role}`, so it is left out"
        if content and content not in text:
            other = replace(row, text=None, messages=(*turns[:number], {**turn, "content": WORD}, *turns[number + 1 :]))
            if WORD not in (render_text(other, tokenizer, template) or WORD):
                yield f"the chat template does not show the text of the role `{role}`, so it is left out"


@functools.lru_cache(maxsize=4)
def _markup(tokenizer: Any, mode: Any) -> re.Pattern[str]:
    """Special tokens, and what the template writes behind a user turn."""
    text = render_text(PromptRow(WORD, None, None, "", ""), tokenizer, Template(mode=mode)) or ""
    closing = text.rpartition(WORD)[2].strip()
    found = {*special_tokens(tokenizer).values(), closing if len(closing) >= LEAST_MARKUP else ""} - {""}
    return re.compile("|".join(map(re.escape, sorted(found))) or "(?!)")
