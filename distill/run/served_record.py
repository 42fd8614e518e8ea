"""The shape of served.json: what a serving engine did with a run's draft, read back from it by `understudy readback`."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from distill.config.layout import READBACK
from distill.run.verdict_record import Drafting
from speculative.measure.intervals import Interval
from speculative.measure.measured import HELD_OUT, Measured, Row
from speculative.measure.record import Record, Text

SERVED_TEXT = "served"  # The text of a row that is of what the engine answered.


class TextLawRecord(Record):
    """Whether the sampled text is the target's own."""

    p: float = Field(description="of two tests, corrected")
    same: bool = Field(description="p is at least 0.001")
    log_prob: float = Field(description="nats a token")
    expected: float = Field(description="nats a token of the target's own text")
    tokens: int = Field(description="tested")


class GreedyTexts(Record):
    """Greedy text beside the run's own."""

    prompts: int = Field(description="compared")
    equal: int = Field(description="token for token")
    near_ties: int = Field(0, description="that part where the target's two best logits are equal up to rounding")

    @property
    def same(self) -> bool:
        """Whether all are, near-ties aside."""
        return self.equal + self.near_ties == self.prompts


class ServedRecord(Record):
    """served.json. Its rows are of the draft, from the second token of each response on: the engine's own, replay of the text that
    it served where that is known token by token, and replay of the run's held-out text; with --plain also of the target alone.
    """

    FORMAT: ClassVar[int | None] = 2
    format: Literal[2] = Field(2, description="of this file")
    engine: str = Field(description="vllm, sglang, llama.cpp, tensorrt-llm or unknown")
    version: str = Field("", description="as the server says it")
    url: Text = Field(description="that was asked")
    made: str = Field(description="when, UTC")
    drafting: Drafting = Field(
        "autoregressive", description="way of drafting that replay is of: as exported, or --drafting"
    )
    sampling: dict[str, Any] = Field(description="of the requests")
    source: str = Field(description="responses: the engine's counts of each; metrics: the difference of its counters")
    measured: list[Row] = Field(description="as served, and by replay at the gamma that was exported or asked for")
    survival: dict[str, list[float]] = Field(
        description="by place of a block: `replay`, and `served` where the engine tells"
    )
    tokens_per_second_ci: Interval = Field(description="of the served row, over prompts")
    latency: float = Field(description="seconds of a whole response, mean")
    latency_ci: Interval = Field(description="its 95 % interval over prompts")
    z: float = Field(
        description="blocks served against replayed, in standard errors of the coins; beyond 4 is no chance"
    )
    agrees: bool = Field(description="tau, gamma, greedy texts and the law of the text are all as they should")
    greedy: GreedyTexts | None = Field(None, description="null: not asked")
    text_law: TextLawRecord | None = Field(None, description="null: greedy, or weights or token ids are not known here")
    causes: list[Text] = Field([], description="of disagreement, each tested for")
    notes: list[Text] = Field([], description="what a reader must know")

    @property
    def served(self) -> Measured:
        """What the engine did with the draft."""
        return self.measured[0]

    @property
    def replay(self) -> Measured:
        """What is to be expected: of the text that was served where it is known, else of the run's own."""
        return next(row for row in self.measured if "replay" in row.how.values())

    @property
    def expected(self) -> Measured:
        """Replay of the run's own held-out text."""
        return next(row for row in self.measured if row.text == HELD_OUT)

    @property
    def where(self) -> str:
        """`vLLM 0.32.0`."""
        names = {
            "vllm": "vLLM",
            "sglang": "SGLang",
            "tensorrt-llm": "TensorRT-LLM",
            "unknown": "an engine that does not say its name",
        }
        return f"{names.get(self.engine, self.engine)} {self.version}".strip()


def load_served(run: Path) -> ServedRecord | None:
    """served.json of a run, None where nothing was read back.

    Raises:
        UserError: damaged, or a key is missing or holds something else.
    """
    path = run / READBACK
    return ServedRecord.read(path, "make it again with `understudy readback`") if path.is_file() else None
