"""What the numbers of a verdict come to: an outcome, what to run, one sentence."""

from collections.abc import Mapping

from distill.run.verdict_record import LOOKUP, PAST, TOGETHER, WAYS, Effects, Outcome
from distill.verdict.contest import Contest
from distill.verdict.evidence import BASELINE, Evidence
from speculative.explain.ceilings import advice
from speculative.measure.race import ALONE, Speed

# A second proposer beside the draft that makes it less faster than this is not worth having.
TOGETHER_WORTHWHILE = 1.03


def conclude(
    evidence: Evidence,
    effects: Effects | None,
    speeds: Mapping[str, Speed] | None,
    against_served: Effects | None = None,
) -> tuple[Outcome, bool | None, str | None, str]:
    """(outcome, whether decoding with the draft is certainly faster than without, what to run, the answer in one sentence).

    speeds: of the target alone and of every entrant, where they were timed. What to run is the name of an entrant or of the
    target alone; None where nothing was timed.
    """
    who = "the distilled draft" if effects else evidence.best.label
    if evidence.contest is not None and any(name in evidence.contest for name in WAYS.values()):
        who += f", drafting {WAYS[evidence.best.draft.drafting]},"
    learned = _learned(effects) if effects else None
    pays, fast = _fast(evidence, speeds)
    end = f"{_against(against_served)}{'' if pays else _hopeless(evidence)}."
    also = f", though it {learned}" if learned and effects and effects.certain != "none" else ""
    rival = better_rival(evidence.contest, evidence.best.name) if evidence.contest else None
    if rival is not None and evidence.contest is not None and speeds is not None:
        together = f"; with lookup before it {speeds[TOGETHER].speed_up:.2f}x"
        free = f"{rival[0].upper()}{rival[1:]} alone is better: without any training it {_times(evidence.contest, rival, speeds)}"
        return "rival_better", pays, rival, f"{free}; {who} {fast}{also}{together}{end}"
    both = _best_together(evidence.contest, evidence.best.name) if evidence.contest else False
    run = None if speeds is None else TOGETHER if both else _to_run(evidence, pays)
    beside = _beside(evidence, speeds)
    if effects is not None and effects.certain == "loss":
        return "loss", pays, run, f"It got worse: {who} {learned} and {fast}{beside}{end}"
    if effects is not None and effects.certain == "none":
        return "no_measurable_gain", pays, run, f"No measurable gain: {who} {learned}; it {fast}{beside}{end}"
    if speeds is None:
        told = f"Whether it pays was not measured (judge.live: never): {who} {fast}"
        return "not_timed", None, None, f"{told}{f', and {learned}' if learned else ''}{end}"
    if both and evidence.contest is not None:
        start = f"Best together: prompt lookup before the draft {_times(evidence.contest, TOGETHER, speeds)}"
        alone = f"{who} by itself {fast}{f' and {learned}' if learned else ''}"
        return "best_together", pays, run, f"{start}; {alone}{beside}{end}"
    if pays:
        learned_too = f" and {learned}" if learned else ""
        return "pays_off", True, run, f"It pays off: {who} {fast}{learned_too}{beside}{end}"
    interval = speeds[evidence.best.name].interval
    certain = interval is not None and interval[1] < 1.0
    start = "It does not pay off here" if certain else "Not certain to pay off here"
    though = f", though it {learned}" if learned else ""
    return "no_speed", pays, run, f"{start}: {who} {fast}{though}{beside}{end}"


def better_rival(contest: Contest, draft: str) -> str | None:
    """What costs no training and is certainly faster than the draft and than the target alone; None where nothing is, or
    where the draft with lookup before it is certainly faster still.
    """
    free = [name for name in (LOOKUP, PAST) if name in contest]
    better = [name for name in free if contest.beats(name, draft) and contest.beats(name, ALONE)]
    if not better:
        return None
    best = max(better, key=lambda name: contest.speed(name).speed_up)
    return None if TOGETHER in contest and contest.beats(TOGETHER, best) else best


def _best_together(contest: Contest, draft: str) -> bool:
    """Whether the draft with lookup before it is certainly, and worth speaking of, faster than either alone."""
    if TOGETHER not in contest or not contest.beats(TOGETHER, ALONE):
        return False
    others = [name for name in (draft, LOOKUP, PAST) if name in contest]
    return all(
        contest.beats(TOGETHER, other) and contest.against(TOGETHER, other)[0] >= TOGETHER_WORTHWHILE
        for other in others
    )


