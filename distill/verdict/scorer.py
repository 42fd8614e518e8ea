"""Score responses by a function of the user.

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
import os
import re
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.responses.rendered import RenderedPrompt
from distill.run.result import Score, ScoreDifference
from speculative.decoder.responses import Response
from speculative.errors import UserError
from speculative.measure.intervals import intervals_of_sums

Scorer = Callable[[str, str, str | None], float]
CONFIDENCE = 0.95
_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")


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


def load_scorer(name: str, option: str = "--scorer") -> Scorer:
    """A scorer by name: built in, `module:function` or `file.py:function`.

    Raises UserError: not importable, or no such function.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserError(f"{option} {name}: give module:function, file.py:function, or {' or '.join(BUILT_IN)}")
    try:
        module = _module_of(place)
    except Exception as error:  # Whatever the user's own code does while it is imported.
        raise UserError(f"{option} {name}: {place} cannot be imported ({_one_line(error)})") from error
    scorer = getattr(module, function, None)
    if not callable(scorer):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"{option} {name}: {place} has no function {function!r}; it has {known or 'none'}")
    return scorer


def _module_of(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(os.path.expanduser(place))
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


def read_references(file: Path) -> dict[str, str]:
    """References by prompt text or id, from JSON lines with "reference" and either "prompt" (the text) or "id" (its id in the stores).

    Raises UserError: the file does not exist or contains another kind of line.
    """
    references: dict[str, str] = {}
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
        references[key] = reference
    return references


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
            raise UserError(f"scorer {name}: raised {_one_line(error)} {where}") from error
        # NaN is in no range.
        if not isinstance(value, numbers.Real | np.bool_) or not 0 <= value <= 1:
            raise UserError(f"scorer {name}: gave {value!r:.60} {where}; it must give a number from 0 to 1")
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
