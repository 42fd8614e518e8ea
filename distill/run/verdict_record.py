"""The shape of verdict.json and of a judgement, read by every command that compares, reports, exports or sweeps runs."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from distill.config.layout import VERDICT, near_path
from speculative.errors import UserError
from speculative.evaluate import Judgement
from speculative.explain.repetition import Repetition
from speculative.measure.effects import Effects
from speculative.measure.engine_costs import EngineCosts
from speculative.measure.intervals import interval
from speculative.measure.measured import BY_BLOCK, BY_TOKEN, DRAFT, HELD_OUT, TARGET, Measured, Row, row_of
from speculative.measure.record import Record, Text
from speculative.measure.replay import ReplayCheck

Drafting = Literal["autoregressive", "parallel"]
# A draft that can draft both ways is judged in the faster one; the other one is reported under these names.
WAYS: dict[Drafting, str] = {"autoregressive": BY_TOKEN, "parallel": BY_BLOCK}
OUR_DECODER = "in Understudy's decoder"  # Whose times a headline is from, if no engine was timed.
Outcome = Literal[
    "pays_off", "best_with_lookup", "baseline_better", "no_speed", "no_measurable_gain", "loss", "not_timed"
]


class Costs(Record):
    """Measured step times at batch 1, with c and v."""

    target_step_seconds: float = Field(description="one step of the target")
    draft_step_seconds: float = Field(description="one draft call: one token, or a block in one pass")
    cost_ratio: float = Field(description="c: draft call / target step")
    cost_ratio_at: dict[int, float] = Field({}, description="c by gamma")
    verify_ratio: dict[int, float] = Field(description="v by gamma: verifying call / target step")
    break_even_alpha: float | None = Field(None, description="smallest alpha that pays off at `gamma`; null: none does")
    batch_size: int | None = Field(None, description="rows in the batch")
    context: int | None = Field(None, description="tokens before the timed steps")
    threads: int | None = Field(None, description="CPU threads")
    steps: str = Field(
        "", description="how the target's calls ran: compiled code, (fused kernels in) CUDA graphs or eager calls"
    )


class Roofline(Record):
    """Seconds of one call = fixed + per_token * tokens in the call, fitted to the steps at all measured loads."""

    target_fixed_seconds: float = Field(description="fixed part of a target call")
    target_seconds_per_token: float = Field(description="seconds that each token adds to a target call")
    draft_fixed_seconds: float = Field(description="fixed part of a draft step")
    draft_seconds_per_token: float = Field(description="seconds that each token adds to a draft step")
    free_tokens: float | None = Field(
        None,
        description="tokens at which a target call takes twice its fixed time; null: tokens add no time",
    )


class DraftOf(Record):
    """A draft of the verdict: the weights that a way's name refers to."""

    way: str = Field(description="`undistilled draft`, `served draft` or `draft`")
    path: Text | None = Field(None, description="where its weights are")
    step: int | None = Field(None, description="its checkpoint; null: not a checkpoint of this run")
    drafting: Drafting = Field("autoregressive", description="how it drafts")


