"""What a verdict rests on: drafts judged, scored on the same frozen text, and timed on the same prompts of one target."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distill.models.target import Target
from distill.run.verdict_record import Judgement
from distill.verdict.contest import Contest, hold
from distill.verdict.field import Candidate, Field, cpu_threads, score_all, ways_of
from distill.verdict.judge import judge_by_replay
from distill.verdict.load import Loads, held_at_loads
from distill.verdict.question import Question
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import Response
from speculative.evaluate import judge
from speculative.measure.cost import StepCosts
from speculative.measure.measured import TOGETHER
from speculative.measure.token_scores import TokenScores


@dataclass(frozen=True, kw_only=True)
class Evidence(Field):
    """judged: by candidate, live or by replay alone. responses: of the live run of the last candidate. contest: at one request;
    loads: beyond. Without the target's weights there is none of these, and no costs.
    """

    question: Question
    judged: Mapping[str, Judgement]
    responses: Sequence[Response] = ()
    contest: Contest | None = None
    loads: Loads = field(default_factory=Loads)

    @property
    def best(self) -> Candidate:
        """The draft in question."""
        return self.candidates[-1]

    @property
    def best_costs(self) -> StepCosts | None:
        """Of its steps; None where nothing was timed."""
        return self.costs.get(self.best.name)

    @property
    def contests(self) -> list[Contest]:
        """By concurrency, 1 first."""
        return [] if self.contest is None else [self.contest, *self.loads.contests]

    def own_scores(self, name: str) -> list[TokenScores]:
        """A candidate's scores on the text of the run's own rule."""
        return self.scores[self.question.rule][name]


def gather(
    question: Question,
    target: Target,
    field: Field,
    *,
    known: Mapping[str, Judgement] | None = None,
    log: Path | None = None,
) -> Evidence:
    """Judges live and times everybody of a `line_up`, at one request and at each of judge.load.

    known: live records of candidates that need not be decoded again; the last one always is, so that its numbers, its
    responses and the proposals in ``log`` are of one and the same run.
    """
    own, candidates = field.scores[question.rule], field.candidates
    judged = dict(known or {})
    responses: list[Response] = []
    for one in candidates:
        if one.name in judged and one is not candidates[-1]:
            continue
        writes = ProposalLog(log) if log is not None and one is candidates[-1] else contextlib.nullcontext()
        with writes as opened:
            record, responses = judge(
                target.model, one.draft, question.frozen, question.settings, batch_size=question.judge.batch_size, log=opened,
                scores=own[one.name],
            )  # fmt: skip
        judged[one.name] = Judgement.model_validate(record | {"step": one.step, "live": True})
    ways, best = ways_of(question, target.model, field), candidates[-1].name
    picked = [best, TOGETHER, *(one.name for one in field.others), *question.judge.ways]
    with cpu_threads(question.judge.speed_threads):
        contest = hold(question, target.model, ways, best, picked)
        loads = held_at_loads(question, target.model, field, contest)
    return Evidence(**vars(field), question=question, judged=judged, responses=responses, contest=contest, loads=loads)


def gather_by_replay(question: Question, candidates: Sequence[Candidate], known: Mapping[str, Judgement]) -> Evidence:
    """Evidence without the target's weights: nothing is decoded or timed. known: the records that checkpoints have."""
    scores, judged = score_all(question, candidates), dict(known)
    for one in candidates:
        if one.name not in judged:
            own = scores[question.rule][one.name]
            judged[one.name] = judge_by_replay(one.draft, question.frozen, question.settings, own)
    return Evidence(candidates=tuple(candidates), scores=scores, question=question, judged=judged)
