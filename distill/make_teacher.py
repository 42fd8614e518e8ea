"""Who speaks for the target while the draft learns, as the config asks for it."""

from collections.abc import Sequence

from accelerate import Accelerator

from data.collate import Example
from distill.capture import CapturingTeacher, StoredTeacher
from distill.config import RunConfig
from distill.respond_command import open_signal_store
from distill.served_target import ServedTarget
from distill.teacher import Teacher, TeacherSource


def make_teacher(
    config: RunConfig, target: ServedTarget, examples: Sequence[Example], accelerator: Accelerator
) -> TeacherSource | None:
    """The target itself, the store of what it said, or the target asked once for each sequence; None when no objective needs one.

    Raises:
        UserError: a store that is missing, incomplete, damaged or of something else.
    """
    if config.objective_names() == {"ce"}:
        return None
    signal = config.signal
    if signal.source == "online":
        return Teacher(target.model)
    store = open_signal_store(config, examples, target.facts, accelerator, repair=signal.source == "capture")
    if signal.source == "store":
        store.verify(show=accelerator.is_main_process)
        return StoredTeacher(store)
    return CapturingTeacher(
        Teacher(target.model), store, signal, config.loss.temperature, config.seed, config.loss.chunk_tokens
    )
