"""Replay: tau at every gamma from one draft pass over stored target responses, without the target in memory.

Speculative decoding along a text is a chain of blocks. One that starts at token t keeps k of its drafted tokens and adds
the target's own, so that the next starts at t + k + 1; given the text, k is random, and one law serves every rule:

    P(k >= j | text) = exp(-max(0, S_1, .., S_j))        S_i = cost of the i tokens from the block's start

Rule `block`: the cost of a token is log(target / draft). Algorithm 2 of 2403.10444 keeps a drafted prefix x_1..x_j with
probability w_j = min(1, w_(j-1) * target / draft) = exp(S_j - max(0, S_1, .., S_j)), and the tokens after a kept prefix are
distributed as the target's. So P(k >= j | text) = draft(x_1..x_j) * w_j / target(x_1..x_j).
Rules that judge each token alone: the cost is -log a_t, never negative, so that the law is the product of the a_t;
a_t = min(1, draft / target) under `sample` (2211.17192, by maximal coupling), 1 or 0 where drafts take their argmax.

A parallel draft proposes token j of a block from the text before the block alone: draft_j(x_(i+j) | x_<=i) for a block after x_i.
The law stays the same, but the cost of a token depends on the block's start and on its offset, so the sums S run along a row of a
table (start, offset). Why the law holds:
`sample`: proposal j is drawn independently of the earlier proposals, so it is a draw from draft_j even if they were kept. The
verifier knows draft_j and couples the proposal to the target's conditional given the text: given the emitted token, it was the
proposal with probability min(1, draft_j / target). An emitted token is distributed as the target's whether proposals were kept or
not, so the coins of a block and the text after it are independent.
`block`: algorithm 2 needs some conditional draft(. | x_1..x_(j-1)) at each position; one that ignores its condition is a special
case. The joint ratio is the product of target(x_(i+j) | x_<(i+j)) / draft_j(x_(i+j) | x_<=i).
If the draft takes its argmax, the text alone decides, as before.

Shapes: N responses, T positions (padded), K gammas, J offsets of a block, J1 = kept tokens of a block, 0..max gamma.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from speculative.measure.record import Record
from speculative.measure.token_scores import TokenScores
from speculative.rules.rule import Rule

GAMMAS = tuple(range(1, 17))
WORRYING_Z = 4.0  # A larger gap between live decoding and replay is not chance.
# Greedy decoding has no randomness, but a near-tie may turn out differently in a batch of another shape.
GREEDY_BLOCK_TOLERANCE = 0.02
# Entries (positions x responses x gammas) of the table that one group of responses fills.
ENTRIES_PER_GROUP = 1 << 22


class TextCosts(NamedTuple):
    """Cost of each token of a response (T,) under a rule, inf where it is never kept; and the positions without the draft.

    costs_T is a table (T, J) by start and offset for a parallel draft; see `TokenScores.by_start`.
    sure_T: tokens kept of a block that starts at this token if a drafter without a model proposes it (`baseline_replay`);
    -1 if the draft proposes. None = the draft proposes everywhere. lossless: False for costs of weights, which may exceed 1.
    """

    costs_T: np.ndarray
    sure_T: np.ndarray | None = None
    lossless: bool = True


class Blocks(NamedTuple):
    """Expected blocks (N, K): blocks proposed without a model, and the others (drafted or plain)."""

    found_NK: np.ndarray
    others_NK: np.ndarray

    @property
    def calls_NK(self) -> np.ndarray:
        """Target calls: all blocks."""
        return self.found_NK + self.others_NK


def texts_of(scores: Sequence[TokenScores], rule: Rule, sure: Sequence[np.ndarray] | None = None) -> list[TextCosts]:
    """Costs of scored responses for the law of blocks; `greedy` and `greedy-draft` are equal here. sure:
    `TextCosts.sure_T` of each, if another drafter proposes first.

    Under lenience costs are -log(kept / target) (`speculative.rules.rule`): the mean of the weights kept / target is the acceptance rate,
    the mean of what exceeds 1 the total variation, the mean product of j weights P(j drafted tokens are kept). A token that is not kept has
    the rest, 1 - kept / target: blocks start in the target's contexts.
    """
    texts = []
    for place, own in enumerate(scores):
        own = own if own.by_start is None else own.by_start
        costs_T = own.log_target_probs - own.log_drafted(rule) if rule.joint else -own.accept_log_probs(rule)
        texts.append(TextCosts(costs_T, None if sure is None else sure[place], rule.lossless))
    return texts


def texts_kept(accept_probs: Sequence[np.ndarray]) -> list[TextCosts]:
    """Costs of tokens that are kept independently with these probabilities: (T,), or (T, J) by start and offset for a parallel draft."""
    with np.errstate(divide="ignore"):
        return [TextCosts(-np.log(probs)) for probs in accept_probs]


class _Group(NamedTuple):
    """Responses padded to one length, with room for a block of `width` tokens after the last, and the requested gammas.

    costs: (T, N), or for a parallel draft (T, N, J) by start and offset.
    """

    rows: list[int]
    costs: np.ndarray
    sure_TN: np.ndarray | None
    lengths_N: np.ndarray
    gammas_K: np.ndarray
    sure_gammas_K: np.ndarray
    width: int
    lossless: bool

    @property
    def starts(self) -> range:
        """Where a block may start."""
        return range(int(self.lengths_N.max(initial=0)))


def _groups(texts: Sequence[TextCosts], gammas: Sequence[int], sure_gammas: Sequence[int]) -> Iterator[_Group]:
    """Responses of similar length together, so that a table (T, N, K) stays small. Raises ValueError for a gamma beyond a parallel draft's
    scored offsets.
    """
    width = max((*gammas, *sure_gammas))
    scored = [text.costs_T.shape[1] for text in texts if text.costs_T.ndim == 2]
    if scored and max(gammas) > min(scored):
        raise ValueError(f"gamma {max(gammas)} of a parallel draft that was scored at {min(scored)} offsets")
    offsets = (width,) if scored else ()
    order = sorted(range(len(texts)), key=lambda row: len(texts[row].costs_T), reverse=True)
    while order:
        longest = len(texts[order[0]].costs_T) + width + 1
        count = max(1, ENTRIES_PER_GROUP // (longest * len(gammas)))
        rows, order = order[:count], order[count:]
        # Offsets beyond the draft's: only drafters without a model propose that many tokens.
        costs = np.full((longest, len(rows), *offsets), np.inf if scored else 0.0)
        sure_TN = None
        if any(texts[row].sure_T is not None for row in rows):
            sure_TN = np.full((longest, len(rows)), -1, dtype=np.int64)
        for column, row in enumerate(rows):
            text = texts[row]
            own = text.costs_T[..., :width] if scored else text.costs_T
            costs[: len(own), column][..., : own.shape[-1]] = own
            if sure_TN is not None and text.sure_T is not None:
                sure_TN[: len(text.sure_T), column] = text.sure_T
        lengths_N = np.array([len(texts[row].costs_T) for row in rows])
        both = np.array(gammas), np.array(sure_gammas)
        yield _Group(rows, costs, sure_TN, lengths_N, *both, width, texts[0].lossless)


def _kept_NJ1(group: _Group, start: int) -> np.ndarray:
    """P(k >= j | text), j = 0..width, of a block that starts at token `start`; the law at the top of this file."""
    costs, width = group.costs, group.width
    steps_JN = costs[start : start + width] if costs.ndim == 2 else costs[start, :, :width].T
    highest_JN = steps_JN.cumsum(0)
    if group.lossless:
        highest_JN = np.maximum(np.maximum.accumulate(highest_JN, axis=0), 0.0)
    kept_J1N = np.ones((width + 1, steps_JN.shape[1]))
    np.exp(-highest_JN, out=kept_J1N[1:])
    return kept_J1N.T


def _exactly_NKJ1(group: _Group, start: int) -> np.ndarray:
    """P(k = j | text) at each gamma: the drop of `kept` below gamma, the rest of it at gamma, 0 beyond.

    Certain if the block is proposed without a model; such a block has at most `sure_gammas_K` tokens.
    """
    kept_NJ1, gammas_K = _kept_NJ1(group, start), group.gammas_K
    counts_J1 = np.arange(kept_NJ1.shape[1])
    drops_NJ1 = kept_NJ1.copy()
    drops_NJ1[:, :-1] -= kept_NJ1[:, 1:]
    exactly_NKJ1 = drops_NJ1[:, None] * (counts_J1 < gammas_K[:, None])
    exactly_NKJ1[:, np.arange(len(gammas_K)), gammas_K] = kept_NJ1[:, gammas_K]
    if group.sure_TN is not None:
        sure_N = group.sure_TN[start]
        taken_S = np.flatnonzero(sure_N >= 0)
        exactly_NKJ1[taken_S] = np.minimum(sure_N[taken_S, None], group.sure_gammas_K)[..., None] == counts_J1
    return exactly_NKJ1


def _starts_TNK(group: _Group) -> np.ndarray:
    """P(a block starts at token t) for each gamma; 0 after the end of a response."""
    starts_TNK = np.zeros((*group.costs.shape[:2], len(group.gammas_K)))
    starts_TNK[0] = 1.0
    for start in group.starts:
        starts_TNK[start] *= (start < group.lengths_N)[:, None]
        exactly_NKJ1 = _exactly_NKJ1(group, start)
        exactly_NKJ1 *= starts_TNK[start][..., None]
        starts_TNK[start + 1 : start + group.width + 2] += exactly_NKJ1.transpose(2, 0, 1)
    starts_TNK[group.starts.stop :] = 0.0
    return starts_TNK


def expected_blocks(
    texts: Sequence[TextCosts], gammas: Iterable[int], sure_gammas: Iterable[int] | None = None
) -> Blocks:
    """Expected blocks at each gamma, of drafters without a model (by `sure_T`) and the others. sure_gammas: (K,) tokens that the former
    propose; None = equal.
    """
    gammas = tuple(gammas)
    sure_gammas = gammas if sure_gammas is None else tuple(sure_gammas)
    found_NK, others_NK = (np.zeros((len(texts), len(gammas))) for _ in range(2))
    for group in _groups(texts, gammas, sure_gammas):
        starts_TNK = _starts_TNK(group)
        if group.sure_TN is not None:
            found_NK[group.rows] = np.where((group.sure_TN >= 0)[..., None], starts_TNK, 0.0).sum(0)
        others_NK[group.rows] = starts_TNK.sum(0) - found_NK[group.rows]
    return Blocks(found_NK, others_NK)


def expected_blocks_of(scores: Sequence[TokenScores], rule: Rule, gammas: Iterable[int] = GAMMAS) -> np.ndarray:
    """Expected target calls (N, K) of each scored response, at each gamma, by any rule: sum_t P(a block starts at t), exact (no i.i.d.
    assumption). The last block counts in full even though the text ends inside it. gamma 0 is plain decoding.
    """
    return expected_blocks(texts_of(scores, rule), gammas).others_NK


def block_variance(texts: Sequence[TextCosts], gamma: int) -> np.ndarray:
    """Variance (N,) of the blocks of each response given its text, computed from the end backwards: mean and mean square of the remaining
    blocks.
    """
    variance_N = np.zeros(len(texts))
    for group in _groups(texts, (gamma,), (gamma,)):
        mean_TN, square_TN = (np.zeros(group.costs.shape[:2]) for _ in range(2))
        for start in reversed(group.starts):
            exactly_J1N = _exactly_NKJ1(group, start)[:, 0].T
            behind_J1 = slice(start + 1, start + gamma + 2)
            inside_N = start < group.lengths_N
            mean_N = (exactly_J1N * mean_TN[behind_J1]).sum(0)
            mean_TN[start] = inside_N * (1.0 + mean_N)
            square_TN[start] = inside_N * (1.0 + 2.0 * mean_N + (exactly_J1N * square_TN[behind_J1]).sum(0))
        variance_N[group.rows] = np.maximum(square_TN[0] - mean_TN[0] ** 2, 0.0)
    return variance_N


def survival_of(scores: Sequence[TokenScores], rule: Rule, gamma: int) -> list[float]:
    """P(the first j drafted tokens of a block are kept), j = 1..gamma, over the blocks that replay expects. A block whose first j tokens
    reach beyond the end of a text does not count for that j; 0 if none is left.
    """
    return shares_of(*(sums_NJ.sum(0) for sums_NJ in survival_sums(scores, rule, gamma)))[0]


def shares_of(blocks_J: np.ndarray, kept_J: np.ndarray) -> tuple[list[float], float]:
    """(survival by place, accepted/drafted) from the number of blocks that drafted at least j tokens, and that kept at least j."""
    survival_J = kept_J / np.where(blocks_J > 0, blocks_J, 1.0)
    return survival_J.tolist(), float(kept_J.sum() / max(blocks_J.sum(), 1e-9))


def survival_sums(
    scores: Sequence[TokenScores], rule: Rule, gamma: int, *, spared: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Expected blocks (N, J) whose first j drafted tokens lie within the text, j = 1..gamma, and those of them that keep all j. spared:
    tokens at the end that are never drafted: 1 where an engine leaves room for the target's own.
    """
    blocks_NJ, kept_NJ = np.zeros((2, len(scores), gamma))
    for group in _groups(texts_of(scores, rule), (gamma,), (gamma,)):
        starts_TN = _starts_TNK(group)[..., 0]
        for start in group.starts:
            inside_NJ = start + np.arange(1, gamma + 1) + spared <= group.lengths_N[:, None]
            weights_NJ = starts_TN[start][:, None] * inside_NJ
            blocks_NJ[group.rows] += weights_NJ
            kept_NJ[group.rows] += weights_NJ * _kept_NJ1(group, start)[:, 1:]
    return blocks_NJ, kept_NJ


