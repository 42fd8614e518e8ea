"""Two ranks as programs: whole runs, launched and on disks that lag; when one fails both are gone at once and the screen says why."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from accelerate import PartialState
from failures import full_disk
from processes import rank_statuses, run_ranks, until
from tiny_training import (
    ScriptedJudge,
    before_step,
    examples_of,
    fit,
    forget_accelerators,
    fresh_accelerator,
    make_loop,
    metrics_of,
    run_config,
    small_config,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from distill import faults, train
from distill.commands.readback import clock
from distill.config.layout import JUDGEMENT, JUDGING, PROPOSALS, RESULT, step_folder
from distill.config.load import dump_config, load_config
from distill.config.run import RunConfig
from distill.run import run
from distill.run.checkpoint import judged_scores, last_resumable
from distill.run.run import Run
from distill.run.verdict_record import load_verdict
from distill.training.trainer import Trainer
from distill.verdict import decoding, judge
from speculative import progress
from speculative.errors import UserError
from speculative.measure import token_scores


class Tracker:
    """Says on the screen when it is finished; a stuck one never is."""

    def __init__(self, stuck: bool = False) -> None:
        self.stuck = stuck

    def finish(self) -> None:
        if self.stuck:
            time.sleep(60)
        sys.stderr.write("tracker finished\n")
        sys.stderr.flush()


class BrokenTracker:
    def finish(self) -> None:
        raise OSError("disk full")


def _fails_with_trackers(rank: int, folder: Path) -> None:
    fresh_accelerator(folder)
    faults.TRACKER_SECONDS = 3.0
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "not there" / "error.json")
    faults.exit_status(UserError("mend it"), [Tracker(), Tracker(stuck=True)])


def test_trackers_are_finished_behind_the_line_and_hold_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Each write is a call of its own then, and the other rank's may come between two.
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert rank_statuses(_fails_with_trackers, tmp_path, limit=20) == [2, 2]
    assert sorted(capfd.readouterr().err.splitlines()) == ["tracker finished"] * 2 + ["understudy: mend it"] * 2
    with pytest.raises(ZeroDivisionError):
        faults.exit_status(ZeroDivisionError(), [Tracker()])
    assert faults.exit_status(UserError("mend it"), [BrokenTracker(), Tracker()]) == 2
    assert capfd.readouterr().err.splitlines() == ["tracker finished"] * 2 + ["understudy: mend it"]


def _asks_for_what_never_shows(rank: int, folder: Path) -> None:
    shared = Run(run_config(folder), fresh_accelerator(folder))
    run.PATIENCE = 0.3
    path = folder / "written" if rank == 0 else folder / "elsewhere"
    shared.once(path, lambda: path.write_text("x", encoding="utf-8"))


def test_a_rank_without_the_shared_disk_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rank_statuses(_asks_for_what_never_shows, tmp_path) == [0, 1]
    assert "is not visible here after 0.3 s; set output to a folder on a disk" in capfd.readouterr().err


class RefusingJudge(ScriptedJudge):
    """The main process finds while judging that it cannot; the others wait for its part."""

    def __call__(self, step: int, *asked: Any) -> dict[str, Any]:
        if step and PartialState().is_main_process:
            raise UserError("the judge says no")
        return super().__call__(step, *asked)


def _out_of_memory(loop: Trainer) -> None:
    def failing() -> None:
        if not loop.accelerator.is_main_process:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    before_step(loop, 1, failing)


def _full_disk(loop: Trainer) -> None:
    if loop.accelerator.is_main_process:
        loop.tokenizer.save_pretrained = full_disk


def _mistake_of_ours(loop: Trainer) -> None:
    if not loop.accelerator.is_main_process:
        loop.micro_batches = lambda step: [][step]  # type: ignore[method-assign]


def _refusing_judge(loop: Trainer) -> None:
    loop.judge = RefusingJudge()


def _rank(rank: int, folder: Path, spoil: Callable[[Trainer], None]) -> None:
    """`distill.train` on a tiny loop. As under NCCL, a group cannot be destroyed while another rank waits in a collective."""
    forget_accelerators()
    screen = os.open(folder / f"screen{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(screen, 2)
    sys.stderr = os.fdopen(2, "w")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error{rank}.json")

    def distil(run: Run) -> None:
        loop = make_loop(run.config, accelerator=run.accelerator, examples=examples_of([9, 12, 7, 15]))
        spoil(loop)
        fit(loop)

    train.distil = distil
    torch.distributed.destroy_process_group = lambda *_: time.sleep(60)
    sys.exit(train.main([str(folder / "run.yaml")]))


def _times_an_engine(rank: int, folder: Path) -> None:
    """The main process times until the other rank is gone."""
    forget_accelerators()

    def timed(run: Run) -> None:
        if run.main:
            until((folder / "gone").exists)

    train.distil, clock.time_serving_engine = lambda run: run.wait(), timed
    assert train.main([str(folder / "run.yaml")]) == 0
    if rank:
        (folder / "gone").touch()


def test_no_rank_waits_for_the_times_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(run_config(tmp_path)), encoding="utf-8")
    assert rank_statuses(_times_an_engine, tmp_path, limit=30) == [0, 0]


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
        (_full_disk, 0, 2, "cannot be written ([Errno 28] No space left on device); there is no checkpoint yet"),
        (_mistake_of_ours, 1, 1, "IndexError: list index out of range"),
    ],
)
def test_one_rank_that_fails_ends_all_at_once_and_says_why(
    tmp_path: Path, spoil: Callable[[Trainer], None], culprit: int, status: int, last: str
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


class SlowJudge(ScriptedJudge):
    """Takes longer than ranks wait for each other in a step."""

    def __call__(self, step: int, *asked: Any) -> dict[str, Any]:
        if step:
            time.sleep(1.5 * run.STEP_LIMIT.total_seconds())
        return super().__call__(step, *asked)


def _stuck_after_judging(rank: int, folder: Path) -> None:
    """The second rank answers nobody from step 3 on, until the first one has said something."""
    run.STEP_LIMIT, progress.FIRST_SECONDS = timedelta(seconds=4), 600.0  # the screen has only what the first one says

    def stuck() -> None:
        while not (folder / "screen0").read_text(encoding="utf-8").endswith("\n"):
            time.sleep(0.05)
        os._exit(9)

    def spoil(loop: Trainer) -> None:
        loop.judge = SlowJudge()
        if rank == 1:
            before_step(loop, 3, stuck)

    _rank(rank, folder, spoil)


@pytest.mark.ranks
def test_ranks_wait_for_a_judgement_but_not_for_a_rank_that_is_stuck(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_config(run_config(tmp_path)), encoding="utf-8")
    assert rank_statuses(_stuck_after_judging, tmp_path, limit=90) == [2, 9]
    assert [step for step, _ in judged_scores(tmp_path / "run")] == [0, 2]
    (line,) = (tmp_path / "screen0").read_text(encoding="utf-8").splitlines()
    assert line.startswith("understudy: another rank failed or cannot be reached, so this one stops;")
    assert "4000ms" in line


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of a few seconds; the runs of it are beside it."""
    return small_config(
        tmp_path_factory.mktemp("small"),
        serving={"temperature": 0.7},
        loss={"name": "forward_kl"},
        optim={"lr": 3e-3},
        train={"steps": 4},
        judge={"prompts": 4},
    )


