"""The training step and the loop around it: one denominator, exact resume, judgements, early stop, interrupts."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_loss import eager_loss
from failures import Killed, killed
from processes import forked, killed_often, run_child, run_ranks
from safetensors.torch import load_file
from tiny_training import (
    RESPONSE_TOKENS,
    ScriptedJudge,
    before_step,
    final_weights,
    fit,
    forget_accelerators,
    fresh_accelerator,
    make_loop,
    merged,
    metrics_of,
    run_config,
    small_config,
    step_of,
    uneven_examples,
)

from data.batches.collate import collate
from data.responses.store import Store
from distill import train
from distill.config.layout import JUDGEMENT, PROGRESS, list_steps, step_folder
from distill.config.run import RunConfig
from distill.faults import Interrupted
from distill.loss.chunk_heads import Student
from distill.models.heads import SplitModel
from distill.run import checkpoint
from distill.training.batches import make_objective
from distill.training.trainer import NotFinite, Trainer
from distill.verdict import conclusion
from speculative.errors import UserError
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

TOKENS = sum(RESPONSE_TOKENS[:8])


def step_config(folder: Path, micro_batch_size: int, **sections: Any) -> RunConfig:
    sizes = {"batch_size": 8, "micro_batch_size": micro_batch_size, "steps": 20}
    return run_config(folder, train=sizes, optim={"lr": 1e-2, "max_grad_norm": 1e6, "warmup_ratio": 0.0}, **sections)


def one_step(config: RunConfig) -> dict[str, Any]:
    """Gradients, weights after the update, and what is logged of the first step."""
    loop = make_loop(config, examples=uneven_examples())
    result, gradients = step_of(loop)
    weights = {name: weight.detach().clone() for name, weight in loop.module.named_parameters()}
    return {"gradients": gradients, "weights": weights, "result": result._asdict()}


def gradients_of(module: torch.nn.Module) -> dict[str, Any]:
    return {name: weight.grad for name, weight in module.named_parameters()}


def _rank(rank: int, folder: Path) -> None:
    config = step_config(folder, 2)
    outcome = one_step(config)
    loop = make_loop(
        run_config(folder / "fit", train={"steps": 3}, judge={"every": 2}), accelerator=fresh_accelerator(folder)
    )
    assert loop.accelerator.num_processes == 2
    fit(loop)
    outcome["judged"] = loop.judge.steps  # type: ignore[attr-defined]
    torch.save(outcome, folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same first step made in one piece, in four micro-batches, and by two ranks with two micro-batches each."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(_rank, folder)
    return {
        "1x1": one_step(step_config(tmp_path_factory.mktemp("whole"), 8)),
        "1x4": one_step(step_config(tmp_path_factory.mktemp("micro"), 2)),
        "2x2": torch.load(folder / "rank0.pt"),
        "2x2 rank 1": torch.load(folder / "rank1.pt"),
    }


@pytest.mark.parametrize("arrangement", ["1x4", "2x2", "2x2 rank 1"])
def test_step_is_the_same_however_the_batch_is_shared(steps: dict[str, dict[str, Any]], arrangement: str) -> None:
    whole, shared = steps["1x1"], steps[arrangement]
    # float32 sums over 47 tokens taken in another order
    torch.testing.assert_close(shared["gradients"], whole["gradients"], rtol=1e-4, atol=1e-6)
    for key in ("loss", "alpha", "grad_norm"):
        assert shared["result"][key] == pytest.approx(whole["result"][key], rel=1e-5), key
    assert shared["result"]["tokens"] == whole["result"]["tokens"] == TOKENS
    changed = 0.0
    for name, weight in whole["weights"].items():
        # Adam divides a gradient by its own size: where that is nearly zero, rounding decides the sign of a step of lr = 1e-2.
        torch.testing.assert_close(shared["weights"][name], weight, rtol=0, atol=2.1e-2)
        changed += float((shared["weights"][name] - weight).abs().mean())
    assert changed / len(whole["weights"]) < 1e-4


def test_two_ranks_hold_the_same_weights_and_judge_the_same_checkpoints(steps: dict[str, dict[str, Any]]) -> None:
    first, second = steps["2x2"], steps["2x2 rank 1"]
    torch.testing.assert_close(second["weights"], first["weights"], rtol=0, atol=0)
    assert (first["judged"], second["judged"]) == ([0, 2, 3], [0, 2, 3]), "all ranks judge"


def test_step_is_the_mean_over_response_tokens_by_definition(steps: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    loop = make_loop(step_config(tmp_path, 8), examples=uneven_examples())
    batch = collate(uneven_examples(), 0)
    split, teacher = SplitModel(loop.module.student), loop.teacher
    assert teacher is not None
    hidden_BTD = split.hidden(batch.input_ids_BT)
    student = Student(hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R], split.head)
    sums = eager_loss(loop.module.objective, student, teacher.signal(batch), batch.labels_R)
    (sums.loss / TOKENS).backward()
    result = steps["1x1"]["result"]
    assert result["loss"] == pytest.approx(float(sums.loss.detach()) / TOKENS, rel=1e-5)
    assert result["alpha"] == pytest.approx(float(sums.overlap_R.sum()) / TOKENS, rel=1e-5)
    gradients = gradients_of(loop.module)
    torch.testing.assert_close(steps["1x1"]["gradients"], gradients, rtol=1e-4, atol=1e-6)  # chunks: order of sums
    assert result["grad_norm"] == pytest.approx(float(torch.nn.utils.get_total_norm(gradients.values())), rel=1e-4)


def test_prompts_add_their_weighted_loss_and_nothing_to_alpha(tmp_path: Path) -> None:
    """By definition: (sum over responses + weight x sum over prompts) / response tokens, in one piece and in four."""
    shares = [one_step(step_config(tmp_path / str(size), size, loss={"prompt_weight": 0.3})) for size in (8, 2)]
    loop = make_loop(step_config(tmp_path / "twin", 8), examples=uneven_examples())
    split, teacher = SplitModel(loop.module.student), loop.teacher
    assert teacher is not None
    sums = []
    for prompts in (False, True):
        examples = [replace(one, loss_mask=one.loss_mask != prompts) for one in uneven_examples()]
        batch = collate(examples, 0)
        student = Student(split.hidden(batch.input_ids_BT).flatten(0, 1)[batch.rows_R], split.head)
        sums.append(eager_loss(loop.module.objective, student, teacher.signal(batch), batch.labels_R))
    loss = (sums[0].loss + 0.3 * sums[1].loss) / TOKENS
    loss.backward()
    for share in shares:
        result = share["result"]
        assert result["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert result["alpha"] == pytest.approx(float(sums[0].overlap_R.sum()) / TOKENS, rel=1e-5)
        assert result["tokens"] == TOKENS
        # order of sums
        torch.testing.assert_close(share["gradients"], gradients_of(loop.module), rtol=1e-4, atol=1e-6)


def test_a_share_of_the_prompts_is_learnt_as_if_the_others_weighed_nothing(tmp_path: Path) -> None:
    """Slow twin: all rows, where the prompt tokens that were not drawn have weight 0."""
    loss = {"prompt_weight": 0.3, "prompt_share": 0.5}
    loop = make_loop(step_config(tmp_path, 8, loss=loss), examples=uneven_examples())
    (batch,) = loop.micro_batches(0)
    assert loop.teacher is not None
    assert batch.drawn_R is not None
    assert batch.weights_R is not None
    assert 0 < int(batch.drawn_R.sum()) < len(batch.drawn_R)
    twin = replace(batch, drawn_R=None, weights_R=batch.weights_R * batch.drawn_R)
    found = []
    for one in (batch, twin):
        loop.module.zero_grad()
        total, accepted, slack = loop.module(one, loop.teacher.signal(one))
        total.backward()
        gradients = {name: weight.grad.clone() for name, weight in loop.module.named_parameters()}
        found.append((total.detach(), accepted, slack, gradients))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)  # order of sums


@pytest.mark.parametrize("most", [1e-3, 1e6])
def test_a_gradient_is_clipped_to_the_norm_and_only_if_it_is_longer(tmp_path: Path, most: float) -> None:
    loop = make_loop(run_config(tmp_path, optim={"lr": 1e-2, "max_grad_norm": most}))
    clip, seen = loop.clip_gradients, []

    def norm() -> float:
        return float(torch.nn.utils.get_total_norm([w.grad for w in loop.module.parameters() if w.grad is not None]))

    loop.clip_gradients = lambda: (seen.append(norm()), clip(), seen.append(norm()))[1]
    logged = loop.step(loop.micro_batches(0)).grad_norm
    assert logged > 0.01
    assert seen == pytest.approx([logged, min(logged, most)], rel=1e-3), "what is logged is the norm before clipping"


@pytest.mark.parametrize("poison", ["weights", "gradient"])
def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path, poison: str) -> None:
    config = run_config(tmp_path, train={"steps": 6})
    loop = make_loop(config)
    before: dict[str, Any] = {}

    def poisoned() -> None:
        parameter = loop.module.student.model.norm.weight
        if poison == "weights":
            parameter.data[0] = math.nan
        else:
            parameter.register_hook(lambda gradient: gradient * math.inf)
        before.update({name: weight.clone() for name, weight in loop.module.state_dict().items()})
        loop.moments = json.dumps(str(loop.optimizers[0].state_dict()["state"]))

    with pytest.raises(NotFinite, match="step 4") as caught:
        fit(before_step(loop, 3, poisoned))
    text = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "\n" not in text
    assert str(step_folder(config.folder, 2)) in text
    assert "optim.lr" in text
    torch.testing.assert_close(dict(loop.module.state_dict()), before, rtol=0, atol=0, equal_nan=True)
    assert json.dumps(str(loop.optimizers[0].state_dict()["state"])) == loop.moments
    assert list_steps(config.folder) == [0, 2]
    assert [line["step"] for line in metrics_of(config) if "loss" in line] == [1, 2, 3]


# --- resume ------------------------------------------------------------------------------------------------------------


def finish(config: RunConfig, kind: str = "llama", score: Callable[[int], float] = float) -> Trainer:
    loop = make_loop(config, ScriptedJudge(score), kind=kind)
    fit(loop)
    return loop


def assert_same_run(config: RunConfig, expected: RunConfig) -> None:
    """Metrics, judgements, best and the final weights are those of the uninterrupted run, bit for bit."""
    assert metrics_of(config) == metrics_of(expected)
    assert list_steps(config.folder) == list_steps(expected.folder)
    for step in list_steps(expected.folder):
        mine, theirs = (step_folder(c.folder, step) for c in (config, expected))
        assert (mine / JUDGEMENT).read_text() == (theirs / JUDGEMENT).read_text()
        progress = [json.loads((folder / PROGRESS).read_text()) for folder in (mine, theirs)]
        for record in progress:
            del record["seconds"]
        assert progress[0] == progress[1], f"progress at step {step}"
    assert (config.folder / "best").readlink() == (expected.folder / "best").readlink()
    torch.testing.assert_close(final_weights(config), final_weights(expected), rtol=0, atol=0)


# gpt2 has dropout: its masks must come out of the stored random state.
@pytest.mark.parametrize(("kind", "optim"), [("llama", "adamw"), ("gpt2", "adamw"), ("llama", "muon")])
def test_a_run_stopped_after_any_step_goes_on_exactly(tmp_path: Path, kind: str, optim: str) -> None:
    def config(name: str) -> RunConfig:
        return run_config(tmp_path / name, train={"steps": 5}, optim={"name": optim})

    finish(config("whole"), kind)
    losses = [line["loss"] for line in metrics_of(config("whole")) if "loss" in line]
    assert len(set(losses)) == 5
    for stop in range(5):
        loop = make_loop(config(f"stopped{stop}"), kind=kind)
        loop._record = lambda *_, stop=stop, at=loop.progress, record=loop._record: (
            record(*_) if at.step <= stop else killed()  # the step is made, and on no disk
        )
        with pytest.raises(Killed):
            fit(loop)
        torch.manual_seed(1234)  # a new process has another random state
        finish(config(f"stopped{stop}"), kind)
        assert_same_run(config(f"stopped{stop}"), config("whole"))


def test_a_judge_that_draws_random_numbers_does_not_change_a_resumed_run(tmp_path: Path) -> None:
    """The judgement of a checkpoint is not repeated after a resume, so training must not depend on what it drew."""

    class DrawingJudge(ScriptedJudge):
        def __call__(self, step: int, *asked: Any) -> dict[str, Any]:
            torch.rand(7)
            return super().__call__(step, *asked)

    whole, stopped = (run_config(tmp_path / name, train={"steps": 4}) for name in ("whole", "stopped"))
    fit(make_loop(whole, DrawingJudge(), kind="gpt2"))
    with pytest.raises(Killed):
        fit(before_step(make_loop(stopped, DrawingJudge(), kind="gpt2"), 3, killed))
    fit(make_loop(stopped, DrawingJudge(), kind="gpt2"))
    assert_same_run(stopped, whole)


@pytest.mark.parametrize(("before", "scores"), [(True, [1, 2]), (False, [2, 1]), (False, [1, 2])])
def test_a_run_killed_at_any_rename_goes_on_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool, scores: list[int]
) -> None:
    """Everything that counts reaches the disk by a rename: stop right before and right after each of them."""

    def config(name: str) -> RunConfig:
        sections = {"train": {"steps": 1}, "judge": {"every": 1}, "loss": {"name": "forward_kl"}}
        return run_config(tmp_path / name, **sections)

    def score(step: int) -> float:
        return float(scores[step])

    finish(config("whole"), score=score)
    replace, calls = os.replace, [0]
    for deadly in range(1, 100):
        calls[0] = 0

        def deadly_replace(source: Any, destination: Any, deadly: int = deadly) -> None:
            calls[0] += 1
            if calls[0] == deadly and before:
                raise Killed
            replace(source, destination)
            if calls[0] == deadly:
                raise Killed

        name = f"killed{deadly}"
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", deadly_replace)
            try:
                finish(config(name), score=score)
                break
            except Killed:
                pass
        finish(config(name), score=score)
        assert_same_run(config(name), config("whole"))
    assert deadly >= 8, "two checkpoints of at least four renames each"


def test_best_is_the_highest_score_and_the_first_of_equals(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": 8})
    loop = finish(config, score=lambda step: {0: 1.0, 2: 3.0, 4: 2.0, 6: 3.0, 8: 0.5}[step])
    assert (loop.progress.best_step, loop.progress.best_score) == (2, 3.0)
    assert (config.folder / "best").resolve() == step_folder(config.folder, 2).resolve()
    assert (config.folder / "best" / "student" / "model.safetensors").exists()


def test_patience_counts_checkpoints_without_gain_also_over_a_resume(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": 20}, judge={"every": 2, "patience": 3})
    scores = {0: 1.0, 2: 5.0, 4: 3.0, 6: 5.0, 8: 4.0}
    loop = finish(config, score=lambda step: scores[step])
    assert loop.progress.step == 8, "4, 6 and 8 brought nothing over 2"
    again = finish(config, score=lambda step: scores[step])
    assert again.progress.step == 8
    assert again.judge.steps == []  # type: ignore[attr-defined]


def test_pruning_keeps_every_student_and_the_newest_states(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": 8})
    finish(config)
    assert list_steps(config.folder) == [0, 2, 4, 6, 8]
    for step in (0, 2, 4, 6, 8):
        folder = step_folder(config.folder, step)
        assert (folder / "student" / "model.safetensors").exists()
        assert (folder / "student" / "tokenizer.json").exists()
        assert (folder / "state").exists() == (step >= 6)


@pytest.mark.parametrize("rule", ["sample", "greedy-draft"])
def test_the_lines_alpha_is_that_of_the_serving_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Else a draft that the judge finds accepted at .88 reads .75 while it trains."""
    serving = {"temperature": 0.6, "top_p": 0.8, "rule": rule}
    config = run_config(tmp_path, serving=serving, train={"batch_size": 8, "micro_batch_size": 4})
    loop = make_loop(config, examples=uneven_examples(), objective=make_objective(config))
    batch = collate(uneven_examples(), 0)
    split, teacher, sampling = SplitModel(loop.module.student), loop.teacher, SamplingSettings(0.6, top_p=0.8)
    hidden_RD = split.hidden(batch.input_ids_BT).flatten(0, 1)[batch.rows_R]
    signal = teacher.signal(batch)  # type: ignore[union-attr]
    target = logits_to_probs(signal.head(signal.hidden_RD), sampling)  # type: ignore[union-attr]
    draft = logits_to_probs(split.head(hidden_RD), sampling if rule == "sample" else GREEDY)
    expected = float(torch.minimum(target, draft).sum(-1).mean().detach())
    seen = []
    monkeypatch.setattr(loop.metrics, "write", lambda _, values, **__: seen.append(values))
    result = loop.step(loop.micro_batches(0))
    assert f"alpha {expected:.3f} " in loop._record(result, 1.0)
    assert seen[0]["alpha_train"] == pytest.approx(expected, rel=1e-5)


