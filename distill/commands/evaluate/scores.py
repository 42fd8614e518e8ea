"""Compare task scores with and without the draft, by a scorer of the user.

A scorer is any function `scorer(prompt, response, reference) -> number from 0 to 1`, named `module:function` or
`path/to/file.py:function`; `exact-match` and `exact-match-number` are built in. `reference` is a text or None: what the
prompt's row has in the source's `reference_column`, or its line of --references FILE, JSON lines of a "prompt" (or "id")
and a "reference". Where an answer is more than a text, its reference is the JSON of it. docs/verdict.md scores a task of lm-eval so.

Shapes: P prompts (the resampling unit), C columns of sums.
"""

import importlib
import importlib.util
import json
import numbers
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source
from data.prompts.split import content_hash
from data.responses.rendered import RenderedPrompt
from distill.config.run import RunConfig
from distill.run.result import Score, ScoreDifference, TaskScores
from distill.run.session import Pair, open_pair
from speculative.decoder.responses import Response
from speculative.drafters.draft import Draft, Drafting
from speculative.drafters.drafter import ModelDrafter
from speculative.errors import UserError
from speculative.explain.losslessness import LEVEL, greedy_equality, sampled_texts
from speculative.measure.effects import too_few
from speculative.measure.intervals import Interval, interval, intervals_of_sums
from speculative.rules.rule import Rule

Scorer = Callable[[str, str, str | None], float]
CONFIDENCE = 0.95
_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Asked:
    """A draft to test with a config's target. samples: responses per prompt; 0 means the default of the test."""

    config: RunConfig
    draft: str
    rule: Rule
    gamma: int
    prompts: int = 32
    samples: int = 0
    drafting: Drafting = "autoregressive"

    def opened(self) -> tuple[Pair, ModelDrafter]:
        """The pair and its drafter. Raises UserError: see `open_pair` and `Draft`."""
        pair = open_pair(self.config, self.draft, self.prompts, self.rule)
        return pair, Draft(pair.draft, self.drafting).drafter()


class PairedScores(NamedTuple):
    """Scores with the draft and without it, and their difference."""

    speculative: Score
    alone: Score
    difference: ScoreDifference


def exact_match(prompt: str, response: str, reference: str | None) -> float:
    """1 if response and reference are the same text, ignoring differences in white space."""
    return float(response.split() == _needed(reference).split())


def exact_match_number(prompt: str, response: str, reference: str | None) -> float:
    """1 if the response's last number equals the reference's: the one after `####` (GSM8K), else its last."""
    _, marked, answer = _needed(reference).rpartition("####")
    wanted = _numbers(answer)[: 1 if marked else None]
    if not wanted:
        raise ValueError("the reference has no number")
    return float(_numbers(response)[-1:] == wanted[-1:])


def _needed(reference: str | None) -> str:
    if reference is None:
        raise ValueError("there is no reference: set reference_column of the source, or give --references FILE")
    return reference


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in _NUMBER.findall(text)]


BUILT_IN: dict[str, Scorer] = {"exact-match": exact_match, "exact-match-number": exact_match_number}


