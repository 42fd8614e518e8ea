"""Two ranks as programs: when one fails both are gone at once, and why is the last thing on the screen."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import rank_statuses, run_ranks
from tiny_training import ScriptedJudge, examples_of, make_loop, run_config
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from distill import train
from distill.config.load import dump_config
from distill.config.run import RunConfig
from distill.training.loop import Loop
from speculative.errors import UserError


class RefusingJudge(ScriptedJudge):
    """The main process finds while judging that it cannot; the others wait for its record."""

    def __call__(self, step: int, module: Any) -> dict[str, Any]:
        if step and module is not None:
            raise UserError("the judge says no")
        torch.distributed.barrier()
        return super().__call__(step, module)


def _out_of_memory(loop: Loop) -> None:
    step = loop.step

    def failing(window: Any) -> Any:
        if loop.progress.step == 1 and not loop.accelerator.is_main_process:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(window)

    loop.step = failing  # type: ignore[method-assign]


def _full_disk(loop: Loop) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    if loop.accelerator.is_main_process:
        loop.tokenizer.save_pretrained = fail


def _mistake_of_ours(loop: Loop) -> None:
    if not loop.accelerator.is_main_process:
        loop.micro_batches = lambda step: [][step]  # type: ignore[method-assign]


def _refusing_judge(loop: Loop) -> None:
    loop.validator = RefusingJudge()


def _rank(rank: int, folder: Path, spoil: Callable[[Loop], None]) -> None:
    """`distill.train` on a tiny loop. As under NCCL, a group cannot be destroyed while another rank waits in a collective."""
    screen = os.open(folder / f"screen{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(screen, 2)
    sys.stderr = os.fdopen(2, "w")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}.json")

    def distil(config: RunConfig, accelerator: Any) -> None:
        loop = make_loop(config, accelerator=accelerator, examples=examples_of([9, 12, 7, 15]))
        spoil(loop)
        loop.fit()

    train.distil = distil
    torch.distributed.destroy_process_group = lambda *_: time.sleep(60)
    sys.exit(train.main([str(folder / "run.yaml")]))


def _spike_or_not(rank: int, folder: Path) -> None:
    """A gradient norm around ten times the median, which the two ranks do not round alike."""
    loop = make_loop(run_config(folder), examples=examples_of([9, 12, 7, 15]))
    for _ in range(16):
        loop.spikes.is_spike(0.5)
    loop.accelerator.clip_grad_norm_ = lambda *_: torch.tensor(5.5 if rank else 4.9)  # type: ignore[method-assign]
    result = loop.step(loop.micro_batches(0))
    torch.save((result.skipped, result.grad_norm), folder / f"rank{rank}.pt")


def test_ranks_skip_an_update_together(tmp_path: Path) -> None:
    run_ranks(_spike_or_not, tmp_path)
    one, other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert one == other
    assert one == (True, pytest.approx(5.2))


@pytest.mark.parametrize(
    ("spoil", "culprit", "status", "last"),
    [
        (_out_of_memory, 1, 2, "understudy: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB); lower "),
        (_refusing_judge, 0, 2, "understudy: the judge says no"),
        (_full_disk, 0, 2, "cannot be written ([Errno 28] No space left on device); there is no earlier checkpoint"),
        (_mistake_of_ours, 1, 1, "IndexError: list index out of range"),
    ],
)
def test_one_rank_that_fails_ends_all_at_once_and_says_why(
    tmp_path: Path, spoil: Callable[[Loop], None], culprit: int, status: int, last: str
) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(run_config(tmp_path)), encoding="utf-8")
    statuses = rank_statuses(_rank, tmp_path, spoil, limit=15)
    assert statuses[culprit] == status
    assert statuses[1 - culprit] == 2
    screen = (tmp_path / f"screen{culprit}").read_text(encoding="utf-8")
    assert last in screen.splitlines()[-1]
    assert ("Traceback" in screen) == (status == 1)
    # What torchrun prints when everything is over: the line of the rank that failed first, not its neighbour's.
    failures = {
        rank: ProcessFailure(rank, 0, int(statuses[rank] or 0), str(tmp_path / f"error{rank}.json")) for rank in (0, 1)
    }
    summary = ChildFailedError("distill.train", failures)
    assert summary.get_first_failure()[0] == culprit
    assert last in str(summary).splitlines()[-2]
