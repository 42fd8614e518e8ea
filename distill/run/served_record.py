"""The shape of served.json: what a serving engine did with a run's draft, read back from it by `understudy readback`."""

from pathlib import Path
from typing import Any

from pydantic import Field

from distill.config.layout import READBACK
from distill.run.verdict_record import Drafting, Interval, Record, Text


class ServedNumbers(Record):
    """What the engine did."""

    tau: float = Field(description="tokens behind the prefill's per verifying call")
    tau_ci: Interval = Field(description="its 95 % interval over prompts")
    survival: list[float] | None = Field(None, description="by place; null: the engine does not tell")
    accepted_per_drafted: float | None = Field(None, description="accepted tokens / drafted tokens")
    source: str = Field(description="responses: its counts of each; metrics: the difference of its counters")
    tokens_per_second: float | None = Field(None, description="of one request")
    tokens_per_second_ci: Interval | None = Field(None, description="its 95 % interval over prompts")
    latency: float | None = Field(None, description="seconds of a whole response, mean")
    latency_ci: Interval | None = Field(None, description="its 95 % interval over prompts")
    concurrency: int = Field(1, description="requests under way at once")


class ReplayNumbers(Record):
    """What replay says of the same prompts under the engine's rule, from the second token of each response on."""

    tau: float = Field(
        description="of the text that was served; of the run's own where that is not known token by token"
    )
    survival: list[float] = Field(description="by place")
    accepted_per_drafted: float = Field(description="drafted tokens behind the end of a response not counted")
    text: str = Field(description="served text, or the run's text")
    expected_tau: float = Field(description="of the run's own held-out text")
    expected_tau_ci: Interval = Field(description="its 95 % interval over prompts")


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


class ServedRecord(Record):
    """served.json."""

    engine: str = Field(description="vllm, sglang, llama.cpp, tensorrt-llm or unknown")
    version: str = Field("", description="as the server says it")
    url: Text = Field(description="that was asked")
    made: str = Field(description="when, UTC")
    rule: str = Field(description="engine rule that its counts follow")
    gamma: int = Field(description="drafted tokens per block, as the server drafts")
    drafting: Drafting = Field(
        "autoregressive", description="way of drafting that replay is of: as exported, or --drafting"
    )
    asked_gamma: int = Field(description="as exported, or --gamma")
    sampling: dict[str, Any] = Field(description="of the requests")
    prompts: int = Field(description="held-out prompts asked")
    tokens: int = Field(description="of the responses")
    served: ServedNumbers = Field(description="what the engine did")
    replay: ReplayNumbers = Field(description="what was to be expected")
    z: float = Field(
        description="blocks served against replayed, in standard errors of the coins; beyond 4 is no chance"
    )
    agrees: bool = Field(description="tau, gamma, greedy texts and the law of the text are all as they should")
    texts_equal: bool | None = Field(None, description="greedy texts, near-ties aside; null: not asked")
    greedy: GreedyTexts | None = Field(None, description="how many")
    text_law: TextLawRecord | None = Field(None, description="null: greedy, or weights or token ids are not known here")
    speed_up: float | None = Field(None, description="tokens/s over the server without the draft; null: none was given")
    speed_up_ci: Interval | None = Field(None, description="its 95 % interval over prompts")
    causes: list[Text] = Field([], description="of disagreement, each tested for")
    notes: list[Text] = Field([], description="what a reader must know")

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