def replay(accept_probs: Sequence[np.ndarray], gammas: Iterable[int] = GAMMAS) -> dict[int, float]:
    """{gamma: tau}: tokens of all responses over expected target calls; accept_probs: see `texts_kept`."""
    gammas, tokens = tuple(gammas), sum(len(probs) for probs in accept_probs)
    taus_K = tokens / expected_blocks(texts_kept(accept_probs), gammas).others_NK.sum(0)
    return dict(zip(gammas, taus_K.tolist(), strict=True))


class ReplayCheck(Record):
    """Blocks of a live run compared with the prediction by replay of its own text."""

    predicted_blocks: float = Field(description="by replay")
    live_blocks: int = Field(description="counted")
    z: float | None = Field(None, description="gap in standard errors; null: different although nothing is random")
    agrees: bool = Field(True, description="whether the difference can be chance")


def agreement_of(
    scores: Sequence[TokenScores],
    rule: Rule,
    counted_blocks_N: Sequence[int],
    gamma: int,
    sure: Sequence[np.ndarray] | None = None,
) -> ReplayCheck:
    """Replay of a live run's text against the blocks it counted; sure: `TextCosts.sure_T` of lookup before the draft. See `agreement`."""
    predicted_N, variance_N = predicted_blocks(scores, rule, gamma, sure)
    return agreement(predicted_N, variance_N, counted_blocks_N)