# --- interrupts --------------------------------------------------------------------------------------------------------


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 3])
def test_an_interrupt_finishes_the_step_and_leaves_a_checkpoint(tmp_path: Path, number: int, at: int) -> None:
    whole, stopped = (run_config(tmp_path / name, train={"steps": 5}) for name in ("whole", "stopped"))
    finish(whole)
    previous = signal.getsignal(number)
    with pytest.raises(Interrupted) as caught:
        fit(before_step(make_loop(stopped), at, lambda: press(number)))
    assert str(step_folder(stopped.folder, at + 1)) in str(caught.value)
    assert checkpoint.last_resumable(stopped.folder) == at + 1
    assert signal.getsignal(number) is previous, "handlers are put back"
    finish(stopped)
    losses = [[line["loss"] for line in metrics_of(c) if "loss" in line] for c in (stopped, whole)]
    assert losses[0] == losses[1]
    torch.testing.assert_close(final_weights(stopped), final_weights(whole), rtol=0, atol=0)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_a_judged_step_keeps_the_judgement(tmp_path: Path) -> None:
    whole, stopped = (run_config(tmp_path / name, train={"steps": 4}) for name in ("whole", "stopped"))
    finish(whole)

    class InterruptedJudge(ScriptedJudge):
        def __call__(self, step: int, *asked: Any) -> dict[str, Any]:
            if step == 2:
                press()
            return super().__call__(step, *asked)

    with pytest.raises(Interrupted):
        fit(make_loop(stopped, InterruptedJudge()))
    assert (step_folder(stopped.folder, 2) / JUDGEMENT).exists(), "the judgement of step 2 was paid for"
    assert finish(stopped).judge.steps == [4]  # type: ignore[attr-defined]
    assert_same_run(stopped, whole)


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    config = run_config(tmp_path, train={"steps": 5})
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(before_step(make_loop(config), 0, lambda: (press(), press())))
    assert not isinstance(caught.value, Interrupted)
    assert list_steps(config.folder) == [0]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_step_is_saved_before_it_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher gives a rank 30 s, and a judgement takes minutes."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    config = run_config(tmp_path, train={"steps": 5})
    loop = before_step(make_loop(config), 1, press)
    with pytest.raises(Interrupted, match="step-000002 is saved"):
        fit(loop)
    assert loop.judge.steps == [0]
    assert "the launcher kills all processes after 30 s" in capsys.readouterr().err
    assert finish(config).judge.steps == [2, 4, 5]  # type: ignore[attr-defined]