class Verdict(Record):
    """verdict.json: the draft compared with the undistilled one, and every way to decode, timed. Null: not measured."""

    FORMAT: ClassVar[int | None] = 2
    ABSENT: ClassVar[str] = "not there: the run is not finished; start its command again"
    format: Literal[2] = Field(2, description="format of this file; version 0.1 wrote none")
    version: str = Field(description="version of understudy that wrote it")
    measured: list[Row] = Field(
        [],
        description="every way at every concurrency, on the held-out text and its domains, and the draft on text that it learned",
    )
    drafts: list[DraftOf] = Field(min_length=1, description="every draft; the judged one is last")
    gain: Effects | None = Field(None, description="draft minus undistilled, paired by prompt, widened for the looks")
    run: dict[str, str] = Field(
        {}, description="the way to run in our decoder by number of concurrent requests; empty: not timed"
    )
    pays: bool | None = Field(None, description="whether decoding is certainly faster with the draft; null: not timed")
    survival: list[float] | None = Field(
        None,
        description="of the judged draft, live, else by replay: share of blocks whose first j tokens are all accepted, j = 1, 2, ...",
    )
    live_tokens: int | None = Field(None, description="tokens of the judged draft's live run; null: none")
    replay_check: ReplayCheck | None = Field(None, description="blocks of that run, counted and by replay of its text")
    headline: Text = Field(description="what to run and its speed-up, in at most 25 words")
    facts: list[Text] = Field([], description="the other findings, one line each")
    rule: str = Field(description="engine rule")
    gamma: int = Field(description="drafted tokens per block")
    prompts: int = Field(description="held-out prompts")
    tokens: int = Field(description="tokens of the held-out responses")
    against_served: Effects | None = Field(None, description="draft minus served draft")
    replay: dict[int, float] = Field({}, description="tau of the draft by gamma, 0 to 32, by replay")
    best_gamma_range: tuple[int, int] | None = Field(
        None,
        description="first and last gamma whose predicted speed-up is within 3 % (or the step times' error) of the highest; null: none",
    )
    costs: Costs | None = Field(None, description="step times of the draft and the target")
    plain_wins_from: int | None = Field(
        None,
        description="concurrent requests from which plain decoding is faster; null: not up to 4096, or judge.load is empty",
    )
    roofline: Roofline | None = Field(None, description="model of the step times between and beyond the measured loads")
    latency_loads: dict[str, int | None] = Field({}, description="by way, the largest load within judge.latency_ms")
    checkpoints: list[Judgement] = Field([], description="every judged checkpoint with its gain, step 0 first")
    self_checks: dict[str, Any] = Field({}, description="checks made before anything was measured")
    repetition: Repetition | None = Field(None, description="how much the held-out responses repeat themselves")
    outcome: Outcome = Field(description="see [the outcomes](../verdict.md#the-outcomes)")
    warnings: list[Text] = Field([], description="live and replay disagree, the target loops, a load was not measured")
    seconds: dict[str, float] = Field({}, description="seconds of each stage of the run; empty for an evaluation")
    engine: EngineCosts | None = Field(None, description="content of engine_costs.json; null: no engine was timed")

    def row(self, way: str, concurrency: int = 1, text: str = HELD_OUT) -> Measured | None:
        """The timed row of a way; the judged row if nothing was timed; None if there is none."""
        return row_of(self.measured, way, concurrency, text)

    def judged(self, way: str, text: str = HELD_OUT) -> Measured | None:
        """The row of a draft at the judged gamma, the live one first; None if there is none."""
        rows = [one for one in self.measured if (one.way, one.text, one.gamma) == (way, text, self.gamma)]
        return next((one for one in rows if one.how.get("tau") == "live"), rows[0] if rows else None)

    def to_run(self, concurrency: int = 1) -> str | None:
        """The way to run at a measured concurrency, by the engine's times if they were taken there; None: not timed."""
        if (engine_run := self.engine_runs.get(concurrency)) is not None:
            return DRAFT if engine_run.gamma else TARGET
        return self.run.get(str(concurrency))

    @property
    def response_tokens(self) -> float:
        """Mean tokens of a held-out response."""
        return self.tokens / max(1, self.prompts)

    @property
    def engine_rows(self) -> list[Measured]:
        """`EngineCosts.rows` of the draft, at each load the one to run last; empty if no engine was timed."""
        return self.engine.rows(self.replay, self.rule, self.response_tokens) if self.engine else []

    @property
    def engine_runs(self) -> dict[int, Measured]:
        """Load -> the row to run in the engine (gamma 0: the target alone); empty if no engine was timed."""
        return {row.concurrency: row for row in self.engine_rows}

    def in_engine(self, costs: EngineCosts | None) -> "Verdict":
        """This verdict with an engine's times, which decide what to run at their first load; what our decoder says becomes a fact."""
        timed = self.model_copy(update={"engine": costs})
        if costs is None or not timed.engine_runs:
            return timed
        load, run = min(timed.engine_runs.items())
        where = f"in {costs.engine}{f' at {load} requests' if load > 1 else ''}"
        headline = f"Run the target alone {where}: by its step times the draft is faster at no gamma."
        if run.gamma:
            ends = f" {interval(run.speed_up_ci, '.2f')}" if run.speed_up_ci else ""
            pace = f"{run.speed_up:.2f}x{ends} as fast as the target alone"
            headline = f"Run the draft {where}: {pace}, predicted from its step times."
        ours = f"Timed {OUR_DECODER}: {self.headline.replace(f' {OUR_DECODER}', '')}"
        outcome = "pays_off" if run.gamma else "no_speed"
        if self.outcome in ("no_measurable_gain", "loss"):
            outcome = self.outcome
        return timed.model_copy(
            update={
                "headline": headline,
                "facts": [*([ours] if self.run else []), *self.facts],
                "pays": bool(run.gamma),
                "outcome": outcome,
            }
        )

    @property
    def concurrencies(self) -> list[int]:
        """The measured loads, smallest first."""
        return sorted({one.concurrency for one in self.measured})


def drafting_to_serve(verdict: Verdict | None, parallel: bool) -> Drafting:
    """The way of drafting that was measured to be faster; for a draft that was not judged, the one it was trained for.

    parallel: whether the draft can propose a block in one pass (its config names a mask token).
    """
    if not parallel:
        return "autoregressive"
    if verdict is None:
        return "parallel"
    return next((way for way in WAYS if WAYS[way] == verdict.to_run()), verdict.drafts[-1].drafting)


def load_verdict(run: Path) -> Verdict:
    """verdict.json of a finished run, by the times of engine_costs.json if an engine was timed; UserError as `Record.read`."""
    if not run.is_dir():
        raise UserError(f"{run}: no such folder{near_path(run)}")
    return Verdict.read(run / VERDICT).in_engine(EngineCosts.stored(run))