def run_alone(path: Path, name: str, *overrides: str) -> RunConfig:
    """The same run by one process."""
    forget_accelerators()
    asked = [f"name={name}", *overrides]
    assert train.main([str(path), *asked]) == 0
    return load_config(path, asked)


def losses_of(config: RunConfig) -> list[float]:
    return [line["loss"] for line in metrics_of(config) if "loss" in line]


@pytest.mark.ranks
@pytest.mark.usefixtures("without_verdict")
def test_a_run_from_config_to_verdict_on_two_processes(small: Path, tmp_path: Path) -> None:
    """In a project that has a package `data` of its own."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").touch()
    command = [Path(sys.executable).with_name("understudy"), "train", small, "target.shard=true"]
    done = subprocess.run(
        [*map(str, command), "--num-processes", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    config = load_config(small)
    verdict = load_verdict(config.folder)
    assert (verdict.prompts, verdict.checkpoints[-1].step) == (4, 4)
    assert verdict.headline in " ".join(done.stdout.split())  # it may be broken at blanks
    assert all(record.live_check is not None and record.ranks == 2 for record in verdict.checkpoints)
    assert losses_of(config) == pytest.approx(losses_of(run_alone(small, "one-process")), rel=1e-4)


def _no_such_key(rank: int, path: Path) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path.with_suffix(".json"))
    sys.exit(train.main([str(path), "optim.lrr=1"]))


def test_a_mistake_before_there_is_a_group_is_the_launchers_last_word_too(small: Path) -> None:
    (status,) = rank_statuses(_no_such_key, small, ranks=1)
    failure = ProcessFailure(0, 0, int(status or 0), str(small.with_suffix(".json")))
    assert "unknown key `optim.lrr`" in str(ChildFailedError("distill.train", {0: failure})).splitlines()[-2]


def _trains(rank: int, path: Path, overrides: list[str]) -> None:
    forget_accelerators()
    sys.exit(train.main([str(path), *overrides]))


def _notes_what_it_decodes(rank: int, path: Path, overrides: list[str], folder: Path) -> None:
    real = decoding.decode

    def noted(target: Any, drafter: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        with (folder / f"rank{rank}").open("a", encoding="utf-8") as file:
            file.writelines(f"{key}\n" for key, _ in prompts)
        return real(target, drafter, prompts, *rest, **options)

    decoding.decode = noted
    _trains(rank, path, overrides)


def _untimed(run: Path) -> dict[str, Any]:
    """The numbers of a result that were decoded or replayed."""
    result = json.loads((run / RESULT).read_text(encoding="utf-8"))
    rows = [row for row in result["verdict"]["measured"] if row["how"].get("speed_up") != "timed"]
    proposals = sorted(
        pq.read_table(run / PROPOSALS).to_pylist(), key=lambda one: (one["prompt"], one["block"], one["place"])
    )
    return (
        {"rows": rows, "proposals": proposals}
        | {"token_view": result["token_view"]}
        | {key: result["verdict"][key] for key in ("survival", "live_tokens", "replay_check", "gain", "warnings")}
    )


@pytest.mark.ranks
@pytest.mark.usefixtures("without_figures")
def test_judgement_and_verdict_are_decoded_by_all_ranks_and_do_not_depend_on_their_number(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's last judgement and its verdict, made again by two ranks, and by three of which one has no prompt."""
    monkeypatch.setattr(decoding, "DECODED_TOGETHER", 2)
    monkeypatch.setattr(judge, "DECODED_TOGETHER", 2)
    monkeypatch.setattr(token_scores, "ROWS_PER_FORWARD", 2)
    config = run_alone(small, "verdict", "train.batch_size=6")
    first, path = _untimed(config.folder), step_folder(config.folder, 4) / JUDGEMENT
    judgement = json.loads(path.read_text(encoding="utf-8"))
    assert first["live_tokens"] > 0
    assert judgement["live_check"]["prompts"] == judgement["prompts"] == 4
    for ranks in (2, 3):
        (config.folder / RESULT).unlink()
        path.unlink()
        (notes := tmp_path / str(ranks)).mkdir()
        overrides = ["name=verdict", "train.batch_size=6"]
        assert rank_statuses(_notes_what_it_decodes, small, overrides, notes, ranks=ranks) == [0] * ranks
        assert _untimed(config.folder) == first
        assert json.loads(path.read_text(encoding="utf-8")) == judgement | {"ranks": ranks}
        assert not (config.folder / JUDGING).exists()
        decoded = {path.name: set(path.read_text(encoding="utf-8").split()) for path in notes.iterdir()}
        assert {name: len(keys) for name, keys in decoded.items()} == {"rank0": 2, "rank1": 2}
        assert not decoded["rank0"] & decoded["rank1"]


