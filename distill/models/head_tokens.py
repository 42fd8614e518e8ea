"""A draft whose head covers the most frequent tokens (`student.head_tokens`): which ones, and the rows of the others in an export.

The whole head is trained. The head is trimmed where the draft is used (`speculative/engine/frequent_head.py`): its logits are divided
among the tokens it covers, which is the softmax of the whole head given that the token is one of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from data.batches.examples import Examples
from distill.models.vocabulary import UNTIED_IN_ENGINES, give_own_head, vocabulary_rows
from speculative.engine.frequent_head import HEAD_IDS, head_ids_of, require_plain_head
from speculative.errors import UserError

COUNTED_TOGETHER = 4096  # sequences


def give_head_tokens(student: Any, count: int, examples: Examples, ends: Iterable[int]) -> dict[str, Any]:
    """Write the ids of the ``count`` most frequent tokens into the draft's config. Return {tokens, of, share of the responses}.

    Counted over the responses of ``examples``; ties and unseen tokens by their count in the prompts, then by id. ``ends``: end tokens,
    which are always kept.

    Raises UserError: more tokens than the vocabulary has, or a head that cannot be trimmed.
    """
    require_plain_head(student.get_base_model() if hasattr(student, "get_base_model") else student)
    rows = vocabulary_rows(student.config)
    refuse_too_many(count, rows)
    said_V, read_V = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    for first in range(0, len(examples), COUNTED_TOGETHER):
        chosen = [examples[number] for number in range(first, min(first + COUNTED_TOGETHER, len(examples)))]
        ids, said = (np.concatenate([getattr(one, name) for one in chosen]) for name in ("input_ids", "loss_mask"))
        said_V += np.bincount(ids[said.astype(bool)], minlength=rows)
        read_V += np.bincount(ids, minlength=rows)
    order_V = np.lexsort((np.arange(rows), -read_V, -said_V))
    kept = list(dict.fromkeys([*sorted(set(ends)), *order_V.tolist()]))[:count]
    setattr(student.config, HEAD_IDS, sorted(kept))
    return {"tokens": count, "of": rows, "share": round(float(said_V[kept].sum() / max(1, said_V.sum())), 5)}


def refuse_too_many(count: int, rows: int) -> None:
    """Raise UserError for a head of more tokens than the target has."""
    if count > rows:
        raise UserError(f"student.head_tokens = {count}: the target has {rows} tokens; give fewer, or leave it out")


def fill_other_rows(model: Any) -> str | None:
    """Make every token outside the head the mean of the head's rows, in place, for engines that compute all rows. Return what to know.

    Its logit is then the mean of the others, so it is never the argmax (see `repair_rows`): drafts by argmax propose the same tokens.
    None: the head covers all tokens. A tied head gets its own weights.

    Raises UserError: engines always load this head as tied.
    """
    ids = head_ids_of(model.config)
    if ids is None:
        return None
    config, rows = model.config.get_text_config(), vocabulary_rows(model.config)
    if config.tie_word_embeddings:
        if config.model_type not in UNTIED_IN_ENGINES:
            raise UserError(
                f"student.head_tokens: the head is tied to the embedding, and engines load {config.model_type} as tied only, so the rows "
                "of other tokens cannot be written; train without head_tokens to export this draft"
            )
        give_own_head(model)
    head, others_V = model.get_output_embeddings(), torch.ones(rows, dtype=torch.bool)
    others_V[ids] = False
    tensors: Sequence[Any] = [one for one in (head.weight, head.bias) if one is not None]
    with torch.no_grad():
        for tensor in tensors:
            tensor[others_V] = tensor[~others_V].mean(0)
    return (
        f"the draft was trained and judged with a head of {len(ids)} of {rows} tokens (config.json: {HEAD_IDS}). Here the rows of the other "
        "tokens are the mean of these, so an engine that drafts the argmax never proposes them; but it computes all rows, so its draft step "
        "takes longer than measured: time it with `understudy time`"
    )
