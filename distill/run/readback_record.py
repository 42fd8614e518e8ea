"""The shape of readback.json: measurements of a serving engine with a run's draft, written by `understudy readback`."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from distill.config.layout import READBACK
from distill.run.verdict_record import Drafting
from speculative.measure.intervals import Interval
from speculative.measure.measured import HELD_OUT, Measured, Row
from speculative.measure.record import Record, Text

SERVED_TEXT = "served"  # The `text` of rows about the engine's answers.


class TextFitRecord(Record):
    """Whether the sampled text is the target's own."""

    p: float = Field(description="p-value of two tests, corrected")
    same: bool = Field(description="whether p is at least 0.001")
    log_prob: float = Field(description="mean log-probability per token, nats")
    expected: float = Field(description="its expected value for the target's own text")
    tokens: int = Field(description="tokens tested")


class GreedyTexts(Record):
    """The engine's greedy texts compared with the run's."""

    prompts: int = Field(description="prompts compared")
    equal: int = Field(description="texts that are equal token for token")
    near_ties: int = Field(0, description="texts that differ after a near-tie: two best logits equal up to rounding")
    gap: float = Field(0.0, description="largest gap of two logits at such a near-tie, nats; 0: not measured")
    moved: float = Field(0.0, description="standard deviation of what the engine's arithmetic does to such gaps, nats")

    @property
    def same(self) -> bool:
        """Whether all texts are equal, apart from near-ties."""
        return self.equal + self.near_ties == self.prompts


class SpeedCheck(Record):
    """`understudy readback --speed` at one number of concurrent requests: shares of the predicted speed-up."""

    predicted: Row = Field(description="from engine_costs.json and the verdict's tau, at the served gamma")
    served: Row = Field(description="tokens/s of requests over those without the draft, and tau")
    difference: float = Field(description="served / predicted - 1")
    of_tau: float = Field(description="the part that follows from the served tau")
    of_costs: float = Field(description="the rest: steps and prefill took another time than `understudy time` measured")
    holds: bool = Field(description="whether the difference is at most 10 %")
    causes: list[Text] = Field([], description="what can be seen to cause a larger one")


class ReadbackRecord(Record):
    """readback.json. Its rows are about the draft, from the second token of each response on: as served, by replay of the served text if
    its token ids are known, and by replay of the run's held-out text. With --plain there is also a row for the target alone.
    """

    FORMAT: ClassVar[int | None] = 3
    FILE: ClassVar[str] = READBACK
    REMEDY: ClassVar[str] = "make it again with `understudy readback`"
    format: Literal[3] = Field(3, description="format of this file")
    engine: str = Field(description="name of the engine")
    version: str = Field("", description="version that the server reports")
    weights: str = Field("", description="precision of its weights that the server reports")
    inputs: str = Field("", description="precision of the inputs of its products, to which the target is rounded here")
    url: Text = Field(description="URL of the server")
    made: str = Field(description="time of writing, UTC")
    drafting: Drafting | None = Field("autoregressive", description="way of drafting in replay; null without a run")
    target: str = Field("", description="--target that the text is compared with; empty: the run's")
    sampling: dict[str, Any] = Field(description="sampling settings of the requests")
    source: str = Field(description="`responses`: counts for each response; `metrics`: the difference of counters")
    measured: list[Row] = Field(description="rows as served, and by replay at the exported or requested gamma")
    survival: dict[str, list[float]] = Field(description="by position: `replay`, and `served` if the engine reports it")
    survival_ci: list[Interval] | None = Field(None, description="its 95 % intervals over prompts; null: sums only")
    tokens_per_second_ci: Interval = Field(description="95 % interval of tokens/s over prompts, as served")
    latency: float = Field(description="mean seconds per response")
    latency_ci: Interval = Field(description="its 95 % interval over prompts")
    z: float | None = Field(
        description="difference between served and replayed blocks in standard errors; an absolute value above 4 is not chance; null "
        "without a run"
    )
    agrees: bool = Field(description="whether tau, gamma, the greedy texts and the distribution of the text all agree")
    greedy: GreedyTexts | None = Field(None, description="comparison of greedy texts; null: not made")
    text_fit: TextFitRecord | None = Field(None, description="test of sampled text; null: greedy, or no weights or ids")
    causes: list[Text] = Field([], description="causes of disagreement that were found by tests")
    speed: list[SpeedCheck] = Field([], description="predicted and served speed-up by load (--speed)")
    notes: list[Text] = Field([], description="notes for the reader")

    @property
    def served(self) -> Measured:
        """The row of the engine with the draft."""
        return self.measured[0]

    @property
    def replay(self) -> Measured | None:
        """The expected row: by replay of the served text if it is known, else of the run's own text; None without a run."""
        return next((row for row in self.measured if "replay" in row.how.values()), None)

    @property
    def expected(self) -> Measured | None:
        """Replay of the run's own held-out text; None without a run."""
        return next((row for row in self.measured if row.text == HELD_OUT), None)

    @property
    def where(self) -> str:
        """Name and version of the engine."""
        return f"{self.engine} {self.version}".strip()
