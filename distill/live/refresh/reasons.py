"""Reasons for a refresh besides the alarm: headroom and payback. And one reason against it: the logged responses are not the target's
own text.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from data.responses.store import Store
from distill.config.layout import CONFIG, RESPONSES, TRAINING
from distill.config.load import load_config
from distill.live.alarm import Reason
from distill.live.traffic.record import TrafficRecord
from distill.models.target import Target
from distill.run.responses import heldout_responses
from distill.run.verdict_record import Costs, Verdict
from speculative.explain.ceilings import target_peaks
from speculative.explain.text_fit import text_fit
from speculative.measure.effects import Effects
from speculative.measure.measured import UNDISTILLED
from speculative.rules.sampling import SamplingSettings

ASKED_RESPONSES = 64
# Nats per token below expectation; share of first choices in greedy text. Rounding errors are a tenth of these.
FAR_NATS, LIKELIEST = 0.1, 0.9
DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3_600.0
SHORT_SECONDS = 6 * HOUR_SECONDS  # Shorter traffic says little about a whole day.


class OwnText(Reason):
    """responses: number scored by the target."""

    responses: int


class Headroom(Reason):
    """Result of the probe: steps, seconds, the served draft's alpha and tau, and the gain."""

    steps: int
    train_seconds: float
    alpha: float | None = None
    tau: float = 1.0
    gain: Effects | None = None

    @property
    def tau_gain(self) -> float:
        """Gain in tokens per target call; 0 if unknown."""
        return 0.0 if self.gain is None else self.gain.tau.gain


class Payback(Reason):
    """GPU-hours that the gain saves and that the training costs. days: until paid back; null if never or unknown."""

    saved_gpu_hours_per_day: float | None = None
    training_gpu_hours: float | None = None
    days: float | None = None


def own_words(home: Path, export: Path) -> OwnText:
    """Check a sample of the responses with one forward pass: are they the target's own text? Engines round differently, so only text far
    from it fails.
    """
    config, store = load_config(home / CONFIG), Store(export / RESPONSES / TRAINING)
    rows = store.rows()
    some = heldout_responses(rows[:: -(-len(rows) // ASKED_RESPONSES)])
    if config.target.at_server:
        return OwnText(holds=True, sentence="text: not checked: the target's weights are on a server", responses=0)
    sampling = SamplingSettings(**store.manifest()["sampling"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Target(config.target, device, home).loaded() as target:
        if sampling.greedy:
            share = float(np.concatenate([one.matches for one in target_peaks(target, some, sampling)]).mean())
            holds, words = share >= LIKELIEST, f"{100 * share:.1f} % of the tokens are the target's first choice"
        else:
            fit = text_fit(target, some, sampling)
            holds = fit.same or fit.log_prob > fit.expected - FAR_NATS
            words = f"{fit.log_prob:.2f} nats per token under the target, {fit.expected:.2f} expected for its own text"
    words = f"text: {words} ({len(some)} responses)"
    if not holds:
        words += ": this is not the target's own text (mixed up? another target? other sampling settings?)"
    return OwnText(holds=bool(holds), sentence=words, responses=len(some))


def headroom(probe: Verdict, steps: int) -> Headroom:
    """The gain of a few steps on one part of the traffic, judged by replay on a later part, paired by prompt. ``probe``: verdict of a run
    whose step 0 is the served draft.
    """
    baseline, effects, seconds = probe.judged(UNDISTILLED), probe.gain, probe.seconds.get("train", 0.0)
    if baseline is None or effects is None or baseline.alpha is None or baseline.tau is None:
        words = "headroom: the probe could not be compared with the served draft"
        return Headroom(holds=False, sentence=words, steps=steps, train_seconds=seconds)
    alpha, gain = baseline.alpha, effects.alpha
    certain = effects.certain == "gain"
    words = (
        f"headroom: alpha {alpha:.3f} on fresh traffic, {gain:+.3f} after {steps} steps, judged on "
        f"{effects.prompts} later prompts"
    )
    words += "" if certain else ": no certain gain, so this student seems to have reached its ceiling there"
    known = {"alpha": alpha, "tau": baseline.tau, "gain": effects}
    return Headroom(holds=certain, sentence=words, steps=steps, train_seconds=seconds, **known)


def payback(
    costs: Costs | None, records: Sequence[TrafficRecord], tau: float, tau_gain: float, seconds: float, days: float
) -> Payback:
    """GPU-hours per day that the gain saves at this load, against those of the training. A token takes (gamma c + v) / tau target steps,
    shared by the requests in flight.

    records: requests that this draft served. tau, tau_gain: tokens per target call of the served draft, and the probe's gain. seconds: of
    the training, summed over devices. days: limit until it is paid back.
    """
    counted = [record for record in records if record.response_tokens and record.drafted and record.blocks]
    if costs is None or not counted:
        why = "the run was not timed (judge.live)" if costs is None else "no request reports its tokens and blocks"
        return Payback(holds=False, sentence=f"payback: unknown, {why}")
    span = max(1.0, max(record.time + (record.total_s or 0.0) for record in counted) - counted[0].time)
    tokens, drafted, blocks = (
        sum(getattr(record, key) for record in counted) for key in ("response_tokens", "drafted", "blocks")
    )
    gamma, days_seen = round(drafted / blocks), span / DAY_SECONDS
    ratios = [costs.cost_ratio_at or {gamma: costs.cost_ratio}, costs.verify_ratio]
    draft, verify = (ratio[min(ratio, key=lambda other: abs(other - gamma))] for ratio in ratios)
    block_seconds = costs.target_step_seconds * (gamma * draft + verify)
    in_flight = concurrency(counted)
    gain = 1 / tau - 1 / max(tau + tau_gain, 1.0)
    saved, cost = tokens / days_seen * block_seconds / in_flight * gain / HOUR_SECONDS, seconds / HOUR_SECONDS
    needed = cost / saved if saved > 0 else math.inf
    words = (
        f"payback: {tokens / days_seen:,.0f} tokens and {len(counted) / days_seen:,.0f} requests a day, {in_flight:.1f} in flight, "
        f"{1000 * block_seconds:.2f} ms per block: {saved:.3g} GPU-hours saved a day against {cost:.3g} for training, "
        + (f"paid back in {needed:.2g} days" if saved > 0 else "never paid back")
        + f" (limit {days:g})"
    )
    if span < SHORT_SECONDS:
        words += f"; extrapolated from {span / HOUR_SECONDS:.2f} hours"
    return Payback(
        holds=needed <= days,
        sentence=words,
        saved_gpu_hours_per_day=saved,
        training_gpu_hours=cost,
        days=needed if saved > 0 else None,
    )


def concurrency(records: Sequence[TrafficRecord]) -> float:
    """Mean number of requests in flight while there is any; 1 if no record has its duration."""
    spans = sorted((record.time, record.time + record.total_s) for record in records if record.total_s)
    busy, end = 0.0, -math.inf
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return sum(stop - start for start, stop in spans) / busy if busy > 0 else 1.0
