"""The shape of verdict.json and of a judgement: read by whatever compares, reports, exports or sweeps runs."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from distill.config.layout import VERDICT
from speculative.evaluate import Judgement
from speculative.explain.repetition import Repetition
from speculative.measure.effects import Effects, Gain
from speculative.measure.measured import BY_BLOCK, BY_TOKEN, HELD_OUT, Measured, Row, row_of
from speculative.measure.metrics import Latency
from speculative.measure.record import Record, Text
from speculative.measure.replay import ReplayCheck

Drafting = Literal["autoregressive", "parallel"]
# The name of a draft that can draft both ways where it drafts the other way than the one in question does.
WAYS: dict[Drafting, str] = {"autoregressive": BY_TOKEN, "parallel": BY_BLOCK}
Outcome = Literal["pays_off", "best_together", "baseline_better", "no_speed", "no_measurable_gain", "loss", "not_timed"]


class Costs(Record):
    """Measured seconds at batch 1, c and v."""

    target_step_seconds: float = Field(description="one step of the target")
    draft_step_seconds: float = Field(description="one draft call: a token, or a whole block drafted in one pass")
    cost_ratio: float = Field(description="c: draft call over target step")
    cost_ratio_at: dict[int, float] = Field({}, description="c by gamma")
    verify_ratio: dict[int, float] = Field(description="v by gamma: verifying call over target step")
    break_even_alpha: float | None = Field(
        None, description="alpha below which nothing is won at `gamma`; null: none does"
    )
    batch_size: int | None = Field(None, description="rows at once")
    context: int | None = Field(None, description="tokens before the timed steps")
    threads: int | None = Field(None, description="CPU threads")
    steps: str = Field("", description="what the target's calls ran as: compiled code, CUDA graphs or eager calls")


class Roofline(Record):
    """Seconds of one call: fixed + per_token * tokens fed to it, fitted to the steps at all measured loads."""

    target_fixed_seconds: float = Field(description="of a target call, however few tokens")
    target_seconds_per_token: float = Field(description="that each token adds")
    draft_fixed_seconds: float = Field(description="of a draft step")
    draft_seconds_per_token: float = Field(description="that each token adds")
    free_tokens: float | None = Field(
        None,
        description="tokens a target call at which it takes twice as long as for hardly any; null: tokens are free",
    )


class DraftOf(Record):
    """A draft of the verdict: whose weights a way's name stands for."""

    way: str = Field(description="`undistilled draft`, `served draft` or `draft`")
    path: Text | None = Field(None, description="where its weights are")
    step: int | None = Field(None, description="checkpoint; null: none of this run")
    drafting: Drafting = Field("autoregressive", description="how it drafts")


class OnTarget(Record):
    """Another target that the draft learned from (target.others): `measured` has the drafts on its held-out text, by replay."""

    target: str = Field(description="its path: the text of its rows")
    weight: float = Field(description="its share, relative to the run's own target")
    gain: Gain = Field(description="in alpha over the undistilled draft, paired by prompt, widened for the looks")


class Verdict(Record):
    """verdict.json: the draft beside the undistilled one, paired, and every way to decode, timed. Null: not measured, or nothing to compare."""

    FORMAT: ClassVar[int | None] = 2
    format: Literal[2] = Field(2, description="of this file; what has none was written by version 0.1")
    version: str = Field(description="of understudy that wrote it")
    measured: list[Row] = Field(
        [], description="every way at every concurrency, on the held-out text and on its domains"
    )
    drafts: list[DraftOf] = Field(min_length=1, description="every draft, the one in question last")
    gain: Effects | None = Field(
        None, description="draft minus undistilled draft, paired by prompt, widened for the looks"
    )
    run: dict[str, str] = Field({}, description="the way to run, by number of concurrent requests; empty: not timed")
    pays: bool | None = Field(
        None, description="whether the target with the draft alone is certainly faster than without; null: not timed"
    )
    survival: list[float] | None = Field(
        None,
        description="of the draft in question, live: share of blocks whose first j tokens are all accepted, j from 1",
    )
    live_tokens: int | None = Field(None, description="tokens of its last live run; null: none was decoded")
    replay_check: ReplayCheck | None = Field(None, description="that run's blocks beside replay of its very text")
    headline: Text = Field(description="what to run and how fast it is, in at most 25 words")
    facts: list[Text] = Field([], description="everything else, a short line each")
    rule: str = Field(description="engine rule that was judged")
    gamma: int = Field(description="drafted tokens per block")
    prompts: int = Field(description="held-out prompts")
    tokens: int = Field(description="tokens of their frozen responses")
    against_served: Effects | None = Field(None, description="draft minus served draft, the same keys")
    replay: dict[int, float] = Field({}, description="tau of the draft by gamma, 0 to 32, from the frozen text")
    best_gamma_range: tuple[int, int] | None = Field(
        None,
        description="gammas whose predicted speed-up is within 3 % of the highest, or within what costs are known to; null: none pays",
    )
    costs: Costs | None = Field(None, description="of the draft and the target")
    plain_wins_from: int | None = Field(
        None,
        description="concurrent requests from which plain decoding is faster; null: not up to 4096, or no judge.load",
    )
    roofline: Roofline | None = Field(None, description="what predicts between and beyond the measured loads")
    latency: dict[str, Latency] = Field({}, description="by way, `target alone` among them; empty: not timed")
    checkpoints: list[Judgement] = Field([], description="every judged checkpoint, step 0 first, each with its gain")
    self_checks: dict[str, Any] = Field({}, description="what was checked before anything was measured")
    targets: list[OnTarget] = Field([], description="the draft on each other target (target.others), by replay")
    repetition: Repetition | None = Field(None, description="of the frozen text")
    outcome: Outcome = Field(description="what distilling brought, as in the table above")
    warnings: list[Text] = Field([], description="where live decoding and replay part, or the target loops")
    seconds: dict[str, float] = Field({}, description="by stage, of the whole run; empty for an evaluation")

    def row(self, way: str, concurrency: int = 1, text: str = HELD_OUT) -> Measured | None:
        """The row of a way that its speed is of; where nothing was timed the judged one; None where there is none."""
        return row_of(self.measured, way, concurrency, text)

    def judged(self, way: str, text: str = HELD_OUT) -> Measured | None:
        """The row of a draft at the judged gamma, tau decoded live where anything was; None where there is none."""
        rows = [one for one in self.measured if (one.way, one.text, one.gamma) == (way, text, self.gamma)]
        return next((one for one in rows if one.how.get("tau") == "live"), rows[0] if rows else None)

    def to_run(self, concurrency: int = 1) -> str | None:
        """The way to run at a measured concurrency; None: not timed."""
        return self.run.get(str(concurrency))

    @property
    def concurrencies(self) -> list[int]:
        """The loads that were measured, rising."""
        return sorted({one.concurrency for one in self.measured})


def drafting_to_serve(verdict: Verdict | None, parallel: bool) -> Drafting:
    """The way of drafting that was found to be the faster; of a draft that was not judged what it was trained for.

    parallel: whether the draft can propose a block in one pass (its config names a mask token).
    """
    if not parallel:
        return "autoregressive"
    if verdict is None:
        return "parallel"
    return next((way for way in WAYS if WAYS[way] == verdict.to_run()), verdict.drafts[-1].drafting)


def load_verdict(run: Path) -> Verdict:
    """verdict.json of a finished run.

    Raises:
        UserError: not there or damaged, or a key is missing or holds something else (it is named).
    """
    unfinished = "not there; the run is not finished, start its command again"
    return Verdict.read(run / VERDICT, "delete it, and start the run's command again", unfinished)
