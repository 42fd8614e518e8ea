"""A draft whose head covers the most frequent tokens (`student.head_tokens`): which ones, and the rows of the others in an export.

The whole head is trained, and trimmed where the draft is used (`speculative/engine/frequent_head.py`). Trimmed probabilities are those of
the whole head, given that the token is one that it covers.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from data.batches.examples import Examples
from distill.models.vocabulary import UNTIED_IN_ENGINES, give_own_head, vocabulary_rows
from speculative.engine.frequent_head import HEAD_IDS, head_ids_of, plain_head
from speculative.errors import UserError

COUNTED_TOGETHER = 4096  # sequences


def give_head_tokens(student: Any, count: int, examples: Examples, ends: Iterable[int]) -> dict[str, Any]:
    """Write the ids of the ``count`` most frequent tokens into the draft's config. Return {tokens, of, share of the responses}.

    Counted over the responses of ``examples``; equal ones by their count in the prompts, then by id. ``ends``: tokens that are always kept.
    Raises UserError: a head that cannot be trimmed, or not be exported (`refuse_tied_only`).
    """
    plain_head(getattr(student, "get_base_model", lambda: student)())
    refuse_tied_only(student.config)
    rows = vocabulary_rows(student.config)
    said_V, read_V = np.zeros((2, rows), dtype=np.int64)
    for first in range(0, len(examples), COUNTED_TOGETHER):
        chosen = [examples[number] for number in range(first, min(first + COUNTED_TOGETHER, len(examples)))]
        ids, said = (np.concatenate([getattr(one, name) for one in chosen]) for name in ("input_ids", "loss_mask"))
        said_V += np.bincount(ids[said.astype(bool)], minlength=rows)
        read_V += np.bincount(ids, minlength=rows)
    order_V = np.lexsort((np.arange(rows), -read_V, -said_V))
    kept = list(dict.fromkeys([*ends, *order_V.tolist()]))[:count]
    setattr(student.config, HEAD_IDS, sorted(kept))
    return {"tokens": count, "of": rows, "share": round(float(said_V[kept].sum() / max(1, said_V.sum())), 5)}


def refuse_tied_only(config: Any) -> None:
    """Raise UserError if engines always load this head as tied, so that an export could not fill its other rows."""
    text = config.get_text_config()
    if text.tie_word_embeddings and text.model_type not in UNTIED_IN_ENGINES:
        told = f"student.head_tokens: engines load {text.model_type} as tied only, so its head cannot differ from the embedding"
        raise UserError(f"{told}; train without head_tokens")


def fill_other_rows(model: Any) -> list[str]:
    """Make the row of every token outside the head the mean of the head's rows, in place, for engines that compute all. Return notes.

    Its logit is then the mean of the others, so it is never the argmax (see `repair_rows`): argmax drafts stay the same. A tied head gets
    its own weights. Raises UserError: engines always load this head as tied.
    """
    ids, config = head_ids_of(model.config), model.config.get_text_config()
    if ids is None:
        return []
    refuse_tied_only(model.config)
    if config.tie_word_embeddings:
        give_own_head(model)
    others_V = torch.ones(vocabulary_rows(model.config), dtype=torch.bool)
    others_V[ids] = False
    with torch.no_grad():
        for tensor in plain_head(model).parameters():
            tensor[others_V] = tensor[~others_V].mean(0)
    judged = f"the draft was judged with a head of {len(ids)} of {len(others_V)} tokens (config.json: {HEAD_IDS})"
    told = "an engine that drafts the argmax never proposes others, but computes all rows, so its draft step takes longer than measured"
    return [f"{judged}; {told}: time it with `understudy time`"]
