"""The gate compares the refreshed draft with the served one on the same held-out responses of the target, paired by prompt.

It passes if alpha on the new traffic has certainly gained and every old slice has certainly lost no more than the margin. Intervals are
those of `understudy compare`: 95 % for all slices together, widened for the number of checkpoints that the best was picked from.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distill.commands.compare.compare import read_drafts
from distill.commands.compare.comparison import Comparison, Difference, Scored, comparison
from distill.live.alarm import OTHERS
from distill.run.heldout_set import HeldoutSet, load_heldout_set
from speculative.measure.effects import fewest_prompts
from speculative.measure.record import Record


class GateSlice(Difference):
    """A part of the text: the new draft's gain over the served one, and why this part fails; empty if it passes."""

    name: str
    failure: str


class Gate(Record):
    """`passed`: every slice passes; otherwise `failures` lists why not. `new`: all traffic first."""

    passed: bool
    margin: float
    rule: str
    gamma: int
    confidence: float
    looks: int
    new: list[GateSlice]
    old: list[GateSlice]
    failures: list[str]


def judge_gate(
    run: Path, served: str, old_keys: Collection[str], margin: float, looks: int, parallel: bool = False
) -> Gate:
    """Compare the best draft of a run with the served one on the run's held-out text.

    served: run, checkpoint or directory of the served draft. old_keys: held-out prompts that it was judged on; all others are new. margin:
    alpha that an old slice may lose. looks: judged checkpoints that the best was picked from. parallel: both draft a block in one pass.
    Raises UserError: there is no text, or a draft cannot be judged on it.
    """
    text = load_heldout_set(run, trusted=True)
    prefix = "parallel:" if parallel else ""
    gamma = text.config.judge.gamma
    entries = read_drafts(text, [f"{prefix}{served}", f"{prefix}{run}"], gamma, timing=False)
    sides = {
        side: _slices(_compared(text, entries, old_keys, side == "old", gamma, looks), side, margin)
        for side in ("new", "old")
    }
    failures = [part.failure for parts in sides.values() for part in parts if part.failure]
    failures += [f"there is no held-out {side} text" for side, parts in sides.items() if not parts]
    return Gate(
        passed=not failures,
        margin=margin,
        rule=text.rule.name,
        gamma=gamma,
        confidence=0.95,
        looks=looks,
        failures=failures,
        **sides,
    )


def _compared(
    text: HeldoutSet, entries: Sequence[Scored], old_keys: Collection[str], old: bool, gamma: int, looks: int
) -> Comparison | None:
    """Compare the drafts on one side of the text; None without text."""
    chosen = [index for index, response in enumerate(text.responses) if (response.key in old_keys) == old]
    if not chosen:
        return None
    responses = [text.responses[index] for index in chosen]
    prompts = {(response.domain, response.prompt) for response in responses}
    small = small_slices(Counter(domain for domain, _ in prompts), looks)
    merged = [replace(response, domain=OTHERS) if response.domain in small else response for response in responses]
    return comparison(replace(text, responses=merged), [entry.chosen(chosen) for entry in entries], gamma, looks)


def small_slices(sizes: Mapping[str, int], looks: int) -> set[str]:
    """Slices with too few prompts for certainty, which are merged; the next larger ones are added until there are enough."""
    fewest = fewest_prompts(1 - 0.05 / (looks * max(1, len(sizes))))
    small: set[str] = set()
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if sizes[name] >= fewest and (not small or sum(sizes[one] for one in small) >= fewest):
            break
        small.add(name)
    return small if len(small) > 1 else set()


def _slices(differences: Comparison | None, side: str, margin: float) -> list[GateSlice]:
    """The parts to judge: all new text and its slices; the old slices, or all old text if there is only one."""
    if differences is None:
        return []
    parts = [(domain, differences.differences_on(domain)[0], False) for domain in differences.domains]
    if side == "new" or not parts:
        name = "all traffic" if side == "new" else "the old text"
        parts = [(name, differences.differences_on()[0], True), *parts]
    return [
        GateSlice(**dict(gain), name=name, failure=failure_of(name, gain, side, margin, whole))
        for name, gain, whole in parts
    ]


def failure_of(name: str, gain: Difference, side: str, margin: float, whole: bool) -> str:
    """Why a slice fails; empty if it passes. ``side``: new or old; ``whole``: all text of the side."""
    assert gain.alpha is not None
    words = f"alpha {gain.alpha:+.4f} on {gain.prompts} prompts"
    if side == "new":
        if whole and gain.certain != "gain":
            return f"no certain gain on the new traffic: {words}"
        worse = "loss" in (gain.certain, gain.certain_tau)
        return f"{name} of the new traffic is certainly worse: {words}" if worse else ""
    few = gain.prompts < gain.fewest_prompts
    if few:
        words += f", too few to be certain (needs at least {gain.fewest_prompts})"
    return f"old slice {name} may have lost more than {margin:g}: {words}" if few or gain.alpha.ci[0] < -margin else ""
