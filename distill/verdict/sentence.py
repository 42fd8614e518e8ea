"""The verdict in words: an outcome, a headline of at most 25 words, and facts of one or two short sentences each."""

from collections.abc import Mapping
from dataclasses import dataclass

from distill.run.verdict_record import OUR_DECODER, Outcome
from distill.verdict.evidence import Evidence
from distill.verdict.timing import Timing
from speculative.drafters.registry import recipes
from speculative.explain.ceilings import advice
from speculative.measure.effects import Effects
from speculative.measure.intervals import Interval, interval
from speculative.measure.measured import BY_BLOCK, DRAFT, LOOKUP, LOOKUP_DRAFT, PAST, SERVED, TARGET, UNDISTILLED

FREE = (LOOKUP, PAST)


@dataclass(frozen=True)
class Conclusion:
    """pays: whether decoding with the draft alone is certainly faster than without; None if nothing was timed."""

    outcome: Outcome
    pays: bool | None
    headline: str
    facts: list[str]


def shown(way: str) -> str:
    """A way's name as the subject of a sentence."""
    if way == PAST:
        return "drafting from past responses"
    if way == BY_BLOCK:
        return "the parallel draft"
    name = way.replace("-", " ").replace("+", " + ") if way in recipes() else f"{way}," if "," in way else way
    return f"the {name}" if way.startswith((TARGET, DRAFT, UNDISTILLED, SERVED)) else name


def order(way: str) -> str:
    """The instruction to decode this way."""
    return "draft from past responses" if way == PAST else f"run {shown(way).removesuffix(',')}"


def conclude(evidence: Evidence, gain: Effects | None, against_served: Effects | None = None) -> Conclusion:
    """The answer in words. gain: draft minus undistilled draft; None if nothing was distilled."""
    timing, draft = evidence.timing, evidence.best.name
    learned = [_learned(gain)] if gain else []
    served = []
    if against_served is not None:
        words = {"gain": "is certainly higher", "loss": "is certainly lower", "none": "is not certainly different"}
        told = f"alpha {words[against_served.certain]}: {against_served.alpha:+.3f}"
        served = [f"Compared with the served draft, {told}."]
    if timing is None:
        judged, baseline = evidence.judged[draft], evidence.judged.get(UNDISTILLED)
        before = f" (undistilled {baseline.tau:.2f})" if baseline else ""
        at = f"at gamma {evidence.setup.gamma} by replay{before}"
        headline = f"Not timed: the draft has tau {judged.tau:.2f} {at}."
        return Conclusion(_outcome(gain, None, None, draft), None, headline, [*learned, *served])
    run, pays = timing.to_run(), timing.beats(draft)
    outcome = _outcome(gain, timing, run, draft)
    others = [one.name for one in timing.ways if one.name != draft]
    facts = [
        _fast(timing, draft),
        *learned,
        *(_beside(timing, name, draft) for name in others),
        *served,
        *map(_at_load, evidence.timings[1:]),
    ]
    hopeless = advice(evidence.best_costs) if evidence.best_costs and not pays else None
    facts += [f"{capitalised(hopeless[1])}."] if hopeless else []
    return Conclusion(outcome, pays, headline_of(timing, run), facts)


def headline_of(timing: Timing, run: str) -> str:
    """What to run at one request, and how fast it is."""
    if run == TARGET:
        if timing.speed(timing.ways[0].name).interval is None:
            return "Run the target alone: too few prompts were timed to be certain that anything is faster."
        return "Run the target alone: nothing is certainly faster on these prompts."
    speed = timing.speed(run)
    pace = f"{speed.speed_up:.2f}x{_ends(speed.interval)} as fast as the target alone"
    return f"{capitalised(order(run))}: {pace} {OUR_DECODER}."


def _outcome(gain: Effects | None, timing: Timing | None, run: str | None, draft: str) -> Outcome:
    if timing is not None and run in FREE and run is not None and timing.beats(run, draft):
        return "baseline_better"
    if gain is not None and gain.certain != "gain":
        return "loss" if gain.certain == "loss" else "no_measurable_gain"
    if timing is None:
        return "not_timed"
    if run == LOOKUP_DRAFT:
        return "best_with_lookup"
    return "pays_off" if timing.beats(draft) else "no_speed"


def _fast(timing: Timing, draft: str) -> str:
    speed = timing.speed(draft)
    pace = f"{speed.speed_up:.2f}x{_ends(speed.interval)} as fast as the target alone at gamma {timing[draft].gamma}"
    if speed.interval is None:
        return f"The draft is {pace}. Too few prompts were timed to be certain: raise judge.speed_prompts."
    if speed.interval[0] > 1.0:
        return f"The draft pays off: {pace}."
    if speed.interval[1] < 1.0:
        return f"The draft does not pay off here: {pace}."
    return f"The draft does not certainly pay off here: {pace}. The interval contains 1."


def _beside(timing: Timing, name: str, draft: str) -> str:
    speed, subject = timing.speed(name), capitalised(shown(name))
    gives = f"gives {speed.speed_up:.2f}x{_ends(speed.interval)}."
    if timing[name].price:
        return f"{subject} {gives} Its text is not the target's."
    if name not in FREE:
        return f"{subject} {gives}"
    told = f"{subject} needs no training and {gives}"
    apart = timing.beats(draft, name) or timing.beats(name, draft)
    return told if apart else f"{told} It is not certainly different from the draft."


def _at_load(timing: Timing) -> str:
    run, at = timing.to_run(), f"At {timing.concurrency} requests"
    speed = timing.speed(run)
    fast = "" if run == TARGET else f": {speed.speed_up:.2f}x{_ends(speed.interval)}"
    return f"{at}, {order(run)}{fast}."


def _learned(gain: Effects) -> str:
    if gain.alpha.gain == gain.alpha.ci[0] == gain.alpha.ci[1] == 0.0:
        return "No measurable gain: no checkpoint is better than the undistilled draft, so that one is kept."
    if gain.certain == "gain":
        return f"Distilling raised alpha by {gain.alpha:.3f}."
    changed = f"distilling changed alpha by {gain.alpha:+.3f}"
    if gain.certain == "loss":
        return f"The draft got worse: {changed}."
    size = ""
    if gain.prompts < gain.fewest_prompts:
        size = f" {gain.prompts} prompts are too few to be certain: use at least {gain.fewest_prompts}."
    elif gain.minimal_detectable.alpha:
        size = f" A change of {gain.minimal_detectable.alpha:.3f} would have been detected with 80 % probability."
    return f"No measurable gain: {changed}, which is not certainly different from 0.{size}"


def within(limits_ms: Mapping[str, float], loads: Mapping[str, int | None]) -> list[str]:
    """The largest measured loads within these limits, of the target alone and with the draft. [] without limits."""
    words = {"first_token": "ms to the first token", "per_token": "ms per token"}
    limits = " and ".join(f"{most:g} {words[name]}" for name, most in limits_ms.items())
    alone, drafted = (load or 0 for load in loads.values()) if limits else (0, 0)
    told = f"the largest measured load is {alone} for the target alone and {drafted} with the draft"
    does = "raises" if drafted > alone else "lowers" if drafted < alone else "does not change"
    return [f"Within {limits} (p90), {told}: the draft {does} it."] if limits else []


def _ends(ends: Interval | None) -> str:
    return f" {interval(ends, '.2f')}" if ends else ""


def capitalised(words: str) -> str:
    """The words with a capital first letter; the others stay as they are."""
    return f"{words[0].upper()}{words[1:]}"
