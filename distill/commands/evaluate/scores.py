"""Compare task scores with and without the draft, by a scorer of the user (`distill.verdict.scorer`)."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from distill.config.run import RunConfig
from distill.run.result import ScoreDifference, TaskScores
from distill.run.session import open_pair
from distill.verdict.scorer import load_scorer, read_references, score_texts, summarise
from speculative.drafters.draft import drafts_of
from speculative.errors import UserError
from speculative.explain.losslessness import LEVEL, greedy_equality, sampled_texts
from speculative.measure.effects import too_few
from speculative.measure.intervals import Interval, interval
from speculative.rules.rule import Rule


@dataclass(frozen=True)
class Asked:
    """A draft to test with a config's target. samples: responses per prompt; 0 means the default of the test."""

    config: RunConfig
    draft: str
    rule: Rule
    gamma: int
    prompts: int = 32
    samples: int = 0


def task_scores(request: Asked, scorer: str, references: Path | None = None) -> TaskScores:
    """Scores of held-out prompts answered with the draft and by the target alone; `passed` False means exit status 1.

    At temperature 0 the texts are the same, so every score must be the same. Sampled texts differ, and the
    check fails if the `1 - LEVEL` interval of the paired difference excludes 0. With fewer than `fewest_prompts` prompts
    nothing is certain, and the check never fails.

    Raises UserError: see `open_pair`, `load_scorer`, `read_references`, `score_texts`.
    """
    function, batch_size = load_scorer(scorer), request.config.judge.batch_size
    answers = None if references is None else read_references(references)
    with open_pair(request.config, request.draft, request.prompts, request.rule) as pair:
        proposing = drafts_of(pair.draft)[-1].drafter()
        if answers is None:
            answers = {item.prompt_id: item.reference for item in pair.prompts if item.reference is not None}
        samples, settings = request.samples or 1, pair.settings.under(request.rule, request.gamma)
        if samples > 1 and settings.sampling.greedy:
            raise UserError(f"{samples} samples: at temperature 0 every response to a prompt is the same; give 1")
        texts = [
            sampled_texts(
                pair.model,
                drafter,
                pair.keyed,
                replace(settings, seed=settings.seed + number),
                samples,
                batch_size=batch_size,
            )
            for number, drafter in ((1, proposing), (2, None))
        ]
        speculative_PS, alone_PS = (
            score_texts(scorer, function, pair.target.tokenizer, pair.prompts, side, answers) for side in texts
        )
        same = [item.response_ids == other.response_ids for item, other in zip(*texts, strict=True)]
        for index in np.flatnonzero(same):
            place = np.unravel_index(index, alone_PS.shape)
            if speculative_PS[place] != alone_PS[place]:
                prompt = pair.prompts[place[0]].prompt_id
                raise UserError(
                    f"--scorer {scorer}: gives one text two scores on prompt {prompt}; make it deterministic"
                )
        summary = summarise(speculative_PS, alone_PS)
        wide = None
        if not settings.sampling.greedy:
            wide = summarise(speculative_PS, alone_PS, 1 - LEVEL).difference.ci
            passed, sentence = _sampled_answer(summary.difference, wide, *alone_PS.shape)
        elif all(same):
            # No estimate: the texts of other prompts would be the same too.
            summary = summary._replace(difference=ScoreDifference(value=0.0, ci=(0.0, 0.0)))
            passed = True
            sentence = f"The score is the same, {summary.alone.score:.3f}, because all {len(same)} texts are the same, token by token."
        else:
            greedy = greedy_equality(pair.model, proposing, pair.keyed, settings, batch_size=batch_size)
            passed = not greedy.differences
            sentence = (
                f"{sum(same)} of {len(same)} texts are the same, the others differ after a near-tie of the target. The scores are "
                f"{summary.speculative.score:.3f} and {summary.alone.score:.3f}."
                if passed
                else f"NOT the same text: {greedy.differences[0]}"
            )
        return TaskScores(
            scorer=scorer,
            rule=request.rule.name,
            gamma=request.gamma,
            prompts=len(pair.prompts),
            samples=samples,
            with_reference=sum(item.prompt_id in answers or item.text in answers for item in pair.prompts),
            same_texts=sum(same),
            **summary._asdict(),
            difference_ci_wide=wide,
            passed=passed,
            sentence=sentence,
        )


def _sampled_answer(difference: ScoreDifference, wide: Interval, prompts: int, samples: int) -> tuple[bool, str]:
    value, (low, high) = difference.value, difference.ci
    few = too_few(prompts, 1 - LEVEL)
    passed = few is not None or wide[0] <= 0 <= wide[1]
    seen = f"{value:+.3f} [{low:+.3f}, {high:+.3f}] over {prompts} prompts x {samples}"
    if few is not None:
        words = f"Not certain: {seen}; {few}."
    elif not passed:
        words = f"The scores DIFFER: {seen}. The {1 - LEVEL:.1%} interval excludes 0 too."
    elif low <= 0 <= high:
        words = f"No difference found: {seen}. One outside this 95 % interval is ruled out, a smaller one is not."
    else:
        words = (
            f"Not clear: {seen} excludes 0, but the {1 - LEVEL:.1%} interval does not. One correct check in twenty does "
            "this; repeat it with another seed or more prompts."
        )
    return passed, words


def score_lines(scores: TaskScores) -> list[str]:
    rows = (("with the draft", scores.speculative), ("target alone", scores.alone))
    return [
        f"{scores.scorer} (mean over {scores.prompts} prompts, {scores.with_reference} with a reference; [95 % interval])",
        *(f"{label:<15} {one.score:.3f} {interval(one.ci)}" for label, one in rows),
        scores.sentence,
    ]
