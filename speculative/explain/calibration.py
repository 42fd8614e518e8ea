"""Calibration of a draft: how often a token is accepted at a given draft probability, and when to stop drafting.

Let bin(x) be the bin of the draft's probability of x. Importance weighting turns an expectation over the draft's proposals
into one over the target's text, so stored text is enough and the target's distributions are not needed:

    E_{v ~ draft} 1[bin(v) = b] min(1, target(v) / draft(v)) = E_{x ~ target} 1[bin(x) = b] min(1, draft(x) / target(x))

Shapes: T tokens of one response, P prompts, C bins of confidence.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from speculative.explain.slices import SlicedText
from speculative.measure.intervals import Interval, ratio_interval, sum_by_prompt
from speculative.measure.measured import DRAFT
from speculative.measure.record import Record, Text
from speculative.measure.token_scores import CONFIDENCE_EDGES, TokenScores
from speculative.rules.rule import draft_draws

BINS = len(CONFIDENCE_EDGES)
EDGES = np.append(CONFIDENCE_EDGES, 1.0)
CENTRES = (EDGES[:-1] + EDGES[1:]) / 2
ENOUGH = 20  # Drafted tokens expected in a bin before it may decide about a confidence stop.


class CalibrationBin(Record):
    """Drafted tokens of one confidence."""

    low: float = Field(description="lower edge of the confidence")
    high: float = Field(description="upper edge")
    weight: float = Field(description="share of drafted tokens")
    confidence: float = Field(description="mean probability that the draft gave the token")
    accepted: float = Field(description="share that was accepted")
    ci: Interval | None = Field(None, description="its 95 % interval")


class Calibration(Record):
    """Calibration of the judged draft."""

    rule: str | None = Field(None, description="engine rule")
    name: str | None = Field(None, description="name of the draft")
    bins: list[CalibrationBin] = Field(description="one bin per range of confidence")
    expected_error: float | None = Field(None, description="mean distance between confidence and acceptance")
    stop_below: float | None = Field(
        None,
        description="advised confidence stop; 0: no stop; null: not known, or drafting more than one token never pays",
    )
    words: Text = Field(description="the advice in words")


def calibration(
    texts: Sequence[SlicedText],
    scores: Sequence[TokenScores],
    rule: str,
    *,
    name: str = DRAFT,
    confidence: float = 0.95,
) -> Calibration:
    """The reliability curve of a draft's confidence in the token it drafts; `stop_below` is left open.

    Rules that draft the argmax: confidence is the argmax's probability, and a draft whose probabilities hold lies on the diagonal. Rules
    that sample: the probability of the sampled token under the serving settings; acceptance is then min(1, target / draft), so a draft
    equal to the target is accepted at every confidence. Mean confidence of a bin is exact there from 0.5 up, where a bin has room for one
    token; below it is the bin's mass over the number of tokens that fit it best, and in the lowest bin that of the accepted tokens.

    Bins in which nothing is drafted are left out. accepted: how probable it is that a drafted token of the bin is accepted once a block
    reaches it, cut at 1. Where all are accepted, or none, its interval is that of a binomial with a trial for each prompt, or each drafted
    token if those are fewer; None for a single prompt. Raises ValueError for sampled drafting when the scores lack `confidence_mass_TC`.
    """
    drafted_PC, accepted_PC, confidences_C = by_prompt(texts, scores, rule)
    total = float(drafted_PC.sum())
    bins = []
    for place in np.flatnonzero(drafted_PC.any(0)).tolist():
        inside_P = drafted_PC[:, place] > 0
        drafted_P, accepted_P = drafted_PC[inside_P, place], accepted_PC[inside_P, place]
        drafted = float(drafted_P.sum())
        bins.append(
            CalibrationBin(
                low=place / BINS, high=(place + 1) / BINS, weight=drafted / total, confidence=float(confidences_C[place]),
                accepted=min(1.0, float(accepted_P.sum()) / drafted), ci=_interval(accepted_P, drafted_P, confidence),
            )
        )  # fmt: skip
    error = float(sum(one.weight * abs(one.accepted - one.confidence) for one in bins))
    words = _words(bins, error)
    return Calibration(rule=rule, name=name, bins=bins, expected_error=error, stop_below=None, words=words)


def stop_below(
    scores: Sequence[TokenScores],
    rule: str,
    *,
    speed_up: float,
    cost_ratio: float,
    verify_slope: float,
    parallel: bool = False,
) -> tuple[float | None, str]:
    """(threshold for the decoder's confidence stop, one sentence): drafting ends after a token of lower probability.

    A further drafted token costs cost_ratio (0 if parallel: a block is one call) + verify_slope target steps, the slope being (v(gamma) -
    v(0)) / gamma. speed_up is the predicted one at the pair's best gamma: a target step is worth that many tokens, and at least one. The
    drafted token brings the chance that the token before it is accepted and it is too, measured by the bin of the token before. The
    threshold is the upper edge of the highest of the bins, counted from the lowest, after which a token does not pay; bins of fewer than
    ENOUGH drafted tokens are skipped. 0.0: a further token always pays. None: it never pays; the sentence says what to do. Two opposite
    effects are not counted: rejection of the block's earlier tokens, and the gain of a second further token. Raises ValueError for sampled
    drafting when the scores lack `confidence_mass_TC`.
    """
    drafted_C, both_C = np.zeros(BINS), np.zeros(BINS)
    for own in scores:
        drafted_TC, accepted_TC = _drafted(own, rule)
        drafted_C += drafted_TC[:-1].sum(0)
        further_T = own.accept_probs(rule)[1:] if own.by_start is None else own.by_start.accept_probs(rule)[:-1, 1]
        both_C += (accepted_TC[:-1] * further_T[:, None]).sum(0)
    filled = np.flatnonzero(drafted_C >= ENOUGH)
    if not len(filled):
        return 0.0, "there is too little text to advise a confidence stop: leave it off"
    price, paying = (0.0 if parallel else cost_ratio) + verify_slope, speed_up > 1.0
    pays = both_C[filled] > max(1.0, speed_up) * price * drafted_C[filled]
    nowhere = f"at c = {cost_ratio:.2f} no gamma makes this draft pay"
    if pays[0]:
        if not paying:
            return 0.0, f"{nowhere}, and no confidence stop does: decode without it"
        return 0.0, "one more token pays after every drafted token: leave the confidence stop off"
    if not pays.any():
        if not paying:
            return None, f"{nowhere}, and no confidence stop does: decode without it"
        return None, "one more token never pays, even after the most confident token: use gamma 1 at most"
    threshold = (int(filled[int(pays.argmax()) - 1]) + 1) / BINS
    why = f"one more token costs {price:.2f} target steps there, more than it gains"
    if not paying:
        return threshold, (
            f"{nowhere}; stopping after a token of probability below {threshold:.1f} loses less ({why}), but may still not "
            "pay"
        )
    return threshold, f"stop drafting after a token of probability below {threshold:.1f}: {why}"


def _interval(accepted_P: np.ndarray, drafted_P: np.ndarray, confidence: float) -> Interval | None:
    if len(drafted_P) < 2:
        return None
    low, high = (min(1.0, end) for end in ratio_interval(accepted_P, drafted_P, confidence))
    if low == high and low in (0.0, 1.0):
        # Clopper and Pearson's bound for no failure in this many trials.
        trials = max(1.0, min(len(drafted_P), float(drafted_P.sum())))
        bound = ((1.0 - confidence) / 2) ** (1.0 / trials)
        return (0.0, 1.0 - bound) if low == 0.0 else (bound, 1.0)
    return low, high


def _drafted(own: TokenScores, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Expected drafted tokens (T, C) and accepted tokens (T, C) of each token of a response in each bin."""
    rows, columns = np.arange(len(own)), _bin(_draft_probs(own, rule))
    drafted_TC, accepted_TC = np.zeros((2, len(own), BINS))
    accepted_TC[rows, columns] = own.accept_probs(rule)
    if draft_draws(rule):
        if own.confidence_mass_TC is None:
            raise ValueError("no confidence in these scores: make them with score_tokens(..., confidence=settings)")
        return own.confidence_mass_TC, accepted_TC
    drafted_TC[rows, columns] = 1.0
    return drafted_TC, accepted_TC


def _mean_confidences(scores: Sequence[TokenScores], rule: str) -> np.ndarray:
    """Mean draft probability (C,) of a drafted token in each bin; its centre if there is no data."""
    probs_T = np.concatenate([_draft_probs(own, rule) for own in scores])
    bins_T = _bin(probs_T)
    if not draft_draws(rule):
        counts_C = np.bincount(bins_T, minlength=BINS)
        sums_C = np.bincount(bins_T, weights=probs_T, minlength=BINS)
        return np.where(counts_C > 0, sums_C / np.maximum(counts_C, 1), CENTRES)
    mass_TC = np.concatenate([_drafted(own, rule)[0] for own in scores])
    # Tokens of the vocabulary in the bin: as many as its mass can be shared among.
    tokens_TC = np.maximum(np.rint(mass_TC / CENTRES), 1.0)
    means_TC = np.clip(mass_TC / tokens_TC, EDGES[:-1], EDGES[1:])
    weights_C = mass_TC.sum(0)
    means_C = np.where(weights_C > 0, (mass_TC * means_TC).sum(0) / np.where(weights_C > 0, weights_C, 1.0), CENTRES)
    lowest_T = np.concatenate([own.accept_probs(rule) for own in scores]) * (bins_T == 0)
    means_C[0] = (lowest_T * probs_T).sum() / lowest_T.sum() if lowest_T.sum() > 0 else CENTRES[0]
    return means_C


def _draft_probs(own: TokenScores, rule: str) -> np.ndarray:
    """Draft probability of the stored token if the draft samples, else of its argmax."""
    return np.exp(own.log_drafted(rule)) if draft_draws(rule) else own.choice_probs


def _bin(probs_T: np.ndarray) -> np.ndarray:
    return np.minimum((probs_T * BINS).astype(np.int64), BINS - 1)


def by_prompt(
    texts: Sequence[SlicedText], scores: Sequence[TokenScores], rule: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(expected drafted tokens (P, C), accepted ones (P, C), mean confidence (C,)). Raises ValueError as `calibration`."""
    keys = [text.prompt for text in texts]
    sums_N = np.array([np.sum(_drafted(own, rule), axis=1).ravel() for own in scores]).reshape(-1, 2 * BINS)
    sums_P = np.stack([sum_by_prompt(keys, values_N) for values_N in sums_N.T], 1)
    return sums_P[:, :BINS], sums_P[:, BINS:], _mean_confidences(scores, rule)


def _words(bins: Sequence[CalibrationBin], error: float) -> str:
    if not bins:
        return "nothing was drafted"
    ends = [bins[-1]] if len(bins) == 1 else [bins[-1], bins[0]]
    told = [
        f"{100 * one.accepted:.0f} % of the tokens drafted with probability {one.low:.1f}-{one.high:.1f} are accepted"
        for one in ends
    ]
    return f"{'; '.join(told)}; on average acceptance and confidence differ by {error:.2f}"
