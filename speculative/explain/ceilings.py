"""Upper limits of drafting: the perfect draft, the best greedy draft, prompt lookup without training; and whether it pays.

Shapes: N texts, T tokens of one text, K gammas.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from transformers import PreTrainedModel

from speculative.explain.target_view import top_tokens
from speculative.measure.baseline_replay import kept_by_lookup, tuned_lookup
from speculative.measure.cost import StepCosts, best_gamma, break_even_alpha, iid_tau
from speculative.measure.measured import LOOKUP, How, Measured
from speculative.measure.metrics import alpha_with_interval, predicted_row, rule_curve
from speculative.measure.replay import TextCosts, replay, texts_kept, texts_of
from speculative.measure.token_scores import StoredText, TokenScores, scored_gammas
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

# Largest useful draft step, in target steps. Above 0.6 the break-even alpha at gamma 5 is 0.83 even if verifying is free
# (v = 1), as much as the best distilled drafts reach, and a perfect draft stays under 1 / c = 1.67x at any gamma.
# This does not hold for a draft with one call per block.
HOPELESS_COST_RATIO = 0.6
# Real drafts (alpha 0.7-0.85) gain a third of what a perfect draft gains: below 1.5x that is nothing.
PERFECT_WORTH = 1.5
# Above every published distilled draft that is a separate model (0.57 - 0.87): if this alpha does not pay, no draft will.
REALISTIC_ALPHA = 0.9
# Predicted speed-ups are accurate to 10 %, so smaller ones may not be real.
WORTHWHILE = 1.1
# Two predictions for one pair share their errors, so a smaller gain counts; below this it is not worth the work.
GAIN_WORTHWHILE = 1.05
# Share of the gap to its ceiling that distilling has closed for a draft that started at alpha: a line through 15 pairs
# (two of ours, two of a plain loop, 11 published: 2310.07177, OSD, DistillSpec on Qwen3, one null result), starting alpha
# 0.13 to 0.81, shares 0.75 to 0, residual 0.11. Good drafts gain almost nothing; below 0.43 all end near 0.69.
CLOSED_AT_ZERO, CLOSED_PER_ALPHA, WEAK_ALPHA = 0.86, -0.94, 0.43
# Ceilings use gammas up to here even if fewer were measured.
CEILING_GAMMA = 8

# Suffixes and prefixes for the name of a draft.
DISTILLED, CEILING, BEFORE = ", distilled", ", at its ceiling", "lookup + "

# hopeless: at these costs no draft pays enough. no_headroom: distilling is predicted to add less than 5 %.
# already_pays: worth serving now, and distilling improves it. needs_distillation: worth serving only after distilling.
# out_of_reach: not worth it, also not after the typical gain of distilling from this alpha.
DecisionWord = Literal["hopeless", "no_headroom", "already_pays", "needs_distillation", "out_of_reach"]
# Why a pair is hopeless.
HopelessReason = Literal["cost_ratio", "perfect_draft", "realistic_draft"]
# The part that must become cheaper: the draft's steps, the verify call, either one, or both.
Culprit = Literal["draft", "verify", "either", "both"]
WORTH_DISTILLING: tuple[DecisionWord, ...] = ("already_pays", "needs_distillation")


@dataclass(frozen=True)
class TargetPeaks:
    """The target's choice at each of the T stored tokens, under the serving settings. peaks: its largest probability (1 if greedy).
    matches: its argmax is the token.
    """

    peaks: np.ndarray
    matches: np.ndarray


def perfect_taus(gammas: Sequence[int]) -> dict[int, float]:
    """{gamma: gamma + 1}: every drafted token is accepted."""
    return {gamma: gamma + 1.0 for gamma in gammas}


def ceiling_gammas(costs: StepCosts) -> range:
    """Gammas at which a ceiling is looked for: up to the largest measured, and to CEILING_GAMMA."""
    return range(1, max(CEILING_GAMMA, *costs.verify_seconds) + 1)


def target_peaks(target: PreTrainedModel, texts: Sequence[StoredText], settings: SamplingSettings) -> list[TargetPeaks]:
    """`TargetPeaks` of every text, from one target pass. A draft that takes its argmax has that token accepted with the target's
    probability of it: the mean of `peaks` bounds alpha under rule `greedy-draft`, and `matches` replayed give that draft's tau. Raises
    UserError when the target returns NaN or infinite logits.
    """
    peaks = []
    for text, (ids_T1, probs_T1) in zip(texts, top_tokens(target, texts, 1, settings), strict=True):
        peaks_T = np.ones(len(ids_T1)) if settings.greedy else probs_T1[:, 0]
        peaks.append(TargetPeaks(peaks_T, ids_T1[:, 0] == np.asarray(text.response_ids, dtype=np.int64)))
    return peaks


def closed_share(alpha: float, ceiling_alpha: float = 1.0) -> float:
    """Expected share of the gap to the ceiling that distilling closes for a draft with this alpha."""
    own = min(alpha / ceiling_alpha, 1.0)
    start = max(own, WEAK_ALPHA)
    end = start + (1.0 - start) * max(0.0, CLOSED_AT_ZERO + CLOSED_PER_ALPHA * start)
    return (end - own) / (1.0 - own) if own < 1.0 else 0.0


def partly_closed_tau(tau: float, gamma: int, other_tau: float, other_closed_tau: float) -> float:
    """tau of a rule that does not judge tokens one at a time, when it closes the share of its gap to gamma + 1 that another rule closes."""
    gap = gamma + 1.0 - other_tau
    return tau + (gamma + 1.0 - tau) * (other_closed_tau - other_tau) / gap if gap > 1e-9 else tau


def hopeless_because(costs: StepCosts) -> HopelessReason | None:
    """Reason why no draft with these costs can pay, however good it is; None if one can."""
    gammas = ceiling_gammas(costs)
    if not costs.parallel and costs.cost_ratio > HOPELESS_COST_RATIO:
        return "cost_ratio"
    if best_gamma(perfect_taus(gammas), costs)[1] < PERFECT_WORTH:
        return "perfect_draft"
    if best_gamma({gamma: iid_tau(REALISTIC_ALPHA, gamma) for gamma in gammas}, costs)[1] < WORTHWHILE:
        return "realistic_draft"
    return None


def advice(costs: StepCosts) -> tuple[Culprit, str] | None:
    """(the part that costs too much, a sentence with the reason and the fix); None unless the pair is hopeless. A part is to blame where
    the pair would not be hopeless if that part were free: c = 0, or v = 1.
    """
    reason = hopeless_because(costs)
    if reason is None:
        return None
    free_verify = dict.fromkeys(costs.verify_seconds, costs.target_seconds)
    free = replace(costs, draft_seconds={1: 0.0}), replace(costs, verify_seconds=free_verify)
    helps = tuple(hopeless_because(one) is None for one in free)
    blamed: dict[tuple[bool, ...], Culprit] = {(True, False): "draft", (False, True): "verify", (True, True): "either"}
    culprit = blamed.get(helps, "both")
    gammas = ceiling_gammas(costs)
    perfect = reason != "realistic_draft"
    taus = perfect_taus(gammas) if perfect else {gamma: iid_tau(REALISTIC_ALPHA, gamma) for gamma in gammas}
    gamma, speed_up = best_gamma(taus, costs)
    shown = gamma or max(costs.verify_seconds, default=1)
    price = f"c = {costs.cost_ratio:.2f}" + (" of a block" if costs.parallel else "")
    if culprit != "draft":
        price += f" and v({shown}) = {costs.verify_ratio(shown):.2f}"
    whose = "always accepted" if perfect else f"accepted at alpha {REALISTIC_ALPHA}"
    gives = f"{speed_up:.2f}x" if gamma else "no speed-up"
    smaller_batch = "" if costs.batch_size == 1 else "a smaller batch, "
    cheaper = f"make verify calls cheaper ({smaller_batch}another kernel, dtype or device)"
    to_do = {
        "draft": "use a shallower draft",
        "verify": f"the verify call is the bottleneck, so a shallower draft cannot help: {cheaper}",
        "either": f"use a shallower draft or {cheaper}",
        "both": f"use a shallower draft and {cheaper}",
    }[culprit]
    return culprit, f"at {price} even a draft that is {whose} would give {gives}: {to_do}"


def decide(
    costs: StepCosts, now: float, reachable: float, baseline: float, after_lookup: tuple[float, float] = (1.0, 1.0)
) -> DecisionWord:
    """Decide what to do with a draft, from its speed-ups over the target alone: now, at its best gamma; reachable, with `closed_share` of
    the gap to its ceiling closed; after_lookup, the same two with prompt lookup before it. baseline: of a drafter without training; 1 if
    there is none. The thresholds are the constants above.
    """
    if hopeless_because(costs) is not None:
        return "hopeless"
    bar, joint_bar = max(WORTHWHILE, baseline), max(WORTHWHILE, GAIN_WORTHWHILE * baseline)
    if now > 1.0 and reachable < GAIN_WORTHWHILE * now:
        return "no_headroom"
    if reachable < bar and after_lookup[1] < joint_bar:
        return "out_of_reach"
    return "already_pays" if now >= bar or after_lookup[0] >= joint_bar else "needs_distillation"


@dataclass(frozen=True)
class Price:
    """Seconds and ratios of a way under a rule, what a perfect draft gives at them, and the alpha that each gamma needs (i.i.d.).

    hopeless, advice: why no draft with these costs pays, and the fix; None if one can.
    """

    way: str
    rule: str
    batch_size: int
    context: int
    target_step_seconds: float
    draft_step_seconds: float
    cost_ratio: float
    verify_seconds: dict[int, float]
    perfect_gamma: int
    perfect_speed_up: float
    break_even_alpha: dict[int, float | None]
    hopeless: HopelessReason | None
    advice: str | None


def price_of(way: str, rule: str, costs: StepCosts) -> Price:
    """The price of a way at measured or given step times."""
    gammas, advised = ceiling_gammas(costs), advice(costs)
    return Price(
        way,
        rule,
        costs.batch_size,
        costs.context,
        costs.target_seconds,
        costs.draft_step_seconds,
        costs.cost_ratio,
        dict(sorted(costs.verify_seconds.items())),
        *best_gamma(perfect_taus(gammas), costs),
        {g: break_even_alpha(g, costs.paying_tau(g)) for g in gammas},
        hopeless_because(costs),
        None if advised is None else advised[1],
    )


@dataclass(frozen=True)
class Outlook:
    """One draft under one rule on held-out responses, at the gamma that is best for each row by its step times.

    now: the present draft. distilled: with `closed_share` of the gap to its ceiling closed. ceiling: alpha 1, or that of the target's
    argmax where the draft takes its argmax and the target samples. after_lookup: prompt lookup before the draft, now and distilled;
    empty for a rule that is not token-wise. taus: of the present draft, by gamma. gamma 0: no gamma pays.
    """

    now: Measured
    distilled: Measured
    ceiling: Measured
    after_lookup: tuple[Measured, ...]
    survival: list[float]
    taus: dict[int, float]
    decision: DecisionWord

    @property
    def rows(self) -> list[Measured]:
        return [self.now, self.distilled, self.ceiling, *self.after_lookup]


def lookup_outlook(
    texts: Sequence[StoredText], prompt_keys: Sequence[Hashable], gammas: Sequence[int], costs: StepCosts, row: Measured
) -> tuple[Measured, float, float]:
    """(prompt lookup at its best n-gram sizes and gamma, share of the tokens where it proposes, and where it is right). row: the text and
    the load. Chosen on the same texts, which is acceptable for a baseline with few choices.
    """
    lookup, gamma = _lookup_row(replace(row, way=LOOKUP), texts, prompt_keys, costs, gammas)
    assert lookup.ngrams is not None
    kept_T = np.concatenate([kept_by_lookup(text, gamma, *lookup.ngrams) for text in texts])
    return lookup, float((kept_T >= 0).mean()), float((kept_T > 0).mean())


def draft_outlook(
    scores: Sequence[TokenScores],
    peaks: Sequence[TargetPeaks],
    prompt_keys: Sequence[Hashable],
    costs: StepCosts,
    row: Measured,
    baseline: float = 1.0,
    texts: Sequence[StoredText] | None = None,
) -> Outlook:
    """The outlook of a draft under a rule: now, after distilling, at its ceiling, and the decision. row: the draft's name as the way, the
    rule, the text and the load. baseline: speed-up of a drafter without training. texts: the scored texts; with them, prompt lookup before
    the draft is predicted too. Speed-ups and their intervals take the step times as exact. Of a parallel draft, `distilled` closes that
    share at every offset of a block.
    """
    rule = Rule.named(row.rule)
    gammas = scored_gammas(scores, range(1, max(costs.verify_seconds) + 1))
    curve = rule_curve(scores, prompt_keys, rule, gammas, survival_gamma=gammas[-1])
    taus = dict(zip(gammas, curve.tau, strict=True))
    probs_of = [(text.by_start or text).accept_probs(rule) for text in scores]
    ceiling_alpha, ceiling_taus = 1.0, perfect_taus(gammas)
    best = [np.ones_like(probs) for probs in probs_of]
    if not rule.draws and not rule.greedy:
        best = [_by_start(text.matches.astype(np.float64), probs) for text, probs in zip(peaks, probs_of, strict=True)]
        ceiling_alpha = alpha_with_interval([text.peaks for text in peaks], prompt_keys)[0]
        ceiling_taus = replay(best, gammas)
    share = closed_share(curve.alpha, ceiling_alpha)
    # The ceiling's acceptance at a share of the positions, else its own, so hard positions stay as unevenly spread.
    closed = [(1.0 - share) * probs + share * highest for probs, highest in zip(probs_of, best, strict=True)]
    closed_taus = replay(closed, gammas)
    after_lookup: tuple[Measured, ...] = ()
    if texts is not None:
        before, drafted = replace(row, way=f"{BEFORE}{row.way}"), (texts_of(scores, rule), texts_kept(closed))
        as_it_is, closer = (_lookup_row(before, texts, prompt_keys, costs, gammas, own)[0] for own in drafted)
        how: dict[str, How] = {"tau": "predicted", "speed_up": "predicted"}
        closer = replace(closer, way=f"{before.way}{DISTILLED}", tau_ci=None, speed_up_ci=None, how=how)
        after_lookup = (as_it_is, closer)
    if rule.joint:
        by_token = replay(probs_of, gammas)
        closed_taus = {g: partly_closed_tau(taus[g], g, by_token[g], closed_taus[g]) for g in gammas}
    alpha = curve.alpha
    now, distilled, ceiling = (
        _at_best_gamma(replace(row, way=f"{row.way}{which}"), of_alpha, of_taus, costs)
        for which, of_alpha, of_taus in (
            ("", alpha, taus),
            (DISTILLED, alpha + share * (ceiling_alpha - alpha), closed_taus),
            (CEILING, ceiling_alpha, ceiling_taus),
        )
    )
    now = replace(now, alpha_ci=curve.alpha_ci, how={"alpha": "replay", "tau": "replay", "speed_up": "predicted"})
    if now.gamma:
        low, high = curve.tau_ci[gammas.index(now.gamma)]
        ends = costs.speed_up(now.gamma, low), costs.speed_up(now.gamma, high)
        now = replace(now, tau_ci=(low, high), speed_up_ci=ends)
    joint = [one.speed_up or 1.0 for one in after_lookup] or [1.0, 1.0]
    decision = decide(costs, now.speed_up or 1.0, distilled.speed_up or 1.0, baseline, (joint[0], joint[1]))
    return Outlook(now, distilled, ceiling, after_lookup, curve.survival, taus, decision)


def at_load(now: Measured, taus: Mapping[int, float], costs: StepCosts) -> Measured:
    """The present draft at the batch size of these costs, at its best gamma."""
    row = replace(now, concurrency=costs.batch_size, tau_ci=None, speed_up_ci=None)
    return replace(_at_best_gamma(row, now.alpha or 0.0, taus, costs), how=now.how)


def _by_start(probs_T: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Probabilities of tokens, as a table (T, J) by start and offset if `like` is one; 1 after the end."""
    if like.ndim == 1:
        return probs_T
    padded = np.concatenate((probs_T, np.ones(like.shape[1] - 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, like.shape[1])


def _lookup_row(
    row: Measured,
    texts: Sequence[StoredText],
    prompt_keys: Sequence[Hashable],
    costs: StepCosts,
    gammas: Sequence[int],
    drafted: Sequence[TextCosts] | None = None,
) -> tuple[Measured, int]:
    """(prompt lookup, alone or before a draft, at its best n-gram sizes and gamma; that gamma even if the row says that none pays)."""
    tuned, tokens_N = tuned_lookup(texts, costs, gammas, drafted), np.array([len(text.response_ids) for text in texts])
    row = replace(row, gamma=tuned.gamma, then_gamma=tuned.then_gamma, ngrams=tuned.sizes)
    row = predicted_row(row, prompt_keys, tokens_N, tuned.blocks.calls_NK[:, 0], tuned.steps_N)
    if tuned.speed_up <= 1.0:
        row = replace(row, gamma=0, tau=1.0, tau_ci=None, speed_up=1.0, speed_up_ci=None)
    return row, tuned.gamma


def _at_best_gamma(row: Measured, alpha: float, taus: Mapping[int, float], costs: StepCosts) -> Measured:
    gamma, speed_up = best_gamma(taus, costs)
    how: dict[str, How] = {"alpha": "predicted", "tau": "predicted", "speed_up": "predicted"}
    return replace(row, alpha=alpha, gamma=gamma, tau=taus[gamma] if gamma else 1.0, speed_up=speed_up, how=how)
