"""From the config's sources, or a command's, to rendered prompts: read, de-duplicate, split, render, check."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.prompts.prompt import PromptRow
from data.prompts.sources import format_of, load_source
from data.prompts.split import content_hash, deduplicate, remove_overlap, split_rows
from data.prompts.template import Mode, check_lengths, render_prompt, render_reference
from data.responses.respond import RenderedPrompt
from distill.config.sections import DataConfig, SourceConfig
from speculative.decoder.responses import Prompt
from speculative.errors import UserError


@dataclass(frozen=True)
class PromptSets:
    """Training and held-out prompts, disjoint, and one line that says what was left out."""

    train: list[RenderedPrompt]
    heldout: list[RenderedPrompt]
    report: str


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    context_length: int,
    max_tokens: int,
    heldout_prompts: int,
    *,
    heldout_only: bool = False,
) -> PromptSets:
    """All prompts of a run, rendered by the target's tokenizer.

    Args:
        context_length: tokens that prompt + response may have at most.
        heldout_prompts: keep this many held-out prompts, chosen by content hash.
        heldout_only: leave `train` unrendered and empty (for evaluation alone).

    Raises:
        UserError: sources missing, empty or all duplicates; a prompt too long (`data.too_long: error`); no template.
    """
    train_rows, repeats = deduplicate([row for source in data.train for row in load_source(source)])
    if data.heldout:
        heldout_rows, _ = deduplicate([row for source in data.heldout for row in load_source(source)])
        train_rows, overlapping = remove_overlap(train_rows, heldout_rows)
    else:
        train_rows, heldout_rows = split_rows(
            train_rows, heldout_count=min(data.heldout_count or heldout_prompts, max(2, len(train_rows) // 5))
        )
        overlapping = 0
    render = _Renderer(data, tokenizer, context_length, max_tokens)
    # Lazily: rows behind the last prompt that is needed are not even looked at.
    fitting = (prompt for row in _by_hash(heldout_rows) if (prompt := render(row, with_reference=False)) is not None)
    heldout = list(itertools.islice(fitting, heldout_prompts))
    train = [] if heldout_only else [prompt for row in train_rows if (prompt := render(row)) is not None]
    if not heldout or not (train or heldout_only):
        side = "heldout" if not heldout else "train"
        raise UserError(
            f"data.{side}: every prompt is too long ({render.dropped} left out): lower serving.max_tokens, or raise "
            f"data.max_prompt_tokens or the context (now {context_length} tokens for prompt and response)"
        )
    parts = [f"{len(train)} training and {len(heldout)} held-out prompts"]
    for count, what in (
        (repeats.rows - repeats.kept, "duplicates"), (overlapping, "in both sets"), (render.dropped, "too long")
    ):  # fmt: skip
        if count:
            parts.append(f"{count} left out ({what})")
    return PromptSets(train, heldout, ", ".join(parts))


def asked_rows(
    path: str, prompt_column: str = "", messages_column: str = "", *, system: str = "", label: str = ""
) -> tuple[list[PromptRow], bool]:
    """(rows of a command's `--prompts PATH`, read as a config's source is; whether a column `label` gives their domain).

    Raises:
        UserError: see `load_source`; the message begins with the option.
    """
    columns = {"prompt_column": prompt_column or None, "messages_column": messages_column or None}
    # A file whose suffix tells nothing is one of plain lines.
    plain = Path(path).is_file() and format_of(Path(path)) is None
    source = SourceConfig(path=path, system=system or None, format="txt" if plain else "auto", **columns)  # type: ignore[arg-type]
    if label:
        # No such column, or a fault that the second reading names.
        with contextlib.suppress(UserError):
            return load_source(source.model_copy(update={"domain_column": label}), preferred="prompt"), True
    try:
        return load_source(source, preferred="prompt"), False
    except UserError as error:
        words = str(error).replace("prompt_column", "--prompt-column").replace("messages_column", "--messages-column")
        raise UserError(f"--prompts {words}") from error


def render_rows(rows: Sequence[PromptRow], tokenizer: Any, chat: bool) -> list[Prompt]:
    """(key, ids) of each row: a conversation by the chat template, a bare prompt too when `chat` says so. The key is its
    FILE:LINE.

    Raises:
        UserError: no template where one is needed, a row that it refuses, a prompt without a token.
    """
    if chat and not tokenizer.chat_template:
        raise UserError("--chat: the target's tokenizer has no chat template")
    keys = [row.origin.rpartition("/")[2] for row in rows]
    prompts: list[Prompt] = []
    # Files of one name in several folders keep their folders.
    for row, key in zip(rows, keys if len(set(keys)) == len(keys) else [row.origin for row in rows], strict=True):
        mode: Mode = "chat" if chat or row.messages is not None else "plain"
        ids = render_prompt(row, tokenizer, mode=mode, chat_template_kwargs={})
        if not ids:
            raise UserError(f"{key}: the prompt has no token; write at least one character")
        prompts.append((key, ids))
    return prompts


def _by_hash(rows: Sequence[PromptRow]) -> list[PromptRow]:
    return sorted(rows, key=content_hash)


class _Renderer:
    def __init__(self, data: DataConfig, tokenizer: Any, context_length: int, max_tokens: int) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.context_length, self.max_tokens = context_length, max_tokens
        self.dropped = 0

    def __call__(self, row: PromptRow, with_reference: bool = True) -> RenderedPrompt | None:
        """The rendered prompt, or None when it is too long and may be left out."""
        how: dict[str, Any] = {
            "mode": self.data.template.mode, "chat_template_kwargs": self.data.template.chat_template_kwargs
        }  # fmt: skip
        reference_ids = None
        if self.data.responses == "reference" and with_reference:
            if row.reference is None:
                raise UserError(
                    f"{row.origin}: data.responses is reference, but the row has none; map reference_column"
                )
            prompt_ids, answer_ids = render_reference(row, self.tokenizer, **how)
            reference_ids = tuple(answer_ids)
        else:
            prompt_ids = render_prompt(row, self.tokenizer, **how)
        limit = self.data.max_prompt_tokens
        if (limit is not None and len(prompt_ids) > limit) or not check_lengths(
            prompt_ids, row.origin, self.context_length, self.max_tokens, self.data.too_long
        ):
            self.dropped += 1
            return None
        return RenderedPrompt(content_hash(row), row.domain, tuple(prompt_ids), _text_of(row), reference_ids)


def _text_of(row: PromptRow) -> str:
    if row.text is not None:
        return row.text
    return str(row.messages[-1].get("content", "")) if row.messages else ""
