"""The shape of verdict.json and of a judgement: read by whatever compares, reports, exports or sweeps runs."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, PlainSerializer, ValidationError

from distill.config.layout import VERDICT
from distill.run.provenance import version_of
from speculative.errors import UserError
from speculative.measure.measured import BY_BLOCK, BY_TOKEN, HELD_OUT, Measured, row_of

VERSION = version_of("understudy") or "unknown"

# Text of models may hold what no UTF-8 has, so it is only asked to be text.
Text = InstanceOf[str]
Interval = tuple[float, float]
# One row of a record: what is not known is not written.
Row = Annotated[Measured, PlainSerializer(Measured.record)]
Certain = Literal["gain", "loss", "none"]
Drafting = Literal["autoregressive", "parallel"]
# The name of a draft that can draft both ways where it drafts the other way than the one in question does.
WAYS: dict[Drafting, str] = {"autoregressive": BY_TOKEN, "parallel": BY_BLOCK}
Outcome = Literal["pays_off", "best_together", "rival_better", "no_speed", "no_measurable_gain", "loss", "not_timed"]


class Record(BaseModel):
    """Frozen. A key that is not known here stays as it is, and one that was never set is not written."""

    FORMAT: ClassVar[int | None] = None
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    def record(self) -> dict[str, Any]:
        """Plain values, as they are written to disk."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def read(cls, path: Path, remedy: str, absent: str = "not there") -> Self:
        """The record that a JSON file holds.

        Raises:
            UserError: not there, not readable, damaged (NaN is no number of JSON), or a key is missing or holds something else.
        """
        try:
            tree = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
            if cls.FORMAT is not None and isinstance(tree, dict) and tree.get("format") != cls.FORMAT:
                made = tree.get("format", 1)
                by = "0.1" if made == 1 else tree.get("version")
                raise UserError(
                    f"{path}: written by version {by} of understudy (format {made}); "
                    f"version {VERSION} reads format {cls.FORMAT}: make it again in a new folder, or read it with that version"
                )
            return cls.model_validate(tree)
        except UserError:
            raise
        except FileNotFoundError as error:
            raise UserError(f"{path}: {absent}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            fault = (
                "is missing" if first["type"] in ("missing", "too_short") else f"holds something else ({first['msg']})"
            )
            what = f"key {_dotted(first['loc'])}" if first["loc"] else "the file"
            raise UserError(f"{path}: {what} {fault}; {remedy}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); {remedy}") from error


