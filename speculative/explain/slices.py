"""Acceptance by slice: where in the text a draft is good, and where its rejections come from.

Shapes: N responses, T tokens of one response, P prompts, S slices of a dimension, flat_T all tokens of all responses.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np
from pydantic import Field

from speculative.explain.token_class import CLASSES, token_classes
from speculative.measure.effects import Certain, certain_of
from speculative.measure.intervals import Interval, ratio_interval
from speculative.measure.measured import DRAFT, UNDISTILLED
from speculative.measure.record import Record, Text
from speculative.measure.token_scores import StoredText, TokenScores
from speculative.rules.rule import Rule

POSITION_EDGES = (1, 5, 17, 65, 257)  # Lower edges; the first token of a response is at 1.
POSITION_NAMES = ("1-4", "5-16", "17-64", "65-256", "257+")
FIRST_TOKENS = 8
NATS_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0)
NATS_NAMES = ("< 0.1", "0.1-0.5", "0.5-1", "1-2", "> 2")


class SlicedText(StoredText, Protocol):
    """A stored response that knows its domain and its prompt; `evaluate.HeldoutResponse` is one."""

    @property
    def key(self) -> str: ...

    @property
    def domain(self) -> str: ...

    @property
    def prompt(self) -> Hashable: ...


class SliceRow(Record):
    """Acceptance on a part of the held-out responses."""

    name: Text = Field(description="name of the slice")
    tokens: int = Field(description="tokens in the slice")
    prompts: int = Field(description="prompts in the slice")
    alpha: dict[str, float] = Field(description="alpha by draft")
    alpha_ci: dict[str, Interval | None] = Field({}, description="95 % interval by draft, not corrected for other rows")
    gain: float | None = Field(None, description="draft minus undistilled draft")
    gain_ci: Interval | None = Field(None, description="its interval, at `corrected_confidence`")
    certain: Certain | None = Field(None, description="whether the interval excludes 0, on enough prompts")
    lost_share: float | None = Field(None, description="share of all rejected probability")


class SliceTable(Record):
    """The held-out responses divided along one dimension."""

    dimension: Text = Field(description="domain, position, token class, ...")
    unit: Text | None = Field(None, description="unit of the bounds")
    corrected_confidence: float | None = Field(None, description="of each gain's interval (Bonferroni over the rows)")
    rows: list[SliceRow] = Field(description="the slices; every token is in exactly one")


# Of every token: the number of its slice, and the name of each number.
Partition = tuple[np.ndarray, Sequence[str]]


def slice_tables(
    texts: Sequence[SlicedText],
    scores: Mapping[str, Sequence[TokenScores]],
    *,
    rule: Rule,
    pieces: Sequence[Sequence[str]] | None,
    entropies: Sequence[np.ndarray] | None = None,
    best: str = DRAFT,
    confidence: float = 0.95,
) -> list[SliceTable]:
    """One table per dimension; slices without a token are left out.

    scores: by draft, one `TokenScores` per text. pieces: of each text (`token_class.token_pieces`); None leaves token classes out.
    entropies: of the target at each token, in nats (`target_view.target_entropies`); None slices sampled text by the surprisal of its
    tokens instead, which, as token class, describes text. Intervals resample prompts (`intervals.ratio_interval`); those of the gains (of
    `best` over the undistilled draft) of one dimension hold together with `confidence` (Bonferroni over its rows); None for a single
    prompt. Under rule `block` alpha is that of `sample`.

    Raises ValueError when `best` is not scored or something is not of the same text.
    """
    lengths_N = np.array([len(text.response_ids) for text in texts], dtype=np.int64)
    if best not in scores:
        raise ValueError(f"no scores of {best!r} among {sorted(scores)}")
    accepted = {}
    for name, own in scores.items():
        _check_lengths(lengths_N, [len(one) for one in own], f"scores of {name!r}")
        accepted[name] = _flat([one.accept_probs(rule) for one in own])
    index: dict[Hashable, int] = {}
    prompt_of_flat_T = np.repeat([index.setdefault(text.prompt, len(index)) for text in texts], lengths_N)
    if not len(prompt_of_flat_T):
        return []
    gain_flat_T = accepted[best] - accepted[UNDISTILLED] if UNDISTILLED in accepted else None
    return [
        _table(dimension, unit, partition, prompt_of_flat_T, accepted, 1.0 - accepted[best], gain_flat_T, confidence)
        for dimension, unit, partition in _dimensions(texts, lengths_N, pieces, entropies)
    ]


def _table(
    dimension: str,
    unit: str,
    partition: Partition,
    prompt_of_flat_T: np.ndarray,
    accepted: Mapping[str, np.ndarray],
    lost_flat_T: np.ndarray,
    gain_flat_T: np.ndarray | None,
    confidence: float,
) -> SliceTable:
    (slices_flat_T, names), prompts = partition, int(prompt_of_flat_T.max()) + 1
    cell_flat_T = slices_flat_T.astype(np.int64) * prompts + prompt_of_flat_T

    def sums_SP(values_flat_T: np.ndarray) -> np.ndarray:
        sums = np.bincount(cell_flat_T, weights=values_flat_T, minlength=len(names) * prompts)
        return sums.reshape(len(names), prompts)

    tokens_SP, lost_S = sums_SP(np.ones(len(cell_flat_T))), sums_SP(lost_flat_T).sum(1)
    accepted_SP = {name: sums_SP(values_flat_T) for name, values_flat_T in accepted.items()}
    gains_SP = None if gain_flat_T is None else sums_SP(gain_flat_T)
    filled = np.flatnonzero(tokens_SP.sum(1) > 0).tolist()
    corrected, rows = 1.0 - (1.0 - confidence) / len(filled), []
    for place in filled:
        inside_P = tokens_SP[place] > 0
        tokens_P = tokens_SP[place][inside_P]
        alphas = {name: _ratio(own_SP[place][inside_P], tokens_P, confidence) for name, own_SP in accepted_SP.items()}
        gain, gain_ci = (None, None) if gains_SP is None else _ratio(gains_SP[place][inside_P], tokens_P, corrected)
        rows.append(
            SliceRow(
                name=names[place],
                tokens=int(tokens_P.sum()),
                prompts=len(tokens_P),
                alpha={name: alpha for name, (alpha, _) in alphas.items()},
                alpha_ci={name: ends for name, (_, ends) in alphas.items()},
                gain=gain,
                gain_ci=gain_ci,
                certain=certain_of(gain_ci, len(tokens_P), corrected),
                lost_share=float(lost_S[place] / max(lost_S.sum(), 1e-300)),
            )
        )
    return SliceTable(dimension=dimension, unit=unit, corrected_confidence=corrected, rows=rows)


def _ratio(values_P: np.ndarray, tokens_P: np.ndarray, confidence: float) -> tuple[float, Interval | None]:
    """Mean per token, and its interval."""
    interval = ratio_interval(values_P, tokens_P, confidence) if len(tokens_P) > 1 else None
    return float(values_P.sum() / tokens_P.sum()), interval


def _dimensions(
    texts: Sequence[SlicedText],
    lengths_N: np.ndarray,
    pieces: Sequence[Sequence[str]] | None,
    entropies: Sequence[np.ndarray] | None,
) -> list[tuple[str, str, Partition]]:
    """(dimension, unit, partition) of every dimension that can be told."""
    positions_flat_T = _flat([np.arange(1, length + 1) for length in lengths_N])
    first_names = (f"first {FIRST_TOKENS}", "later")
    dimensions: list[tuple[str, str, Partition]] = [
        ("domain", "", _by_name([text.domain for text in texts], lengths_N)),
        ("prompt length", "tokens of the prompt", _by_prompt_length(texts, lengths_N)),
        ("position", "place in the response", _by_edges(positions_flat_T, POSITION_EDGES, POSITION_NAMES)),
        ("first tokens", "tokens of the response", ((positions_flat_T > FIRST_TOKENS).astype(np.int64), first_names)),
    ]
    if pieces is not None:
        _check_lengths(lengths_N, [len(values) for values in pieces], "pieces")
        places = [CLASSES.index(name) for values in pieces for name in token_classes(values)]
        dimensions.append(("token class", "", (np.array(places, dtype=np.int64), CLASSES)))
    if entropies is not None:
        _check_lengths(lengths_N, [len(values) for values in entropies], "entropies")
        dimensions.append(("target entropy", "nats", _by_edges(_flat(entropies), NATS_EDGES, NATS_NAMES)))
    else:
        surprisals_flat_T = -_flat([np.asarray(text.log_target_probs, dtype=np.float64) for text in texts])
        # Greedy text is stored with log probability 0 everywhere: nothing to tell apart; NaN is not known.
        told = surprisals_flat_T.any() and not np.isnan(surprisals_flat_T).any()
        if len(surprisals_flat_T) == lengths_N.sum() and told:
            partition = _by_edges(surprisals_flat_T, NATS_EDGES, NATS_NAMES)
            dimensions.append(("target surprisal", "nats of the target's token", partition))
    return dimensions


def _by_name(names: Sequence[str], lengths_N: np.ndarray) -> Partition:
    order = sorted(set(names))
    return np.repeat([order.index(name) for name in names], lengths_N), order


def _by_prompt_length(texts: Sequence[SlicedText], lengths_N: np.ndarray) -> Partition:
    """Bins 1-16, 17-32, 33-64, ... as far as the longest prompt."""
    prompt_tokens_N = np.array([len(text.prompt_ids) for text in texts])
    edges = [1, 17]
    while edges[-1] <= prompt_tokens_N.max(initial=0):
        edges.append(2 * edges[-1] - 1)
    names = [f"{low}-{high - 1} tokens" for low, high in itertools.pairwise(edges)]
    return _by_edges(np.repeat(prompt_tokens_N, lengths_N), edges[:-1], names)


def _by_edges(values_flat_T: np.ndarray, edges: Sequence[float], names: Sequence[str]) -> Partition:
    """Slice k holds values from edges[k] up to, and without, edges[k + 1]; the first also what is below it."""
    return np.maximum(np.searchsorted(edges, values_flat_T, side="right") - 1, 0), names


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)


def _check_lengths(lengths_N: np.ndarray, others: Sequence[int], what: str) -> None:
    if lengths_N.tolist() != list(others):
        raise ValueError(f"{what} are not of these texts: their numbers of tokens differ")
