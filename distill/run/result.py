"""The shape of result.json: everything a report, a comparison or a drift test reads about a judged draft."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import Verdict
from speculative.explain.disagreements import Disagreement
from speculative.explain.slices import SliceTable
from speculative.measure.intervals import Interval
from speculative.measure.metrics import Curve
from speculative.measure.record import Record, Text

RESULT_FORMAT: Literal[2] = 2
Writer = Literal["draft", "target", "bonus"]


class RuleCurves(Record):
    """The curves of every draft under one rule."""

    rule: str = Field(description="engine rule")
    ways: dict[str, Curve] = Field(description="curve by draft")
    note: Text | None = Field(None, description="how the text was generated, and whose step times are used")


class Curves(Record):
    """Alpha, tau and speed over gamma."""

    gammas: list[int] = Field(description="0 to 32")
    rules: list[RuleCurves] = Field(description="one entry per rule that can be replayed, the run's own rule first")
    refused: dict[str, Text] = Field({}, description="the other rules, and why they cannot be replayed")

    def taus_at(self, gamma: int, way: str) -> dict[str, float]:
        """tau of a draft by rule at a gamma; rules without a replay are left out."""
        of_draft = {entry.rule: entry.ways[way] for entry in self.rules if way in entry.ways}
        return {rule: curve.tau[curve.gammas.index(gamma)] for rule, curve in of_draft.items() if gamma in curve.gammas}


class Losslessness(Record):
    """`understudy evaluate --losslessness` of this draft. Further keys contain the single tests."""

    draft: Text = Field(description="the draft, as given on the command line")
    rule: str | None = Field(None, description="engine rule")
    gamma: int | None = Field(None, description="drafted tokens per block")
    passed: bool = Field(description="whether every test passed")
    sentence: Text = Field(description="the result in words")
    greedy: dict[str, Any] | None = Field(None, description="greedy text with and without the draft, token by token")
    sampled: dict[str, Any] | None = Field(None, description="sampled text against the target's probabilities")


class Score(Record):
    """A mean score."""

    score: float = Field(description="from 0 to 1")
    ci: Interval = Field(description="its 95 % interval")


class ScoreDifference(Record):
    """Score with the draft minus score without."""

    value: float = Field(description="difference of the mean scores")
    ci: Interval = Field(description="its 95 % interval, paired by prompt")


class TaskScores(Record):
    """`understudy evaluate --scorer` of this draft."""

    scorer: Text = Field(description="the scorer, as given on the command line")
    rule: str | None = Field(None, description="engine rule")
    gamma: int | None = Field(None, description="drafted tokens per block")
    prompts: int = Field(description="held-out prompts scored")
    samples: int = Field(1, description="responses per prompt")
    speculative: Score = Field(description="score with the draft")
    alone: Score = Field(description="score of the target alone")
    with_reference: int = Field(0, description="prompts that have a reference")
    same_texts: int = Field(0, description="responses that are identical with and without the draft")
    difference_ci_wide: Interval | None = Field(None, description="interval behind `passed`; null at temperature 0")
    difference: ScoreDifference = Field(description="score with the draft minus score without")
    passed: bool = Field(description="whether no certain difference was found")
    sentence: Text = Field(description="the result in words")


class TokenSeen(Record):
    """A token and both models' most probable tokens at its position."""

    text: Text = Field(description="its text")
    id: int = Field(description="token id")
    by: Writer = Field(description="`draft`: accepted; `target`: correction; `bonus`: after a fully accepted block")
    block: int = Field(description="number of its block")
    target_prob: float | None = Field(None, description="target's probability of the token")
    draft_prob: float | None = Field(None, description="draft's probability of the token")
    target_top: list[tuple[Text, float]] = Field(description="the target's five most probable: [text, probability]")
    draft_top: list[tuple[Text, float]] = Field(description="the draft's five most probable")


class ResponseSeen(Record):
    """A response of the live run, token by token."""

    key: Text = Field(description="key of the prompt")
    domain: Text = Field(description="domain of the prompt")
    prompt: Text = Field(description="last part of the prompt")
    tokens: list[TokenSeen] = Field(description="tokens of the response")
    tokens_count: int = Field(description="number of tokens")
    blocks: int = Field(description="target calls")
    drafted: int = Field(description="drafted tokens")
    accepted: int = Field(description="accepted drafted tokens")


class TokenView(Record):
    """Some responses of the logged live run."""

    way: str = Field(description="the draft that was used")
    rule: str = Field(description="engine rule")
    gamma: int = Field(description="drafted tokens per block")
    responses: list[ResponseSeen] = Field(description="responses, alternating between domains")


class ServeCommand(Record):
    """An engine and the command that starts it with this pair."""

    engine: Text = Field(description="name of the engine")
    ok: bool = Field(description="whether the engine can run the pair")
    language: str = Field(description="language of the command")
    command: Text = Field(description="command or code that starts the engine")
    note: Text | None = Field(None, description="acceptance rule of the engine")


class Result(Record):
    """result.json. Sections that do not apply are null or empty."""

    FORMAT: ClassVar[int | None] = RESULT_FORMAT
    REMEDY: ClassVar[str] = "make it again: finish the run, or use `understudy evaluate`"
    ABSENT: ClassVar[str] = (
        "not there: finish the run (start its command again), or make one with `understudy evaluate --out result.json`"
    )
    format: Literal[2] = Field(description="format of this file")
    version: str = Field(description="version of understudy that wrote it")
    kind: str = Field(description="`run` or `evaluation`")
    name: Text = Field(description="name of the run, or path of the draft")
    made: str | None = Field(None, description="time of writing, UTC")
    verdict: Verdict = Field(description="the contents of verdict.json")
    curves: Curves | None = Field(None, description="alpha, tau and speed over gamma, by replay")
    slices: list[SliceTable] = Field(
        [], description="acceptance on parts of the held-out responses, one table per dimension"
    )
    losslessness: Losslessness | None = Field(None, description="whether text is the target's own; null: not tested")
    scores: list[TaskScores] = Field([], description="task scores with and without the draft, one entry per scorer")
    disagreements: list[Disagreement] = Field([], description="the most expensive disagreements, worst first")
    trained_on: list[Text] | None = Field(None, description="domains of the training prompts; null: not trained")
    timed_prompts: dict[str, dict[str, float]] = Field(
        {}, description="tokens/s by prompt and way; a way that was certainly slower has fewer prompts"
    )
    token_view: TokenView | None = Field(None, description="a few responses token by token")
    readback: ReadbackRecord | None = Field(
        None,
        description="measured in an engine; the report reads it from readback.json (`understudy readback`)",
    )
    serve: list[ServeCommand] = Field([], description="command for each engine")
    config: Text = Field("", description="resolved config, YAML")
    provenance: dict[str, Any] = Field({}, description="commit, versions, command, machine, fingerprints")
    files: dict[str, str | None] = Field({}, description="other files in the same folder: {proposals}")
