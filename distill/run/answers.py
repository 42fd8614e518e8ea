"""The target's responses of a run, and the draft's initial weights, which may be chosen with them."""

import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from data.files import write_json
from data.responses.rendered import texts_of
from data.responses.store import StoredRows
from distill.config.layout import CHECKPOINTS, FIRST_STUDENT, STUDENT_NOTES
from distill.models.load import tokenizer_fingerprint
from distill.models.student import check_saved, make_student, with_adapters
from distill.models.target import Target
from distill.run.prompts import PromptSets
from distill.run.provenance import describe_run
from distill.run.responses import RunStores
from distill.run.run import Run
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule

# Number of responses used to choose channels.
CALIBRATION_TEXTS = 32


class Answers:
    """Responses of a run, made by all ranks together on first use and kept in its folder."""

    def __init__(self, run: Run, target: Target, tokenizer: Any, sets: PromptSets, context: int) -> None:
        """``tokenizer``: the one that renders the run's prompts. ``context``: maximum tokens of prompt and response."""
        self.run, self.target, self.tokenizer, self.sets, self.context = run, target, tokenizer, sets, context

    @functools.cached_property
    def stores(self) -> RunStores:
        return RunStores(self.run, self.target)

    @functools.cached_property
    def training(self) -> StoredRows:
        """Responses to train on."""
        with self.run.progress.timed("respond"):
            return self.stores.training(self.sets.train)

    @functools.cached_property
    def heldout(self) -> dict[Rule, list[HeldoutResponse]]:
        """Frozen text to judge on, by acceptance rule, the configured rule first."""
        with self.run.progress.timed("respond"):
            return self.stores.heldout_by_rule(self.sets.heldout)

    @property
    def domains(self) -> list[str]:
        """Domains of the training prompts, sorted."""
        return sorted(set(texts_of(self.sets.train, "domain").unique().to_pylist()))

    @property
    def chosen_by_text(self) -> bool:
        """Whether the draft's first weights depend on the target's responses."""
        return self.run.config.student.intermediate_size is not None

    def provenance(self) -> Mapping[str, Any]:
        """Origin of a checkpoint: code, machine, target, sampling."""
        config, facts = self.run.config, self.target.facts
        told: dict[str, Any] = describe_run(config.seed) | {
            "target": config.target.path,
            "target_fingerprint": facts.fingerprint,
            "tokenizer_fingerprint": tokenizer_fingerprint(self.target.tokenizer),
            "sampling": self.stores.settings.sampling.as_dict(),
        }
        return told


@dataclass(frozen=True)
class _Texts:
    """The end tokens, then the ids of each prompt; can be iterated repeatedly."""

    ends: Sequence[int]
    sets: PromptSets

    def __iter__(self) -> Iterator[Sequence[int]]:
        return chain([self.ends], (prompt.prompt_ids for prompt in chain(self.sets.train, self.sets.heldout)))


def first_student(answers: Answers, trial: bool = False) -> Any:
    """The draft before training.

    What was measured is written to student.json. The target answers first only if channels are chosen by measurement; in a ``trial``,
    never.

    Raises UserError: the draft, saved and loaded again, is not itself; see also `make_student`.
    """
    run, target, config = answers.run, answers.target, answers.run.config
    if trial and not run.main:
        return None
    wants_weights = config.student.init == "carved" or config.student.embeddings == "target"
    read = target.on_host if config.target.shard else lambda: target.model
    source: Any = read() if wants_weights else target.side
    path, folder = run.folder / STUDENT_NOTES, run.folder / FIRST_STUDENT
    texts: list[list[int]] = [list(answers.sets.heldout[0].prompt_ids) * 2]
    rows = answers.training if answers.chosen_by_text and not trial else None
    if rows is not None:
        # Every n-th row, so that all domains are represented.
        texts = [list(row.input_ids) for row in rows[:: max(1, len(rows) // CALIBRATION_TEXTS)]][:CALIBRATION_TEXTS]

    def made(notes: dict[str, Any]) -> Any:
        student = make_student(
            config.student,
            source,
            target.tokenizer,
            texts,
            seed=config.seed,
            notes=notes,
            texts=_Texts(target.facts.eos_ids, answers.sets),
        )
        if run.main and not (run.folder / CHECKPOINTS).exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a killed start
            try:
                student.save_pretrained(folder)
                check_saved(folder, student)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        return with_adapters(student, config.student.lora)

    notes = dict[str, Any]()
    student = made(notes)
    if run.main and notes and not trial and not path.exists():
        write_json(path, notes)
        run.say(f"student: {path} lists what was measured and chosen")
    return student
