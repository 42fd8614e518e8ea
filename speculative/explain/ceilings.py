"""How far drafting could get: the perfect draft, the best greedy draft, prompt lookup for nothing; and is it worth it?

Shapes: N texts, T tokens of one text, K gammas.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel

from speculative.explain.target_view import top_tokens
from speculative.measure.cost import StepCosts, best_gamma, break_even_alpha, iid_tau, predicted_speed_ups
from speculative.measure.curves import rule_curve
from speculative.measure.intervals import ratio_interval, sum_by_prompt
from speculative.measure.metrics import alpha_with_interval
from speculative.measure.replay import replay
from speculative.measure.rival_replay import (
    Tuned,
    cascade_blocks,
    cascade_steps,
    certain_blocks,
    kept_by_lookup,
    lookup_steps,
    tuned_cascade,
    tuned_cascade_at,
    tuned_lookup,
)
from speculative.measure.token_scores import StoredText, TokenScores, scored_gammas
from speculative.rules.sampling import SamplingSettings

# A draft step of more than .6 target steps: the break-even alpha at gamma 5 is .83 even where verifying is free of
# charge (v = 1), as much as the best distilled drafts reach, and a perfect draft stays under 1 / c = 1.67x at any gamma.
# Of a draft that takes one call a block no such thing holds.
HOPELESS_COST_RATIO = 0.6
# Of what a perfect draft would gain, real ones (alpha .7-.85) gain a third: under 1.5x that is nothing.
PERFECT_WORTH = 1.5
# Above every published distilled draft that is a model of its own (.57 - .87): if this one does not pay, none will.
REALISTIC_ALPHA = 0.9
# Speed-ups are predicted to within 10 %: less than that may be nothing.
WORTHWHILE = 1.1
# Two predictions for one pair share their errors, so a smaller step counts; under this one it is not worth the work.
GAIN_WORTHWHILE = 1.05
# Share of the gap to its ceiling that distilling has closed for a draft that started at alpha: a line through 15 pairs
# (two of ours, two of a plain loop, 11 published: 2310.07177, OSD, DistillSpec on Qwen3, one null result), starting alpha
# .13 to .81, shares .75 to 0, residual .11. Good drafts gain next to nothing; under .43 all end near .69 wherever they start.
CLOSED_AT_ZERO, CLOSED_PER_ALPHA, WEAK_ALPHA = 0.86, -0.94, 0.43
# Ceilings look at gammas up to here even where fewer were measured.
CEILING_GAMMA = 8

# hopeless: at these costs no draft pays enough. no_headroom: distilling is predicted to add less than 5 % to what it has.
# already_pays: worth serving now, and distilling adds. needs_distillation: not worth it yet, distilled it would be.
# out_of_reach: not worth it, and would not be after what distilling has brought drafts that started there.
DecisionWord = Literal["hopeless", "no_headroom", "already_pays", "needs_distillation", "out_of_reach"]
# Why a pair is hopeless.
HopelessReason = Literal["cost_ratio", "perfect_draft", "realistic_draft"]
# What would have to become cheaper: the draft's steps, the verify call, any one of them, or both at once.
Culprit = Literal["draft", "verify", "either", "both"]
WORTH_DISTILLING: tuple[DecisionWord, ...] = ("already_pays", "needs_distillation")


@dataclass(frozen=True)
class TargetPeaks:
    """What the target itself would have said at each of the T stored tokens of a text, under the serving settings.

    peaks: its largest probability (1 where it is served greedily). matches: its argmax is the stored token.
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
    """`TargetPeaks` of every text, from one target pass.

    A draft that takes its argmax has that token accepted with the target's probability of it, so it can have no more
    than the largest one: the mean of `peaks` bounds alpha under rule `greedy-draft`, and `matches` replayed give that
    draft's tau. Raises UserError when the target returns NaN or infinite logits.
    """
    found = []
    for text, (ids_T1, probs_T1) in zip(texts, top_tokens(target, texts, 1, settings), strict=True):
        peaks_T = np.ones(len(ids_T1)) if settings.greedy else probs_T1[:, 0]
        found.append(TargetPeaks(peaks_T, ids_T1[:, 0] == np.asarray(text.response_ids, dtype=np.int64)))
    return found