def _dotted(place: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


class ReplayCheck(Record):
    """Blocks that a live run counted beside what replay of its own text predicts."""

    predicted_blocks: float = Field(description="by replay")
    live_blocks: int = Field(description="counted")
    z: float | None = Field(None, description="how far apart, in standard errors; null: apart though nothing is drawn")
    agrees: bool = Field(True, description="whether that can be chance")


class PerResponse(Record):
    """Sums by held-out response, so that two judgements on the same text can be paired without a model."""

    accept_sums: list[float] = Field(description="of the acceptance probabilities")
    tokens: list[int] = Field(description="of each response")
    blocks: list[float] | None = Field(None, description="expected at the judged gamma")


class OnText(Record):
    """How a draft does on a text. Null: only live decoding tells, and nothing was decoded."""

    alpha: float = Field(description="acceptance rate on the frozen text")
    alpha_ci: Interval | None = Field(None, description="its 95 % interval")
    tau: float | None = Field(None, description="tokens per target call at the judged gamma")
    tau_ci: Interval | None = Field(None, description="its 95 % interval; null: tau is by replay")
    accepted_per_drafted: float | None = Field(None, description="accepted over drafted tokens")
    survival: list[float] | None = Field(
        None, description="share of blocks whose first j tokens are all accepted, j from 1"
    )
    prompts: int | None = Field(None, description="held-out prompts")
    tokens: int | None = Field(None, description="tokens of their frozen responses")
    replay: dict[int, float] = Field({}, description="tau by gamma, from the frozen text")


class Gain(Record):
    """A difference and its interval."""

    gain: float = Field(description="the difference")
    ci: Interval = Field(description="its interval")


class Judgement(OnText):
    """judgement.json of a checkpoint: what `speculative.evaluate.judge` (or replay alone) found, and when."""

    step: int | None = Field(None, description="of the checkpoint; null: none of this run")
    score: float | None = Field(
        None,
        description="what checkpoints are picked by: tau under the configured rule, with target.others the weighted mean over targets",
    )
    tau: float = Field(description="tokens per target call: counted live, else by replay")
    rule: str | None = Field(None, description="engine rule")
    gamma: int | None = Field(None, description="drafted tokens per block")
    domains: dict[str, OnText] = Field({}, description="the same numbers by domain")
    live: bool = Field(True, description="whether the prompts were decoded live")
    live_tokens: int | None = Field(None, description="tokens of the live run")
    replay_check: ReplayCheck | None = Field(None, description="the live run's blocks beside replay of its very text")
    warnings: list[Text] = Field([], description="where live decoding and replay part")
    weights: str | None = Field(None, description="raw or ema: which were better, where averaged ones were judged too")
    score_raw: float | None = Field(None, description="score of the raw weights, where both were judged")
    score_ema: float | None = Field(None, description="score of the averaged ones")
    per_response: PerResponse | None = Field(None, description="sums by response; in judgement.json only")
    gain: Gain | None = Field(
        None,
        description="in a verdict: in alpha over step 0, paired by prompt on the same text; the interval stands alone",
    )

    def without_sums(self) -> "Judgement":
        """The judgement without its lists by response, those under other rules included."""
        plain = self.model_dump(exclude_unset=True, exclude={"per_response": True, "greedy": {"per_response"}})
        return Judgement.model_validate(plain)


class Detectable(Record):
    """The smallest true differences that would be told from 0; null where prompts are too few or show no spread."""

    alpha: float | None = Field(None, description="with 80 % power")
    tau: float | None = Field(None, description="with 80 % power")


class CallEffects(Record):
    """What one way of drafting gains over another on the same frozen text, in target calls (speculative/measure/effects.py)."""

    tau: Gain = Field(description="in tau, by replay")
    speed_up: Gain | None = Field(None, description="in predicted speed-up; null: not timed")
    confidence: float = Field(description="of all looks together")
    looks: int = Field(description="judged drafts of which this one is the best")
    corrected_confidence: float = Field(description="of each interval (Bonferroni over the looks)")
    method: str = Field(description="how the intervals were made")
    prompts: int = Field(description="prompts compared on")
    tokens: int = Field(description="their tokens")
    fewest_prompts: int = Field(0, description="fewer are never certain")
    minimal_detectable: Detectable = Field(description="smallest differences told from 0")
    prompts_for_half: int = Field(description="prompts that would see half of that")
    certain_tau: Certain = Field("none", description="whether the interval of tau excludes 0, on enough prompts")


class Effects(CallEffects):
    """What one draft gains over another on the same frozen text, paired by prompt."""

    alpha: Gain = Field(description="in alpha")
    certain: Certain = Field(description="whether the interval of alpha excludes 0, on enough prompts")


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


class RepetitionShares(Record):
    """How much of some text repeats itself."""

    repeated: float = Field(description="share of tokens inside 8 in a row that stood earlier in prompt or response")
    looping: float = Field(
        description="share of tokens in a stretch that goes on repeating its last 1 to 64 tokens, twice more and for 16 at least"
    )
    tokens: int | None = Field(None, description="of the text")


class Repetition(RepetitionShares):
    """How much of the target's own text repeats itself: acceptance on a loop says little."""

    by_domain: dict[str, RepetitionShares] = Field({}, description="the same by domain")
    warning: Text | None = Field(None, description="where more than 10 % loops")


class Percentiles(Record):
    """Of what was observed, in seconds."""

    p50: float = Field(description="the median")
    p90: float = Field(description="nine of ten are at most this")
    p99: float = Field(description="99 of 100 are")


class Latency(Record):
    """What a reader waits for, one request at a time. Null: nothing of the kind was observed."""

    first_token: Percentiles | None = Field(None, description="to the first tokens, both models' prefill included")
    between_commits: Percentiles | None = Field(
        None, description="pauses of the stream: a block's tokens come together"
    )
    per_token: Percentiles | None = Field(None, description="mean pause per token of each response, behind the first")
    per_response: Percentiles | None = Field(None, description="from the request to the response's last token")


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
    judgement: Judgement | None = Field(None, description="of the draft in question, as its last judging found it")
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
