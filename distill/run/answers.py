"""What the target says to a run's prompts, and the draft's first weights, some of which are chosen by it."""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from data.files import write_json
from data.responses.rendered import RenderedPrompt, texts_of
from data.responses.store import StoredRows
from distill.config.layout import STUDENT_NOTES
from distill.models.load import tokenizer_fingerprint
from distill.models.student import carved_by_measurement, make_student
from distill.models.target import Target
from distill.run.others import OtherTarget, open_others, require_unchanged
from distill.run.prompts import PromptSets
from distill.run.provenance import describe_run
from distill.run.responses import RunStores
from distill.run.run import Run
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule

# Responses that layers and channels are chosen by.
CALIBRATION_TEXTS = 32


class Answers:
    """Made when they are first asked for, by all ranks together, and kept in the run's folder."""

    def __init__(self, run: Run, target: Target, tokenizer: Any, sets: PromptSets, context: int) -> None:
        """``tokenizer``: as the run renders its prompts. ``context``: tokens of prompt and response."""
        self.run, self.target, self.tokenizer, self.sets, self.context = run, target, tokenizer, sets, context
        self.synthetic = ""  # one line of the prompts that were made, once they are

    @functools.cached_property
    def stores(self) -> RunStores:
        """Of all responses."""
        return RunStores(self.run, self.target)

    @functools.cached_property
    def prompts(self) -> Sequence[RenderedPrompt]:
        """Training prompts, the synthetic ones behind the user's."""
        with self.run.progress.timed("respond"):
            prompts, self.synthetic = self.stores.with_synthetic(self.sets.train, self.tokenizer, self.context)
            return prompts

    @functools.cached_property
    def training(self) -> StoredRows:
        """Responses to train on."""
        prompts = self.prompts
        with self.run.progress.timed("respond"):
            return self.stores.training(prompts)

    @functools.cached_property
    def heldout(self) -> dict[Rule, list[HeldoutResponse]]:
        """Frozen text to judge on, by engine rule, the configured one first."""
        with self.run.progress.timed("respond"):
            return self.stores.heldout_by_rule(self.sets.heldout)

    @functools.cached_property
    def others(self) -> list[OtherTarget]:
        """What other targets have said before."""
        return open_others(self.run, self.target, self.prompts, self.sets.heldout, self.context)

    @property
    def domains(self) -> list[str]:
        """Of the training prompts, sorted."""
        return sorted(set(texts_of(self.sets.train, "domain").unique().to_pylist()))

    def provenance(self) -> Mapping[str, Any]:
        """Where a checkpoint comes from: code, machine, target, sampling, other targets.

        Raises:
            UserError: the run's last checkpoint learned from other answers of the other targets.
        """
        config, facts = self.run.config, self.target.facts
        told: dict[str, Any] = describe_run(config.seed) | {
            "target": config.target.path, "target_fingerprint": facts.fingerprint,
            "tokenizer_fingerprint": tokenizer_fingerprint(self.target.tokenizer),
            "sampling": self.stores.settings.sampling.as_dict(),
        }  # fmt: skip
        if self.synthetic:
            told["synthetic_prompts"] = self.synthetic
        if self.others:
            told["other_targets"] = [one.told() for one in self.others]
            if self.run.main:
                require_unchanged(self.run, told["other_targets"])
        return told


@dataclass(frozen=True)
class _Texts:
    """Token ids of the ends of responses and of prompts, one by one, as often as they are asked for."""

    ends: Sequence[int]
    sets: PromptSets

    def __iter__(self) -> Iterator[Sequence[int]]:
        prompts = chain(self.sets.train, self.sets.heldout)
        return chain([self.ends], (prompt.prompt_ids for prompt in prompts))


def first_student(answers: Answers) -> Any:
    """The draft before training. What was chosen for it is kept in student.json: a resumed run and every rank have the same.

    The target answers first where layers or channels are chosen by what it says; else nothing is asked.
    """
    run, target, config = answers.run, answers.target, answers.run.config
    wants_weights = config.student.init == "carved" or config.student.embeddings == "target"
    read = target.host_model if config.target.shard else lambda: target.model
    source: Any = read() if wants_weights else target.side
    path = run.folder / STUDENT_NOTES
    texts: list[list[int]] = []
    if carved_by_measurement(config.student):
        rows = answers.training  # every n-th, so that all domains have a say
        texts = [list(row.input_ids) for row in rows[:: max(1, len(rows) // CALIBRATION_TEXTS)]][:CALIBRATION_TEXTS]

    def made(notes: dict[str, Any]) -> Any:
        return make_student(
            config.student, source, target.tokenizer, texts or None, seed=config.seed,
            temperature=config.serving.temperature, notes=notes, texts=_Texts(target.facts.eos_ids, answers.sets),
        )  # fmt: skip

    student, notes = None, dict[str, Any]()
    if run.main:
        if path.exists():
            notes = {
                name: value for name, value in json.loads(path.read_text(encoding="utf-8")).items() if name == "layers"
            }
        student = made(notes)
        if notes and not path.exists():
            write_json(path, notes)
            run.say(f"student: {path} says what was measured and chosen")
    notes = run.seen(lambda: {name: value for name, value in notes.items() if name == "layers"})
    return student if student is not None else made(notes)