def predicted_blocks(
    scores: Sequence[TokenScores],
    rule: Rule,
    gamma: int,
    sure: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (N,) of the blocks of each response, given its text."""
    texts = texts_of(scores, rule, sure)
    return expected_blocks(texts, (gamma,)).calls_NK[:, 0], block_variance(texts, gamma)


def agreement(
    predicted_N: Sequence[float] | np.ndarray, variance_N: Sequence[float] | np.ndarray, counted_N: Sequence[int]
) -> ReplayCheck:
    """Compare the blocks that a live run counted for each response with their mean and variance by replay. z is in standard deviations of
    the acceptance coins; without randomness (greedy) 0 if both are equal within rounding, else None. The check detects faults that only
    lower acceptance and leave the text correct, such as draft positions off by one.
    """
    predicted, counted = float(np.sum(predicted_N)), int(np.sum(counted_N))
    deviation = float(np.sqrt(np.sum(variance_N)))
    gap = counted - predicted
    z = 0.0 if abs(gap) < 1e-6 else gap / deviation if deviation > 1e-6 else None
    agrees = abs(gap) <= GREEDY_BLOCK_TOLERANCE * predicted if z is None else abs(z) <= WORRYING_Z
    return ReplayCheck(predicted_blocks=predicted, live_blocks=counted, z=z, agrees=bool(agrees))


def agreement_words(check: ReplayCheck | None, tokens: int) -> str:
    """`replay 2.31, z +0.4`: tau that replay predicts for a live run with this many tokens, to compare with live tau."""
    if check is None:
        return "no replay for this rule"
    # If a draft takes its argmax, the text alone determines the number of blocks.
    certain = check.z == 0 and float(check.predicted_blocks).is_integer()
    how = "exact" if certain else "not exact" if check.z is None else f"z {check.z:+.1f}"
    return f"replay {tokens / check.predicted_blocks:.2f}, {how}"


def agreement_warning(check: ReplayCheck | None) -> str | None:
    """A warning if live decoding and replay differ by more than chance (|z| > 4) or, at temperature 0, by more than near-ties."""
    if check is None or check.agrees:
        return None
    size = "no randomness involved" if check.z is None else f"z = {check.z:+.1f}"
    return (
        f"live decoding took {check.live_blocks} blocks but replay of the same text predicts "
        f"{check.predicted_blocks:.0f} ({size}): the text is correct, but acceptance does not match this draft's "
        "probabilities; check draft positions, masks and sampling for differences, and rounding (bfloat16) in a nearly "
        "deterministic draft"
    )