def closed_share(alpha: float, ceiling_alpha: float = 1.0) -> float:
    """What share of the gap to its ceiling distilling may be expected to close for a draft that has this alpha."""
    own = min(alpha / ceiling_alpha, 1.0)
    start = max(own, WEAK_ALPHA)
    end = start + (1.0 - start) * max(0.0, CLOSED_AT_ZERO + CLOSED_PER_ALPHA * start)
    return (end - own) / (1.0 - own) if own < 1.0 else 0.0


def partly_closed(accept_probs: Sequence[np.ndarray], ceilings: Sequence[np.ndarray], share: float) -> list[np.ndarray]:
    """Acceptance, (T,) or by start and offset (T, J), of a draft that is the ceiling's at a share of the places, else itself.

    So alpha closes that share of its gap, and hard places stay as unevenly spread as they are: replaying it does not
    assume that acceptance is independent from token to token.
    """
    return [(1.0 - share) * own + share * best for own, best in zip(accept_probs, ceilings, strict=True)]


def partly_closed_tau(tau: float, gamma: int, other_tau: float, other_closed_tau: float) -> float:
    """tau of a rule without a law per token, when it closes the share of its gap to gamma + 1 that another rule closes."""
    gap = gamma + 1.0 - other_tau
    return tau + (gamma + 1.0 - tau) * (other_closed_tau - other_tau) / gap if gap > 1e-9 else tau


def hopeless_because(costs: StepCosts) -> HopelessReason | None:
    """Why no draft of this price can pay enough, whatever it learns; None when one can."""
    gammas = ceiling_gammas(costs)
    if not costs.parallel and costs.cost_ratio > HOPELESS_COST_RATIO:
        return "cost_ratio"
    if best_gamma(perfect_taus(gammas), costs)[1] < PERFECT_WORTH:
        return "perfect_draft"
    if best_gamma({gamma: iid_tau(REALISTIC_ALPHA, gamma) for gamma in gammas}, costs)[1] < WORTHWHILE:
        return "realistic_draft"
    return None


def advice(costs: StepCosts) -> tuple[Culprit, str] | None:
    """(what costs too much, a sentence that says so and what to do); None unless the pair is hopeless.

    A part is to blame where the pair would not be hopeless if that part were free: c = 0, or v = 1.
    """
    reason = hopeless_because(costs)
    if reason is None:
        return None
    free_draft = replace(costs, draft_seconds={1: 0.0})
    free_verify = replace(costs, verify_seconds=dict.fromkeys(costs.verify_seconds, costs.target_seconds))
    helps = (hopeless_because(free_draft) is None, hopeless_because(free_verify) is None)
    blamed: dict[tuple[bool, bool], Culprit] = {(True, False): "draft", (False, True): "verify", (True, True): "either"}
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
        "draft": "take a shallower draft",
        "verify": f"the verify call is what costs, a shallower draft cannot help: {cheaper}",
        "either": f"take a shallower draft or {cheaper}",
        "both": f"take a shallower draft and {cheaper}",
    }[culprit]
    return culprit, f"at {price} even a draft that is {whose} would give {gives}: {to_do}"


def decide(
    costs: StepCosts, now: float, reachable: float, rival: float, together: tuple[float, float] = (1.0, 1.0)
) -> DecisionWord:
    """What to do with a draft, from its speed-ups over the target alone.

    now: as it is, at its best gamma. reachable: with `closed_share` of the gap to its ceiling closed. rival: of what
    costs no training (prompt lookup); 1 when there is none. together: the same two with the rival before the draft; that
    is worth a draft where it adds `GAIN_WORTHWHILE` to the rival. The thresholds are the constants above.
    """
    if hopeless_because(costs) is not None:
        return "hopeless"
    bar, joint_bar = max(WORTHWHILE, rival), max(WORTHWHILE, GAIN_WORTHWHILE * rival)
    if now > 1.0 and reachable < GAIN_WORTHWHILE * now:
        return "no_headroom"
    if reachable < bar and together[1] < joint_bar:
        return "out_of_reach"
    return "already_pays" if now >= bar or together[0] >= joint_bar else "needs_distillation"


