"""Read the most probable tokens at each place of a text from a server's answer.

Legend: R response tokens, K entries of a row, N entries of all rows together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from data.responses.endpoint_keys import SERVER

# The value that servers write in JSON for a logarithm of zero.
CLAMPED = -9999.0
# Error of the sum of k probabilities with float32 logarithms.
_SUM_SLACK = 1e-3

TopK = tuple[np.ndarray, np.ndarray, np.ndarray]


def read_topk(content: bytes, start: int, total: int, k: int, vocab_rows: int) -> TopK:
    """ids_RK (int64), log_probs_RK and log_tail_R (float32) of the tokens from ``start`` on of a text of ``total`` tokens.

    ``content``: the JSON of a completion with `prompt_logprobs`. At each place, the given token counts only if it is one of the k.
    An empty entry has id 0 and log-probability -inf.

    Raises ValueError: not a completion, no `prompt_logprobs`, not for all tokens, another vocabulary, or not probabilities.
    """
    places = _places(content)
    if places is None:
        raise ValueError(f"the answer has no prompt_logprobs; serve the model with {SERVER} to get top-k signals")
    try:
        wanted = [place for place in places[start:] if place is not None]
        if len(places) != total or len(wanted) != total - start:
            raise ValueError(
                f"prompt_logprobs for {sum(place is not None for place in places)} of {total} tokens; "
                "start the server with --no-enable-prefix-caching"
            )
        entries = np.array([entry["logprob"] for place in wanted for entry in place.values()], dtype=np.float64)
        ids_N = np.fromiter((int(token) for place in wanted for token in place), np.int64, len(entries))
    except (TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"prompt_logprobs are not log-probabilities by token id ({error})") from error
    foreign_N = (ids_N < 0) | (ids_N >= vocab_rows)
    if foreign_N.any():
        raise ValueError(
            f"returned token {ids_N[foreign_N][0]}, but the vocabulary of target.path has {vocab_rows} rows; "
            "target.path must be the served model"
        )
    counts_R = np.array([len(place) for place in wanted], dtype=np.int64)
    return topk_table(ids_N, entries, counts_R, k)


def _places(content: bytes) -> Sequence[Mapping[str, Any] | None] | None:
    """`prompt_logprobs` of the first choice; some servers put it next to the choices."""
    import jiter  # A dependency of the openai client; three times as fast as json here.

    try:
        answer = cast(dict[str, Any], jiter.from_json(content))
        choice = answer["choices"][0]
        return choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the answer is not a completion ({type(error).__name__}); target.endpoint.urls must be those of "
            "OpenAI-compatible servers and end in /v1"
        ) from error


def topk_table(ids_N: np.ndarray, logs_N: np.ndarray, counts_R: np.ndarray, k: int) -> TopK:
    """The k most probable entries of each row (of equal ones the smaller ids) and the log of the rest's probability.

    Rows are concatenated, with ``counts_R`` entries each. Raises ValueError if the probabilities of a row sum to more than one.
    """
    rows_N = np.repeat(np.arange(len(counts_R)), counts_R)
    order_N = np.lexsort((ids_N, -logs_N, rows_N))
    ranks_N = np.arange(len(order_N)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
    kept_N = (ranks_N < k) & (logs_N[order_N] > CLAMPED)
    at, order_N = (rows_N[kept_N], ranks_N[kept_N]), order_N[kept_N]
    ids_RK, logs_RK = np.zeros((len(counts_R), k), np.int64), np.full((len(counts_R), k), -np.inf)
    ids_RK[at], logs_RK[at] = ids_N[order_N], logs_N[order_N]
    mass_R = np.exp(logs_RK).sum(-1)
    if mass_R.max(initial=0.0) > 1 + _SUM_SLACK or np.isnan(mass_R).any():
        raise ValueError(f"probabilities sum to {mass_R.max():.4g}; start the server with --logprobs-mode raw_logprobs")
    with np.errstate(divide="ignore"):
        # A rest below the precision of float32 counts as zero.
        log_tail_R = np.log(np.where(1 - mass_R > k * 2.0**-23, 1 - mass_R, 0.0))
    return ids_RK, logs_RK.astype(np.float32), log_tail_R.astype(np.float32)