# --- a real process, a real kill ----------------------------------------------------------------------------------------


def write_run(folder: Path, name: str, **sections: Any) -> Path:
    return small_config(
        folder,
        name=name,
        output=str(folder / name),
        student={"layers": [0, 2]},
        data={"heldout_count": 6},
        serving={"temperature": 0.9, "max_tokens": 12, "batch_size": 4, "shard_size": 4},
        **merged({"train": {"steps": 6, "batch_size": 4, "micro_batch_size": 2}, "judge": {"prompts": 6}}, sections),
    )


def _train(path: Path) -> None:
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    forget_accelerators()
    # The verdict and its plot are made from what is on disk, after everything that this file looks at.
    conclusion.conclude_run = lambda *_: None
    os._exit(train.main([str(path)]))


def test_the_whole_program_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    paths = {name: write_run(tmp_path, name) for name in ("whole", "killed")}
    assert run_child(_train, paths["whole"]) == 0

    def files() -> int:
        return sum(len(names) for _, _, names in os.walk(tmp_path / "killed"))  # forgiving of folders that vanish

    assert killed_often(_train, paths["killed"], progress=files, times=3, most=12, seed=1) >= 2
    whole, killed = (tmp_path / name / name for name in ("whole", "killed"))
    for store in ("train", "heldout", "heldout-greedy"):
        assert Store(killed / "responses" / store).read() == Store(whole / "responses" / store).read()
    losses = []
    for folder in (whole, killed):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line])
    assert losses[0] == losses[1]
    assert (whole / "best").readlink() == (killed / "best").readlink()
    weights = [load_file(step_folder(folder, 6) / "student" / "model.safetensors") for folder in (whole, killed)]
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_on_the_whole_program_writes_a_checkpoint_and_exits_130(tmp_path: Path) -> None:
    path = write_run(tmp_path, "stopped", train={"steps": 100_000}, judge={"every": 1000})
    metrics = tmp_path / "stopped" / "stopped" / "metrics.jsonl"
    with forked(_train, path) as child:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and not (metrics.exists() and '"loss"' in metrics.read_text()):
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGINT)
        child.join(30)
        assert child.exitcode == 130
    steps = list_steps(metrics.parent)
    assert steps[-1] > 0
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert lines[-1]["step"] == steps[-1], "nothing was trained after the checkpoint"