def cost_facts(costs: StepCosts) -> dict[str, Any]:
    """The seconds and ratios of a pair, what a perfect draft gives at them, and the alpha each gamma needs (i.i.d.)."""
    gammas = ceiling_gammas(costs)
    gamma, speed_up = best_gamma(perfect_taus(gammas), costs)
    return {
        "batch_size": costs.batch_size,
        "context": costs.context,
        "target_step_seconds": costs.target_seconds,
        "draft_step_seconds": costs.draft_step_seconds,
        "cost_ratio": costs.cost_ratio,
        "verify_seconds": {str(g): seconds for g, seconds in sorted(costs.verify_seconds.items())},
        "verify_ratio": {str(g): costs.verify_ratio(g) for g in sorted(costs.verify_seconds)},
        "perfect": {"gamma": gamma, "speed_up": speed_up},
        "break_even_alpha": {
            str(g): break_even_alpha(g, costs.cost_ratio_at(g), costs.verify_ratio(g)) for g in gammas
        },
        "hopeless": hopeless_because(costs),
        "hopeless_words": advised[1] if (advised := advice(costs)) is not None else None,
    }


def greedy_ceiling(
    peaks: Sequence[TargetPeaks], prompt_keys: Sequence[Hashable], gammas: Sequence[int]
) -> dict[str, Any]:
    """Alpha with its interval and tau by gamma of a draft that always proposes the target's argmax."""
    alpha, interval = alpha_with_interval([text.peaks for text in peaks], prompt_keys)
    taus = replay([text.matches.astype(np.float64) for text in peaks], gammas)
    return {"alpha": alpha, "alpha_ci": list(interval), "tau": {str(gamma): tau for gamma, tau in taus.items()}}


def lookup_outlook(
    texts: Sequence[StoredText], prompt_keys: Sequence[Hashable], gammas: Sequence[int], costs: StepCosts
) -> dict[str, Any]:
    """What prompt lookup gives on these texts at its best n-gram sizes: tau and speed-up by gamma, the best gamma.

    Also how often it proposes and hits. Sizes and gamma are chosen on the very texts: a few choices, and for a rival.
    """
    tuned = tuned_lookup(texts, costs, gammas)
    kept = [kept_by_lookup(text, max(gammas), tuned.max_ngram, tuned.min_ngram) for text in texts]
    blocks = certain_blocks(kept, gammas)
    tokens_N = np.array([len(text.response_ids) for text in texts])
    steps_NK = lookup_steps(blocks, gammas, costs)
    best = gammas.index(tuned.gamma)
    pays = tuned.speed_up > 1.0
    kept_T = np.concatenate(kept)
    return {
        "max_ngram": tuned.max_ngram,
        "min_ngram": tuned.min_ngram,
        "gammas": list(gammas),
        "tau": (tokens_N.sum() / (blocks.found_NK + blocks.others_NK).sum(0)).tolist(),
        "speed_up_by_gamma": (tokens_N.sum() / steps_NK.sum(0)).tolist(),
        "proposes": float((kept_T >= 0).mean()),
        "hits": float((kept_T > 0).mean()),
        "gamma": tuned.gamma if pays else 0,
        "speed_up": tuned.speed_up if pays else 1.0,
        "speed_up_ci": list(
            ratio_interval(sum_by_prompt(prompt_keys, tokens_N), sum_by_prompt(prompt_keys, steps_NK[:, best]))
        ),
    }


