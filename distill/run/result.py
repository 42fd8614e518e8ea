"""The shape of result.json: everything that a report, a comparison or a drift test reads of a judged draft."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from distill.run.served_record import ServedRecord
from distill.run.verdict_record import Verdict
from speculative.evaluate import Judgement
from speculative.explain.calibration import Calibration
from speculative.explain.disagreements import Disagreement
from speculative.explain.repetition import Repetition
from speculative.explain.slices import SliceTable
from speculative.explain.where_helps import WhereRow
from speculative.measure.intervals import Interval
from speculative.measure.metrics import Curve
from speculative.measure.record import Record, Text

RESULT_FORMAT: Literal[2] = 2
Writer = Literal["draft", "target", "bonus"]


class RuleCurves(Record):
    """Every draft under one rule."""

    rule: str = Field(description="engine rule")
    ways: dict[str, Curve] = Field(description="by draft")
    note: Text | None = Field(None, description="how the text was answered, and whose step times hold")


class Curves(Record):
    """Alpha, tau and speed over gamma."""

    gammas: list[int] = Field(description="0 to 32")
    rules: list[RuleCurves] = Field(description="under every rule that the text has a law for, the run's own first")
    refused: dict[str, Text] = Field({}, description="the others, and why the text has no law for them")

    def taus_at(self, gamma: int, way: str) -> dict[str, float]:
        """tau of a draft by rule at a gamma; what was not replayed is left out."""
        of_draft = {entry.rule: entry.ways[way] for entry in self.rules if way in entry.ways}
        return {rule: curve.tau[curve.gammas.index(gamma)] for rule, curve in of_draft.items() if gamma in curve.gammas}


class TemperatureRow(Record):
    """The judged draft on answers that the target gave at one temperature."""

    temperature: float = Field(description="of the target and the draft; 0: greedy")
    curve: Curve = Field(description="by replay of the answers to the same held-out prompts at each temperature")
    repetition: Repetition = Field(description="of the answers")


class Losslessness(Record):
    """`understudy evaluate --losslessness` of this draft; everything else that it found stands beside."""

    draft: Text = Field(description="as it was named")
    rule: str | None = Field(None, description="engine rule")
    gamma: int | None = Field(None, description="drafted tokens per block")
    passed: bool = Field(description="whether no test failed")
    sentence: Text = Field(description="the answer in words")
    greedy: dict[str, Any] | None = Field(None, description="greedy text with and without the draft, token by token")
    sampled: dict[str, Any] | None = Field(None, description="sampled text with and without it, by permutation test")


class Score(Record):
    """A mean score."""

    score: float = Field(description="from 0 to 1")
    ci: Interval = Field(description="its 95 % interval")


class ScoreDifference(Record):
    """With the draft minus without."""

    value: float = Field(description="of the mean scores")
    ci: Interval = Field(description="its 95 % interval, paired by prompt")


class TaskScores(Record):
    """`understudy evaluate --scorer` of this draft."""

    scorer: Text = Field(description="as it was named")
    rule: str | None = Field(None, description="engine rule")
    gamma: int | None = Field(None, description="drafted tokens per block")
    prompts: int = Field(description="held-out prompts scored")
    samples: int = Field(1, description="responses to each")
    speculative: Score = Field(description="with the draft")
    alone: Score = Field(description="the target alone")
    with_reference: int = Field(0, description="prompts that have a reference")
    same_texts: int = Field(0, description="responses that are the same with the draft and without")
    difference_ci_wide: Interval | None = Field(
        None, description="the interval that fails the check; null at temperature 0"
    )
    difference: ScoreDifference = Field(description="between the two")
    passed: bool = Field(description="whether they are certainly not different")
    sentence: Text = Field(description="the answer in words")


class TokenSeen(Record):
    """A token of the view, and what both models held most probable at its place."""

    text: Text = Field(description="as it is read")
    id: int = Field(description="in the vocabulary")
    by: Writer = Field(description="who wrote it")
    block: int = Field(description="in which round")
    target_prob: float | None = Field(None, description="of the token")
    draft_prob: float | None = Field(None, description="of the token")
    target_top: list[tuple[Text, float]] = Field(description="the target's five most probable: [text, probability]")
    draft_top: list[tuple[Text, float]] = Field(description="the draft's")


class ResponseSeen(Record):
    """A response of the live run, token by token."""

    key: Text = Field(description="of the prompt")
    domain: Text = Field(description="of the prompt")
    prompt: Text = Field(description="its end")
    tokens: list[TokenSeen] = Field(description="of the response")
    tokens_count: int = Field(description="how many")
    blocks: int = Field(description="target calls")
    drafted: int = Field(description="drafted tokens")
    accepted: int = Field(description="accepted ones of them")


class TokenView(Record):
    """Some responses of the logged live run."""

    way: str = Field(description="the draft that was decoded with")
    rule: str = Field(description="engine rule")
    gamma: int = Field(description="drafted tokens per block")
    responses: list[ResponseSeen] = Field(description="domains in turn")


class ServeCommand(Record):
    """An engine and what starts it with this pair."""

    engine: Text = Field(description="its name")
    ok: bool = Field(description="whether it takes the pair")
    language: str = Field(description="of the command")
    command: Text = Field(description="that starts it")
    note: Text | None = Field(None, description="how it accepts")


class Result(Record):
    """result.json. Sections that are not there are null or empty."""

    FORMAT: ClassVar[int | None] = RESULT_FORMAT
    format: Literal[2] = Field(description="of this file")
    version: str = Field(description="of understudy that wrote it")
    kind: str = Field(description="run or evaluation")
    name: Text = Field(description="of the run, or the draft's path")
    made: str | None = Field(None, description="when, UTC")
    verdict: Verdict = Field(description="verdict.json")
    curves: Curves | None = Field(None, description="over gamma, by replay of the frozen text")
    slices: list[SliceTable] = Field([], description="the frozen text by dimension")
    where: list[WhereRow] = Field([], description="which way helps where; empty: not timed")
    temperatures: list[TemperatureRow] = Field(
        [], description="acceptance at each of judge.temperatures, coldest first"
    )
    losslessness: Losslessness | None = Field(
        None, description="whether the text is the target's own, where it was tested"
    )
    scores: list[TaskScores] = Field([], description="task scores with and without the draft, one a scorer")
    disagreements: list[Disagreement] = Field([], description="where the draft loses most, worst first")
    calibration: Calibration | None = Field(None, description="what its confidence is worth")
    trained_on: list[Text] | None = Field(
        None, description="domains of the training prompts; null: nobody trained here"
    )
    timed_prompts: dict[str, dict[str, float]] = Field(
        {}, description="tokens/s by timed prompt and way, `target alone` among them; who lost early has fewer"
    )
    token_view: TokenView | None = Field(None, description="some responses token by token")
    served: ServedRecord | None = Field(
        None,
        description="what an engine did with the draft: the report takes it from served.json (`understudy readback`)",
    )
    serve: list[ServeCommand] = Field([], description="how to start each engine with it")
    config: Text = Field("", description="the resolved config, YAML")
    provenance: dict[str, Any] = Field({}, description="commit, versions, command, machine, fingerprints")
    files: dict[str, str | None] = Field({}, description="beside this one: {proposals}")
    gammas: dict[int, Judgement] | None = Field(
        None, description="of an evaluation: the judgement at every gamma asked for"
    )


def load_result(path: Path) -> Result:
    """A result.json.

    Raises:
        UserError: as `Record.read`; a file of another format has another value in its key `format`.
    """
    absent = "not there; finish the run (start its command again), or make one with `understudy evaluate DRAFT --config CONFIG --out result.json`"
    return Result.read(path, "make it again with `understudy evaluate` or by ending the run", absent)
