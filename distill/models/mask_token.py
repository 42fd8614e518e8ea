"""The token that stands for one not known yet in the pass of a parallel draft: which id it is, and its first embedding."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from distill.models.vocabulary import special_ids, tokens_by_id, vocabulary_rows
from speculative.engine.models import check_parallel, mask_token_of
from speculative.errors import UserError

KEY = "student.parallel.mask_token"


def give_mask_token(
    student: PreTrainedModel, wanted: int | Literal["auto"], tokenizer: Any, texts: Iterable[Sequence[int]]
) -> dict[str, int | str | None]:
    """Names the draft's mask token in its config, where engines read it, and returns what was chosen: {mask_token, token: its string or None}.

    A draft that has one keeps it with its embedding; a new one starts as the mean of all embeddings. tokenizer: the target's. texts: token
    ids that the draft will read, in none of which the mask token may occur.

    Raises:
        UserError: an architecture that cannot be asked for many blocks in one pass, an id without a row, no id that is free.
    """
    check_parallel(student)
    own = mask_token_of(student.config)
    token = own if wanted == "auto" and own is not None else wanted
    if token == "auto":
        token = free_token(tokenizer, vocabulary_rows(student.config), texts)
    if not 0 <= token < vocabulary_rows(student.config):
        raise UserError(f"{KEY} = {token}: the draft's vocabulary has rows 0..{vocabulary_rows(student.config) - 1}")
    embeddings: Any = student.get_input_embeddings()
    if token != own:
        with torch.no_grad():
            embeddings.weight[token] = embeddings.weight.mean(0)
        student.config.pard_token = token  # the first key that engines look for
    if getattr(embeddings, "padding_idx", None) == token:
        embeddings.padding_idx = None  # such a row has no gradient
    return {"mask_token": token, "token": tokens_by_id(tokenizer).get(token)}


def free_token(tokenizer: Any, rows: int, texts: Iterable[Sequence[int]]) -> int:
    """The first of `rows` without a token; without one, the lowest special token that no text uses; else the last token that none does,
    which the draft then no longer knows as itself.

    No row is added: engines want draft and target to have as many.

    Raises:
        UserError: there is none.
    """
    strings = tokens_by_id(tokenizer)
    empty = next((row for row in range(rows) if row not in strings), None)
    if empty is not None:
        return empty
    unused = set(range(rows))
    for ids in texts:
        unused.difference_update(ids)
    special = unused & set(special_ids(tokenizer))
    if special or unused:
        return min(special) if special else max(unused)
    raise UserError(f"{KEY}: auto finds none: your texts use each of the {rows} tokens of the vocabulary")