def load_scorer(name: str) -> Scorer:
    """A scorer by name: built in, `module:function` or `file.py:function`.

    Raises UserError: not importable, or no such function.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserError(f"--scorer {name}: give module:function, file.py:function, or {' or '.join(BUILT_IN)}")
    try:
        module = _module_of(place)
    except Exception as error:  # Whatever the user's own code does while it is imported.
        raise UserError(f"--scorer {name}: {place} cannot be imported ({_one_line(error)})") from error
    scorer = getattr(module, function, None)
    if not callable(scorer):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"--scorer {name}: {place} has no function {function!r}; it has {known or 'none'}")
    return scorer


def _module_of(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser()
    if not path.is_file():
        raise FileNotFoundError("no such file")
    spec = importlib.util.spec_from_file_location(f"understudy_scorer_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pickles of a file look their own module up.
    spec.loader.exec_module(module)
    return module


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]


def read_references(sources: Sequence[PromptSource], file: Path | None) -> dict[str, str]:
    """The reference of every prompt that has one, by prompt id and by prompt text.

    From the sources of the held-out prompts, or from a file of JSON lines with "reference" and either "prompt" (the text)
    or "id" (the prompt's id in the stores).

    Raises UserError: the file does not exist or contains another kind of line.
    """
    found: dict[str, str] = {}
    if file is None:
        for source in sources:
            for row in load_source(source):
                if row.reference is not None:
                    found.setdefault(content_hash(row), row.reference)
        return found
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--references {file}: cannot be read ({_one_line(error)})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, reference = row["id"] if "id" in row else row["prompt"], row["reference"]
        except (ValueError, KeyError, TypeError):
            key = reference = None
        if not isinstance(key, str) or not isinstance(reference, str):
            raise UserError(f'{file}:{number}: each line needs a text "reference" and a text "prompt" or "id"')
        found[key] = reference
    return found


def score_texts(
    name: str,
    scorer: Scorer,
    tokenizer: Any,
    prompts: Sequence[RenderedPrompt],
    texts: Sequence[Response],
    references: dict[str, str],
) -> np.ndarray:
    """Scores (P, samples) of responses that are ordered by prompt.

    Raises UserError: the scorer raised, or returned something other than a number from 0 to 1.
    """
    samples = len(texts) // len(prompts)
    scores = np.zeros((len(prompts), samples))
    for index, text in enumerate(texts):
        prompt = prompts[index // samples]
        reference = references.get(prompt.prompt_id, references.get(prompt.text))
        response = tokenizer.decode(text.response_ids, skip_special_tokens=True)
        where = f"on prompt {prompt.prompt_id} ({prompt.text[:40]!r})"
        try:
            value = scorer(prompt.text, response, reference)
        except Exception as error:  # Whatever the user's own code does.
            raise UserError(f"--scorer {name}: raised {_one_line(error)} {where}") from error
        # NaN is in no range.
        if not isinstance(value, numbers.Real | np.bool_) or not 0 <= value <= 1:
            raise UserError(f"--scorer {name}: gave {value!r:.60} {where}; it must give a number from 0 to 1")
        scores[index // samples, index % samples] = value
    return scores


def summarise(speculative_PS: np.ndarray, alone_PS: np.ndarray, confidence: float = CONFIDENCE) -> PairedScores:
    """Mean scores with intervals over prompts, and their difference, paired.

    If all prompts have the same value, the bootstrap has no spread. It is then only known that fewer than
    1 - (1 - confidence)^(1/P) of all prompts have another value, and that a score differs by at most 1. This gives the interval.
    """
    own_P, alone_P = speculative_PS.mean(1), alone_PS.mean(1)
    sums_PC = np.stack((own_P, alone_P, own_P - alone_P, np.ones(len(own_P))), 1)

    def means(sums_C: np.ndarray) -> np.ndarray:
        return sums_C[..., :3] / sums_C[..., 3:]

    values, intervals = means(sums_PC.sum(0)).tolist(), intervals_of_sums(sums_PC, means, confidence)
    unseen = 1.0 - (1.0 - confidence) ** (1.0 / len(own_P))
    for place, (value, lowest) in enumerate(zip(values, (0.0, 0.0, -1.0), strict=True)):
        if np.ptp(sums_PC[:, place]) == 0:
            intervals[place] = (max(lowest, value - unseen), min(1.0, value + unseen))
    own, alone = (Score(score=values[side], ci=intervals[side]) for side in (0, 1))
    return PairedScores(own, alone, ScoreDifference(value=values[2], ci=intervals[2]))


def task_scores(asked: Asked, scorer: str, references: Path | None = None) -> TaskScores:
    """Scores of held-out prompts answered with the draft and by the target alone; `passed` False means exit status 1.

    At temperature 0 the texts are the same, so every score must be the same. Sampled texts differ, and the
    check fails if the `1 - LEVEL` interval of the paired difference excludes 0. With fewer than `fewest_prompts` prompts
    nothing is certain, and the check never fails.

    Raises UserError: see `open_pair`, `load_scorer`, `read_references`, `score_texts`.
    """
    function, data, batch_size = load_scorer(scorer), asked.config.data, asked.config.judge.batch_size
    known = read_references(data.heldout or data.train, references)
    pair, proposing = asked.opened()
    samples, settings = asked.samples or 1, pair.settings.under(asked.rule, asked.gamma)
    if samples > 1 and settings.sampling.greedy:
        raise UserError(f"--samples {samples}: at temperature 0 every response to a prompt is the same; give 1")
    texts = [
        sampled_texts(
            pair.target.model, drafter, pair.keyed, replace(settings, seed=settings.seed + number), samples,
            batch_size=batch_size,
        )
        for number, drafter in ((1, proposing), (2, None))
    ]  # fmt: skip
    speculative_PS, alone_PS = (
        score_texts(scorer, function, pair.target.tokenizer, pair.prompts, side, known) for side in texts
    )
    same = [one.response_ids == other.response_ids for one, other in zip(*texts, strict=True)]
    for index in np.flatnonzero(same):
        place = np.unravel_index(index, alone_PS.shape)
        if speculative_PS[place] != alone_PS[place]:
            prompt = pair.prompts[place[0]].prompt_id
            raise UserError(
                f"--scorer {scorer}: gives the same text two scores on prompt {prompt}; it must be deterministic"
            )
    found = summarise(speculative_PS, alone_PS)
    wide = None
    if not settings.sampling.greedy:
        wide = summarise(speculative_PS, alone_PS, 1 - LEVEL).difference.ci
        passed, sentence = _sampled_answer(found.difference, wide, *alone_PS.shape)
    elif all(same):
        # No estimate: the texts of other prompts would be the same too.
        found = found._replace(difference=ScoreDifference(value=0.0, ci=(0.0, 0.0)))
        passed = True
        sentence = f"The score is the same, {found.alone.score:.3f}, because all {len(same)} texts are the same, token by token."
    else:
        greedy = greedy_equality(pair.target.model, proposing, pair.keyed, settings, batch_size=batch_size)
        passed = not greedy.differences
        sentence = (
            f"{sum(same)} of {len(same)} texts are the same, the others differ after a near-tie of the target. The scores are "
            f"{found.speculative.score:.3f} and {found.alone.score:.3f}."
            if passed
            else f"NOT the same text: {greedy.differences[0]}"
        )
    return TaskScores(
        scorer=scorer, rule=asked.rule, gamma=asked.gamma, prompts=len(pair.prompts), samples=samples,
        with_reference=sum(one.prompt_id in known or one.text in known for one in pair.prompts), same_texts=sum(same),
        **found._asdict(), difference_ci_wide=wide, passed=passed, sentence=sentence,
    )  # fmt: skip


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
        words = (
            f"No difference found: {seen}. A difference outside this 95 % interval is ruled out, a smaller one is not."
        )
    else:
        words = (
            f"Not clear: {seen} excludes 0, but the {1 - LEVEL:.1%} interval does not. One correct check in twenty does "
            "this; repeat it with another seed or more prompts."
        )
    return passed, words


def score_lines(found: TaskScores) -> list[str]:
    rows = (("with the draft", found.speculative), ("target alone", found.alone))
    return [
        f"{found.scorer} (mean over {found.prompts} prompts, {found.with_reference} with a reference; [95 % interval])",
        *(f"{label:<15} {one.score:.3f} {interval(one.ci)}" for label, one in rows),
        found.sentence,
    ]
