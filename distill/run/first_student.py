"""The draft before training, whose layers and channels may be chosen with the target's responses."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

from data.files import write_json
from distill.config.layout import CHECKPOINTS, FIRST_STUDENT, STUDENT_NOTES
from distill.models.student import check_saved, make_student, with_adapters
from distill.run.prompts import PromptSets
from distill.run.responses import RunData
from speculative.progress import phase

# Number of responses used to choose channels.
CALIBRATION_TEXTS = 32


@dataclass(frozen=True)
class _Texts:
    """The end tokens, then the ids of each prompt; can be iterated repeatedly."""

    ends: Sequence[int]
    prompts: PromptSets

    def __iter__(self) -> Iterator[Sequence[int]]:
        return chain([self.ends], (prompt.prompt_ids for prompt in chain(self.prompts.train, self.prompts.heldout)))


def first_student(data: RunData, trial: bool = False) -> Any:
    """The draft before training.

    What was measured is written to student.json. The target answers first only if channels are chosen by measurement; in a ``trial``,
    never.

    Raises UserError: the draft, saved and loaded again, is not itself; see also `make_student`.
    """
    run, target, config = data.run, data.target, data.run.config
    if trial and not run.main:
        return None
    wants_weights = config.student.init == "carved" or config.student.embeddings == "target"
    path, folder = run.folder / STUDENT_NOTES, run.folder / FIRST_STUDENT
    texts: list[list[int]] = [list(data.prompts.heldout[0].prompt_ids) * 2]
    rows = data.training if data.chosen_by_text and not trial else None
    if rows is not None:
        # Every n-th row, so that all domains are represented.
        texts = [list(row.input_ids) for row in rows[:: max(1, len(rows) // CALIBRATION_TEXTS)]][:CALIBRATION_TEXTS]

    def made(source: Any, notes: dict[str, Any]) -> Any:
        student = make_student(
            config.student,
            source,
            target.tokenizer,
            texts,
            seed=config.seed,
            notes=notes,
            texts=_Texts(target.facts.eos_ids, data.prompts),
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
    weights = target.loaded(on_host=config.target.shard) if wants_weights else nullcontext(target.side)
    with phase("making the draft"), weights as source:
        student = made(source, notes)
    if run.main and notes and not trial and not path.exists():
        write_json(path, notes)
        run.say(f"student: {path} lists what was measured and chosen")
    return student
