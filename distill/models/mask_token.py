"""The mask token of a parallel draft, which takes the place of tokens not yet known: its id and initial embedding."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from distill.models.vocabulary import special_ids, tokens_by_id, vocabulary_rows
from speculative.engine.models import check_parallel, mask_token_of
from speculative.errors import UserError


def give_mask_token(
    student: PreTrainedModel, tokenizer: Any, texts: Iterable[Sequence[int]]
) -> dict[str, int | str | None]:
    """Write the draft's mask token into its config, where engines read it. Return {mask_token, token: its string or None}.

    An existing mask token keeps its embedding; a new one starts as the mean of all embeddings. tokenizer: the target's. texts: token
    ids that the draft will read; the mask token must not occur in them.

    Raises UserError: the architecture cannot compute several blocks in one pass, or no id is free.
    """
    check_parallel(student)
    embeddings: Any = student.get_input_embeddings()
    token = mask_token_of(student.config)
    if token is None:
        token = free_token(tokenizer, vocabulary_rows(student.config), texts)
        with torch.no_grad():
            embeddings.weight[token] = embeddings.weight.mean(0)
        student.config.pard_token = token  # the first key that engines read
    if getattr(embeddings, "padding_idx", None) == token:
        embeddings.padding_idx = None  # such a row has no gradient
    return {"mask_token": token, "token": tokens_by_id(tokenizer).get(token)}


def free_token(tokenizer: Any, rows: int, texts: Iterable[Sequence[int]]) -> int:
    """The first row without a token, else the lowest special token that no text uses, else the last unused token, which the draft loses.

    No row is added, since engines need equal rows in draft and target. UserError if no id is free.
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
    raise UserError(
        f"student.parallel: your texts use all {rows} tokens, so none is free as the mask token; leave student.parallel out"
    )