def draft_outlook(
    scores: Sequence[TokenScores],
    peaks: Sequence[TargetPeaks],
    prompt_keys: Sequence[Hashable],
    rule: str,
    costs: StepCosts,
    rival: float = 1.0,
    texts: Sequence[StoredText] | None = None,
) -> dict[str, Any]:
    """One draft under one rule on frozen target text: what it has, what its ceiling is, what lies between, and the word.

    {"rule", "curve" (see `rule_curve`), "speed_up_by_gamma", "now", "reachable", "ceiling", "headroom", "together", "decision"}. `now`,
    `reachable` and `ceiling` hold alpha, gamma (0: none pays), tau and speed_up at the gamma that is best for each.
    `speed_up_ci` takes the costs as exact. The ceiling is alpha 1, but that of `greedy_ceiling` where the draft takes its
    argmax and the target samples. rival: speed-up of what costs no training. texts: what was scored; then there is also
    "together": {"now", "reachable"}, prompt lookup before the draft, for a rule that judges each token alone.

    Of a parallel draft, at the gammas it was scored for, `reachable` closes that share at every offset of a block.
    """
    gammas = scored_gammas(scores, range(1, max(costs.verify_seconds) + 1))
    curve = rule_curve(scores, prompt_keys, rule, (0, *gammas), survival_gamma=gammas[-1])
    taus = dict(zip(curve["gammas"], curve["tau"], strict=True))
    del taus[0]
    own = [(text.by_start or text).accept_probs(rule) for text in scores]
    if rule == "greedy-draft":
        best = [_by_start(text.matches.astype(np.float64), probs) for text, probs in zip(peaks, own, strict=True)]
        ceiling_alpha, ceiling_taus = (
            alpha_with_interval([text.peaks for text in peaks], prompt_keys)[0],
            replay(best, gammas),
        )
    else:
        best = [np.ones_like(probs) for probs in own]
        ceiling_alpha, ceiling_taus = 1.0, perfect_taus(gammas)
    share = closed_share(curve["alpha"], ceiling_alpha)
    closed = partly_closed(own, best, share)
    closed_taus = replay(closed, gammas)
    together = None if texts is None else _together(texts, prompt_keys, scores, rule, closed, gammas, costs)
    if rule == "block":
        by_token = replay(own, gammas)
        closed_taus = {g: partly_closed_tau(taus[g], g, by_token[g], closed_taus[g]) for g in gammas}
    alpha = curve["alpha"]
    closed_alpha = alpha + share * (ceiling_alpha - alpha)
    now, reachable, ceiling = (
        _at_best_gamma(of_alpha, of_taus, costs)
        for of_alpha, of_taus in ((alpha, taus), (closed_alpha, closed_taus), (ceiling_alpha, ceiling_taus))
    )
    if now["gamma"]:
        spent = now["gamma"] * costs.cost_ratio_at(now["gamma"]) + costs.verify_ratio(now["gamma"])
        now["speed_up_ci"] = [tau / spent for tau in curve["tau_ci"][curve["gammas"].index(now["gamma"])]]
    return {
        "rule": rule,
        "curve": curve,
        "speed_up_by_gamma": {str(g): speed_up for g, speed_up in predicted_speed_ups(taus, costs).items()},
        "now": now,
        "reachable": reachable,
        "ceiling": ceiling,
        "headroom": {"alpha": ceiling_alpha - alpha, "speed_up": ceiling["speed_up"] - now["speed_up"]},
        "together": together,
        "decision": decide(
            costs,
            now["speed_up"],
            reachable["speed_up"],
            rival,
            (together["now"]["speed_up"], together["reachable"]["speed_up"]) if together else (1.0, 1.0),
        ),
    }


def _by_start(probs_T: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Probabilities of tokens, as a table (T, J) by start and offset where `like` is one; 1 behind the end."""
    if like.ndim == 1:
        return probs_T
    padded = np.concatenate((probs_T, np.ones(like.shape[1] - 1)))
    return np.lib.stride_tricks.sliding_window_view(padded, like.shape[1])


def _together(
    texts: Sequence[StoredText],
    prompt_keys: Sequence[Hashable],
    scores: Sequence[TokenScores],
    rule: str,
    closed: Sequence[np.ndarray],
    gammas: Sequence[int],
    costs: StepCosts,
) -> dict[str, Any]:
    """Prompt lookup before a draft as it is, and before one whose tokens are kept with probability `closed`."""
    tuned = tuned_cascade(texts, scores, rule, costs, gammas)
    kept = [kept_by_lookup(text, tuned.gamma, tuned.max_ngram, tuned.min_ngram) for text in texts]
    pair = (tuned.gamma,), (tuned.then_gamma or tuned.gamma,)
    steps_N1 = cascade_steps(cascade_blocks(kept, scores, rule, *pair), pair[0], costs, pair[1])
    tokens_P = sum_by_prompt(prompt_keys, np.array([len(text.response_ids) for text in texts]))
    interval = list(ratio_interval(tokens_P, sum_by_prompt(prompt_keys, steps_N1[:, 0])))
    reachable = tuned_cascade_at(texts, closed, costs, gammas)
    return {"now": {**_if_it_pays(tuned), "speed_up_ci": interval}, "reachable": _if_it_pays(reachable)}


def _if_it_pays(tuned: Tuned) -> dict[str, Any]:
    facts = asdict(tuned)
    return facts if tuned.speed_up > 1.0 else facts | {"gamma": 0, "tau": 1.0, "speed_up": 1.0}


def _at_best_gamma(alpha: float, taus: Mapping[int, float], costs: StepCosts) -> dict[str, Any]:
    gamma, speed_up = best_gamma(taus, costs)
    return {"alpha": alpha, "gamma": gamma, "tau": taus[gamma] if gamma else 1.0, "speed_up": speed_up}
