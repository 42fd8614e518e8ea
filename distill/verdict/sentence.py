"""What the numbers of a verdict come to: an outcome, a headline, and facts of one short line each."""

from dataclasses import dataclass

from distill.run.verdict_record import Outcome
from distill.verdict.contest import Contest
from distill.verdict.evidence import Evidence
from speculative.explain.ceilings import advice
from speculative.measure.effects import Effects
from speculative.measure.intervals import Interval, interval
from speculative.measure.measured import (
    DRAFT,
    LOOKUP,
    PAST,
    SERVED,
    TARGET,
    TOGETHER,
    UNDISTILLED,
)

FREE = (LOOKUP, PAST)


@dataclass(frozen=True)
class Conclusion:
    """pays: whether decoding with the draft alone is certainly faster than without; None where nothing was timed."""

    outcome: Outcome
    pays: bool | None
    headline: str
    facts: list[str]


def shown(way: str) -> str:
    """A way's name inside a sentence."""
    return f"the {way}" if way.startswith((TARGET, DRAFT, UNDISTILLED, SERVED)) else way


def conclude(evidence: Evidence, gain: Effects | None, against_served: Effects | None = None) -> Conclusion:
    """The answer in words. gain: draft minus undistilled draft, where somebody distilled."""
    contest, draft = evidence.contest, evidence.best.name
    learned = [_learned(gain)] if gain else []
    served = [_against(against_served)] if against_served else []
    if contest is None:
        judged, baseline = evidence.judged[draft], evidence.judged.get(UNDISTILLED)
        before = f" (undistilled {baseline.tau:.2f})" if baseline else ""
        headline = (
            f"Not timed: the draft has tau {judged.tau:.2f} at gamma {evidence.question.gamma} by replay{before}."
        )
        return Conclusion(_outcome(gain, None, None, draft), None, headline, [*learned, *served])
    run, pays = contest.to_run(), contest.beats(draft)
    outcome = _outcome(gain, contest, run, draft)
    others = [one.name for one in contest.ways if one.name != draft]
    facts = [
        _fast(contest, draft), *learned, *(_beside(contest, name, draft) for name in others), *served,
        *(_at_load(one) for one in evidence.contests[1:]),
    ]  # fmt: skip
    hopeless = advice(evidence.best_costs) if evidence.best_costs and not pays else None
    return Conclusion(outcome, pays, headline_of(contest, run), [*facts, *([_line(hopeless[1])] if hopeless else [])])


def headline_of(contest: Contest, run: str) -> str:
    """What to run at one request, and how fast it is."""
    if run == TARGET:
        few = contest.speed(contest.ways[0].name).interval is None
        why = (
            "too few prompts were timed to be certain of more"
            if few
            else "nothing is certainly faster on these prompts"
        )
        return f"Run the target alone: {why}."
    speed = contest.speed(run)
    return f"Run {shown(run)}: {speed.speed_up:.2f}x{_ends(speed.interval)} as fast as the target alone."


def _outcome(gain: Effects | None, contest: Contest | None, run: str | None, draft: str) -> Outcome:
    if contest is not None and run in FREE and run is not None and contest.beats(run, draft):
        return "baseline_better"
    if gain is not None and gain.certain == "loss":
        return "loss"
    if gain is not None and gain.certain == "none":
        return "no_measurable_gain"
    if contest is None:
        return "not_timed"
    if run == TOGETHER:
        return "best_together"
    return "pays_off" if contest.beats(draft) else "no_speed"


def _fast(contest: Contest, draft: str) -> str:
    speed = contest.speed(draft)
    told = f"decodes {speed.speed_up:.2f}x{_ends(speed.interval)} as fast as the target alone at gamma {contest[draft].gamma}"
    if speed.interval is None:
        return f"The draft {told}, on too few prompts to be certain (judge.speed_prompts)."
    if speed.interval[0] > 1.0:
        return f"It pays off: the draft {told}."
    if speed.interval[1] < 1.0:
        return f"It does not pay off here: the draft {told}."
    return f"Not certain to pay off here: the draft {told}, which cannot be told from no speed-up."


def _beside(contest: Contest, name: str, draft: str) -> str:
    speed, free = contest.speed(name), ", which needs no training" if name in FREE else ""
    told = f"{_line(shown(name))[:-1]}{free}: {speed.speed_up:.2f}x{_ends(speed.interval)}"
    apart = contest.beats(draft, name) or contest.beats(name, draft)
    return f"{told}." if apart or name not in FREE else f"{told}; it cannot be told from the draft."


def _at_load(contest: Contest) -> str:
    run = contest.to_run()
    speed = contest.speed(run)
    fast = "" if run == TARGET else f", {speed.speed_up:.2f}x{_ends(speed.interval)}"
    return f"At {contest.concurrency} requests: run {shown(run)}{fast}."


def _learned(gain: Effects) -> str:
    if gain.alpha.gain == gain.alpha.ci[0] == gain.alpha.ci[1] == 0.0:
        return "No measurable gain: the draft is the undistilled one, no checkpoint is better."
    numbers = f"{gain.alpha:+.3f}"
    if gain.certain == "loss":
        return f"It got worse: the draft accepts {numbers} alpha over the undistilled one."
    if gain.certain == "gain":
        return f"The draft accepts {numbers} alpha over the undistilled one."
    size = ""
    if gain.prompts < gain.fewest_prompts:
        size = f"; {gain.prompts} prompts are too few to be certain, give at least {gain.fewest_prompts}"
    elif gain.minimal_detectable.alpha:
        size = f"; {gain.minimal_detectable.alpha:.3f} would have been seen with 80 % probability"
    return f"No measurable gain: no certain difference in alpha to the undistilled draft ({numbers}{size})."


def _against(effects: Effects) -> str:
    """How it stands to the draft that is served today."""
    word = {"gain": "accepts more than", "loss": "accepts less than", "none": "is not to be told in alpha from"}
    return f"It {word[effects.certain]} the draft served today ({effects.alpha:+.3f} alpha)."


def _ends(ends: Interval | None) -> str:
    return f" {interval(ends, '.2f')}" if ends else ""


def _line(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