def _on_a_lagging_disk(rank: int, path: Path, overrides: list[str], stop: bool) -> None:
    """A rank of a run, the second one on a machine where small files of the run never show; both stopped in step 3."""
    forget_accelerators()
    if rank == 1:
        exists, late = Path.exists, ("judgement.json", "progress.json", "student.json", "self_checks.json")
        read, clock = Path.open, iter([True] * 5)

        def open_late(self: Path, *mode: Any, **options: Any) -> Any:
            if self.name == "index.arrow" and next(clock, False):
                raise FileNotFoundError(self)
            return read(self, *mode, **options)

        Path.open = open_late  # type: ignore[method-assign]
        Path.exists = lambda self, **options: self.name not in late and exists(self, **options)  # type: ignore[method-assign]
    if stop:
        step = Trainer.step

        def interrupted(self: Trainer, window: Any) -> Any:
            if self.progress.step == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return step(self, window)

        Trainer.step = interrupted  # type: ignore[method-assign]
    sys.exit(train.main([str(path), *overrides]))


@pytest.mark.ranks
@pytest.mark.usefixtures("without_verdict", "interruptible")
def test_ranks_stay_together_where_one_sees_files_late(small: Path) -> None:
    overrides = ["student.layers=[0, 1]", "judge.live=never"]
    asked = ["name=lagging", *overrides]
    assert rank_statuses(_on_a_lagging_disk, small, asked, True) == [130, 130]
    config = load_config(small, asked)
    assert last_resumable(config.folder) == 3
    assert rank_statuses(_on_a_lagging_disk, small, asked, False) == [0, 0]
    assert [step for step, _ in judged_scores(config.folder)] == [0, 2, 4]
    assert losses_of(config) == pytest.approx(losses_of(run_alone(small, "alone", *overrides)), rel=1e-4)