def _to_run(evidence: Evidence, pays: bool | None) -> str:
    """The fastest of what is certainly faster than the target alone; the target alone where nothing is."""
    assert evidence.contest is not None
    contest = evidence.contest
    free = [name for name in (LOOKUP, PAST) if name in contest and contest.beats(name, ALONE)]
    # The draft in question first: of equals it is the one.
    ours = [*(one.name for one in reversed(evidence.contestants)), *(one.name for one in evidence.others)]
    drafts = [name for name in ours if contest.beats(name, ALONE)]
    return max([*drafts, *free], key=lambda name: contest.speed(name).speed_up, default=ALONE)


def _times(contest: Contest, name: str, speeds: Mapping[str, Speed]) -> str:
    speed = speeds[name]
    ends = f" [{speed.interval[0]:.2f}, {speed.interval[1]:.2f}]" if speed.interval else ""
    return f"decodes {speed.speed_up:.2f}x{ends} as fast as the target alone at gamma {contest[name].gamma}"


def _beside(evidence: Evidence, speeds: Mapping[str, Speed] | None) -> str:
    """What lookup gives for nothing on the same prompts."""
    if speeds is None or evidence.contest is None or LOOKUP not in evidence.contest:
        return ""
    draft, speed = evidence.best.name, speeds[LOOKUP]
    ends = f" [{speed.interval[0]:.2f}, {speed.interval[1]:.2f}]" if speed.interval else ""
    words = f"; prompt lookup, which needs no training, gives {speed.speed_up:.2f}x{ends}"
    if not (evidence.contest.beats(draft, LOOKUP) or evidence.contest.beats(LOOKUP, draft)):
        words += ": the two cannot be told apart"
    for name in (way for way in WAYS.values() if way in evidence.contest):
        words += f"; {name} the draft gives {speeds[name].speed_up:.2f}x"
    return words


def _learned(effects: Effects) -> str:
    gain, (low, high) = effects.alpha.gain, effects.alpha.ci
    if gain == low == high == 0.0:
        return "is the undistilled one: no checkpoint is better than the undistilled baseline"
    numbers = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    if effects.certain != "none":
        return f"accepts {numbers} alpha over the undistilled baseline"
    size = ""
    if effects.prompts < effects.fewest_prompts:
        size = f"; {effects.prompts} prompts are too few to be certain, give at least {effects.fewest_prompts}"
    elif effects.minimal_detectable.alpha:
        size = f"; {effects.minimal_detectable.alpha:.3f} would have been seen with 80 % probability"
    return f"has no certain difference in alpha to the undistilled baseline ({numbers}{size})"


def _against(effects: Effects | None) -> str:
    """How it stands to the draft that is served today."""
    if effects is None:
        return ""
    gain, (low, high) = effects.alpha.gain, effects.alpha.ci
    word = {"gain": "accepts more than", "loss": "accepts less than", "none": "is not to be told in alpha from"}
    words = f"; it {word[effects.certain]} the draft served today ({gain:+.3f} [{low:+.3f}, {high:+.3f}] alpha"
    speed = effects.speed_up
    if speed is None:
        return f"{words})"
    return f"{words}, predicted speed-up {speed.gain:+.2f}x [{speed.ci[0]:+.2f}, {speed.ci[1]:+.2f}])"


def _fast(evidence: Evidence, speeds: Mapping[str, Speed] | None) -> tuple[bool | None, str]:
    """(certainly faster than the target alone, in words)."""
    if speeds is None:
        judged, baseline = evidence.judged[evidence.best.name], evidence.judged.get(BASELINE)
        before = f" (undistilled {baseline.tau:.2f})" if baseline else ""
        return None, f"has tau {judged.tau:.2f} at gamma {evidence.gamma} by replay{before}, not timed here"
    assert evidence.contest is not None
    how, interval = _times(evidence.contest, evidence.best.name, speeds), speeds[evidence.best.name].interval
    if interval is None:
        return False, f"{how}, on too few prompts to be certain (judge.speed_prompts)"
    if interval[0] <= 1.0 <= interval[1]:
        how += ", which cannot be told from no speed-up"
    return interval[0] > 1.0, how


def _hopeless(evidence: Evidence) -> str:
    """What even the best draft would give at these costs, when that is too little."""
    if not evidence.costs:
        return ""
    advised = advice(evidence.costs[evidence.best.name])
    return f"; {advised[1]}" if advised else ""
