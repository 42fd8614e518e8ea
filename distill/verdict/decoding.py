"""Decode the prompts of a verdict with all ranks of a run: the main process asks, the others take part until it has finished.

Prompts are dealt in groups that do not depend on the number of ranks, because a batch of other rows rounds differently.
"""

import contextlib
import functools
import hashlib
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedModel

from distill.config.layout import JUDGING
from distill.models.draft import served_draft
from distill.models.load import model_fingerprint
from distill.models.target import Target
from distill.run.run import Run
from speculative.decode import decode
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.draft import Draft, Drafting
from speculative.progress import phase

# Prompts that one rank decodes at once, a small number, so that ranks can share them; of a verdict more if there would be more groups
# than GROUPS, which take one rank longer.
DECODED_TOGETHER, GROUPS = 8, 8


@dataclass(frozen=True)
class NamedDraft:
    """A draft as it would be served, under the name of its way."""

    name: str
    path: str
    step: int | None
    draft: Draft


@dataclass(frozen=True)
class Job:
    """Groups of prompts to decode with a draft at a path, or with the target alone. name: of the parts, which no other job has."""

    name: str
    draft: tuple[str, Drafting] | None
    groups: Sequence[Sequence[Prompt]]
    settings: DecodeSettings
    batch_size: int
    logs: bool


class Decoding:
    """Decodes in this process, or with all ranks of a run. Groups that are done stay in the run's `JUDGING` until `end`."""

    def __init__(self, run: Run | None = None, target: Target | None = None) -> None:
        """``target``: of the run, for the ranks that take part."""
        self.run, self.target = run, target

    def __call__(
        self,
        target: PreTrainedModel,
        proposer: NamedDraft | None,
        prompts: Sequence[Prompt],
        settings: DecodeSettings,
        batch_size: int,
        log: Path | None = None,
    ) -> list[Response]:
        """The responses with a draft, or of the target alone, in the order of the prompts. Only the main process calls it.

        log: for every drafted token. Raises UserError for everything that `decode` refuses.
        """
        draft = proposer.draft if proposer is not None else None
        if self.run is None:
            return _decoded(target, draft, prompts, settings, batch_size, log)
        order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index][1]), prompts[index][0]))
        sorted_prompts = [prompts[index] for index in order]
        size = min(batch_size, max(DECODED_TOGETHER, math.ceil(len(sorted_prompts) / GROUPS)))
        named = (
            size,
            log is not None,
            draft and (model_fingerprint(draft.model), draft.drafting),
            sorted_prompts,
            settings,
        )
        job = Job(
            f"verdict-{hashlib.sha256(repr(named).encode()).hexdigest()[:12]}",
            (proposer.path, proposer.draft.drafting) if proposer is not None else None,
            [sorted_prompts[place : place + size] for place in range(0, len(sorted_prompts), size)],
            settings,
            size,
            log is not None,
        )
        responses = self._dealt(self.run, self.run.seen(lambda: job), lambda: (target, draft))
        if log is not None:
            with ProposalLog(log) as whole:
                for index in range(len(job.groups)):
                    part = _log_of(self.run, job, index)
                    self.run.await_seen(part.exists, part)
                    whole.add_file(part)
        return [response for _, response in sorted(zip(order, responses, strict=True), key=lambda pair: pair[0])]

    def take_part(self) -> None:
        """Every other rank: decode a share of what the main process asks for, until its `end`."""
        assert self.run is not None
        assert self.target is not None
        opened = functools.lru_cache(1)(self._open)  # jobs come draft by draft
        with self.target.single_load():
            while (job := self.run.seen(lambda: None)) is not None:
                self._dealt(self.run, job, functools.partial(opened, job.draft))

    def end(self) -> None:
        """The main process: nothing more will be asked for, and what was kept of it is deleted."""
        if self.run is not None:
            self.run.seen(lambda: None)
            shutil.rmtree(self.run.folder / JUDGING, ignore_errors=True)

    def _open(self, draft: tuple[str, Drafting] | None) -> tuple[PreTrainedModel, Draft | None]:
        assert self.run is not None
        assert self.target is not None
        with self.target.loaded() as target:  # stays in the block of `take_part`
            if draft is None:
                return target, None
            path, drafting = draft
            if self.run.folder in Path(path).parents:
                self.run.await_seen(Path(path).exists, Path(path))
            return target, Draft(served_draft(path, self.target), drafting)

    @staticmethod
    def _dealt(run: Run, job: Job, pair: Callable[[], tuple[PreTrainedModel, Draft | None]]) -> list[Response]:
        def work(piece: tuple[int, Sequence[Prompt]]) -> list[dict[str, object]]:
            index, group = piece
            target, draft = pair()
            log = _log_of(run, job, index) if job.logs else None
            return [asdict(response) for response in _decoded(target, draft, group, job.settings, job.batch_size, log)]

        # Where ranks share a target, only the main process has memory for all of it.
        alone = run.config.target.shard
        found = run.dealt(run.folder / JUDGING, job.name, list(enumerate(job.groups)), work, alone)
        return [Response(**response) for part in found for response in part]


def _decoded(
    target: PreTrainedModel,
    draft: Draft | None,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    batch_size: int,
    log: Path | None,
) -> list[Response]:
    with contextlib.nullcontext() if log is None else ProposalLog(log) as opened:
        drafter = draft.drafter() if draft is not None else None
        with phase("decoding", len(prompts)) as shown:
            return decode(target, drafter, prompts, settings, batch_size=batch_size, log=opened, shown=shown)[0]


def _log_of(run: Run, job: Job, index: int) -> Path:
    return run.folder / JUDGING / f"{job.name}-{index:04d}.parquet"
