"""The training benches run at tiny sizes and write what they promise; all contestants minimise the same thing."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_modules import bench

from data.batches.collate import collate
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.training.module import DraftModule
from speculative.errors import UserError

CELL = {
    "device",
    "objective",
    "policy",
    "tokens_per_second",
    "vs_floor",
    "vs_trl",
    "peak_memory_mb",
    "loss_memory_ratio",
}


@pytest.fixture
def chatty_target(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target with a chat template."""
    folder = tmp_path / "chatty"
    shutil.copytree(tiny_target, folder)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(str(folder))
    return folder


def race_of(tiny_target: Path, **options: Any) -> Any:
    module = bench("train_step")
    settings = {"target": str(tiny_target), "batch_size": 2, "length": 24, "prompt_tokens": 8, "examples": 4} | options
    return module.Race(module.Settings(**settings))


def test_a_step_has_a_cell_for_every_policy_and_objective(tiny_target: Path, tmp_path: Path) -> None:
    module, out = bench("train_step"), tmp_path / "step.json"
    module.main(
        out=out,
        pair="random",
        target=str(tiny_target),
        draft=None,
        batch_size=2,
        length=24,
        prompt_tokens=8,
        rounds=1,
        objectives="forward_kl,forward_kl+ce",
        policies="off,store,on",
        memory=False,
        loss_tokens=64,
        loss_vocab=500,
        compile_ours=False,
        trl=True,
        threads=0,
        device="cpu",
        memory_job=None,
    )
    result = json.loads(out.read_text())
    cells = {(c["policy"], c["objective"], c.get("rollout_every")): c for c in result["cells"]}
    reading = {(policy, name, None) for policy in ("off", "store") for name in ("forward_kl", "forward_kl+ce")}
    writing = {("on", "forward_kl", every) for every in (1, 50)}
    assert set(cells) == reading | writing
    for (_, objective, _), cell in cells.items():
        assert set(cell) >= CELL
        assert (cell["vs_trl"] is not None) == (objective in module.BETA)
        assert cell["peak_memory_mb"] is None
    # Speed of the baseline and time over its time are one measurement.
    baseline = result["contestants"]["floor/off/forward_kl"]["tokens_per_second"]
    for (policy, *_), cell in cells.items():
        if policy != "on":
            assert cell["vs_floor"] == pytest.approx(baseline / cell["tokens_per_second"])
    assert {"commit", "versions", "threads"} <= set(result["machine"])


@pytest.mark.parametrize(
    "objective", ["forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "forward_kl+ce"]
)
def test_the_baseline_and_ours_minimise_the_same(tiny_target: Path, objective: str) -> None:
    module, race = bench("train_step"), race_of(tiny_target)
    weights = module.OBJECTIVES[objective]
    batch = collate(race.examples[:2], 0)
    mask_BT = torch.from_numpy(race.examples[0].loss_mask).expand(2, -1)
    baseline = module.naive_loss(race.target, race.student, batch.input_ids_BT, mask_BT, weights)
    baseline.backward()
    expected = [parameter.grad.clone() for parameter in race.student.parameters()]
    race.student.zero_grad()
    draft = DraftModule(race.student, Objective(weights))
    loss, *_ = draft(batch, race.teacher.signal(batch))
    (loss / batch.labels_R.numel()).backward()
    found = [parameter.grad for parameter in race.student.parameters()]
    # Float32 sums in another order; gradients of a mean over 32 tokens are far above 1e-5.
    torch.testing.assert_close(loss / batch.labels_R.numel(), baseline, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("objective", ["forward_kl", "jsd", "reverse_kl"])
def test_trl_minimises_the_same(objective: str) -> None:
    from trl.experimental import gkd

    module = bench("train_step")
    torch.manual_seed(0)
    target_BTV, student_BTV = torch.randn(2, 2, 5, 30).unbind(0)
    labels_BT = torch.randint(0, 30, (2, 5))
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student_BTV, target_BTV, labels_BT, beta=module.BETA[objective])
    ours_BT = module.plain_losses(target_BTV.log_softmax(-1), student_BTV.log_softmax(-1), labels_BT, {objective: 1.0})
    torch.testing.assert_close(ours_BT.mean(), theirs)


def test_stored_signals_come_back_in_the_order_of_a_step(tiny_target: Path) -> None:
    module, race = bench("train_step"), race_of(tiny_target)
    stored = module.stored_teacher(race.teacher, race.examples, 8)
    batch = collate([race.examples[2], race.examples[0]], 0, [2, 0])
    dense = race.teacher.signal(batch)
    most = dense.head(dense.hidden_RD).argmax(-1)
    assert torch.equal(stored.signal(batch).ids_RK[:, 0], most)


def test_growth_is_what_the_work_takes() -> None:
    module = bench("train_step")
    few = module.growth_of(lambda: torch.ones(1_000_000).sum(), "cpu")
    many = module.growth_of(lambda: torch.ones(25_000_000).sum(), "cpu")
    assert few < 20
    assert 90 < many < 120  # 25 M float32 are 100 MB


def test_memory_is_measured_in_processes_of_their_own(tiny_target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = bench("train_step")
    settings = module.asdict(race_of(tiny_target).settings)
    shape = module.asdict(module.LossShape(2048, 3000, 16, 16))
    jobs = {"step": ("weigh_step", (settings, "ours/off/forward_kl", 1))}
    jobs |= {who: ("weigh_loss", (shape, "forward_kl", who, "cpu")) for who in ("ours", "floor")}
    found = module.growth_in_processes(jobs, 1, lambda text: None)
    assert found["step"] > 0
    assert found["floor"] > 4 * 2048 * 3000 * 4 / 1e6  # both models' logits and log-probabilities at least
    assert found["ours"] < found["floor"] / 2
    assert capfd.readouterr().err == "", "torchao warns while transformers imports it: here of what only CUDA needs"


def test_full_logits_are_extrapolated_by_their_rows() -> None:
    line = {f"loss/floor/{part}": 7.0 + 2.0 * 1600 / part for part in (16, 8)}
    assert bench("train_step").full_logits_mb(line) == pytest.approx(7.0 + 2.0 * 1600)


class ScriptedTrainer:
    """What `trl_peer` uses of a trainer: callbacks, and steps that it counts."""

    def __init__(self, steps: int, fails_at: int = -1) -> None:
        self.steps, self.fails_at = steps, fails_at
        self.made, self.callbacks = 0, []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(self) -> None:
        control = SimpleNamespace(should_training_stop=False)
        for callback in self.callbacks:
            callback.on_train_begin(None, None, control)
        for number in range(self.steps):
            if control.should_training_stop:
                return
            if number == self.fails_at:
                raise ArithmeticError("no")
            self.made += 1
            for callback in self.callbacks:
                callback.on_step_end(None, None, control)


def test_a_stepped_trainer_makes_one_step_at_a_time() -> None:
    trainer = ScriptedTrainer(100)
    stepped = bench("trl_peer").Stepped(trainer)
    for expected in (1, 2, 3):
        stepped.step()
        assert trainer.made == expected
    stepped.close()
    assert trainer.made == 3
    assert not stepped.thread.is_alive()


def test_a_stepped_trainers_failure_is_the_callers() -> None:
    stepped = bench("trl_peer").Stepped(ScriptedTrainer(100, fails_at=1))
    stepped.step()
    with pytest.raises(ArithmeticError):
        stepped.step()


def test_a_budget_ends_before_the_step_that_would_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = ScriptedTrainer(100), bench("trl_peer")
    # Each step takes .05 seconds: the seventh would end behind the budget.
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 0.05 * trainer.made))
    spent = module.train_for(trainer, 0.32)
    assert spent == {"steps": trainer.made, "seconds": pytest.approx(0.30)}
    assert trainer.made == 6


def test_the_yardstick_measures_a_target_as_its_own_draft(tiny_target: Path, tmp_path: Path) -> None:
    module, target = bench("yardstick"), load_model("target", str(tiny_target))
    heldout = module.respond(target, [[5, 6, 7], [8, 9], [10, 11, 12, 13]], 12, 0, False, tmp_path)
    numbers = module.measure(target, target, heldout)
    assert numbers["alpha"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["agreement"] == 1.0
    assert numbers["tokens"] == sum(len(response.response_ids) for response in heldout)
    assert len(list(tmp_path.glob("responses-*.json"))) == 1
    assert module.respond(target, [[5, 6, 7], [8, 9], [10, 11, 12, 13]], 12, 0, False, tmp_path) == heldout


def test_dense_and_sampled_alpha_agree(tiny_target: Path, tmp_path: Path) -> None:
    module, target = bench("yardstick"), load_model("target", str(tiny_target))
    heldout = module.respond(target, [[number] for number in range(3, 67)], 32, 0, False, tmp_path)
    numbers = module.measure(target, carve(target, (0, -1)), heldout)
    # Over some 2,000 tokens the standard error of the sampled estimate is about .01.
    assert numbers["alpha"] == pytest.approx(numbers["alpha_sampled"], abs=0.05)
    assert 0 < numbers["alpha"] < 1


def write_domain(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"question": f"how many {number} are there"}
        if number % 2
        else {
            "messages": [
                {"role": "user", "content": f"hello {number}"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "and now"},
            ]
        }
        for number in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_yardstick_trains_for_its_minutes(chatty_target: Path, tmp_path: Path) -> None:
    module, out = bench("yardstick"), tmp_path / "yard.json"
    write_domain(tmp_path / "data" / "talk", 40)
    options = {
        "target": str(chatty_target),
        "draft": None,
        "data": tmp_path / "data",
        "domain": "talk",
        "student": "carved",
        "seeds": "0",
        "train_prompts": 20,
        "heldout_prompts": 6,
        "max_tokens": 8,
        "max_prompt_tokens": 60,
        "cache": tmp_path / "cache",
        "threads": 0,
        "out": out,
    }
    module.main(["batch=4", "ema=0.9", "warm_ratio=0.3", "chunk=16"], minutes=0.01, modes="plain,ours", **options)
    result = json.loads(out.read_text())
    assert [run["mode"] for run in result["runs"]] == ["plain", "ours"]
    for run in (result["before"], *result["runs"]):
        assert 0 < run["alpha"] <= 1
        assert set(run["tau"]) == {"3", "5"}
    for run in result["runs"]:
        assert run["steps"] >= 1
        assert run["tokens_trained"] >= 4 * run["steps"]  # a token or more of each sequence of a batch
    assert result["recipes"]["ours"]["batch"] == 4
    # Another recipe and a seed more go on in the same file, by the process's own clock; what is there stays.
    options |= {"seeds": "0,1", "cpu_minutes": 0.003, "minutes": 0.02}
    with pytest.raises(UserError, match="another minutes"):
        module.main([], modes="plain", **options)
    out.unlink()
    module.main(["batch=4"], modes="plain", **options)
    module.main(["batch=4"], modes="plain,ours", vary="prompt_weight=0,.5", **options)
    again = json.loads(out.read_text())
    assert [(run["mode"], run["seed"]) for run in again["runs"]] == [
        ("plain", 0),
        ("plain", 1),
        ("prompt_weight=0", 0),
        ("prompt_weight=.5", 0),
        ("prompt_weight=0", 1),
        ("prompt_weight=.5", 1),
    ]
    assert again["clock"] == "cpu"
    assert {name: recipe["prompt_weight"] for name, recipe in again["recipes"].items()} == {
        "plain": 0.0,
        "prompt_weight=0": 0.0,
        "prompt_weight=.5": 0.5,
    }
    module.main(["batch=4"], modes="plain,ours", vary="prompt_weight=0,.5", **options)
    assert json.loads(out.read_text())["gains"] == again["gains"], "also where nothing was left to do"
    with pytest.raises(UserError, match="no mask token"):
        module.main(["parallel=4"], modes="ours", **options)
    with pytest.raises(UserError, match="another recipe"):
        module.main(["batch=5"], modes="ours", vary="prompt_weight=0", **options)


def test_gains_are_paired_by_seed() -> None:
    alphas = {("plain", 0): 0.5, ("ours", 0): 0.6, ("plain", 1): 0.7, ("ours", 1): 0.82, ("ours", 2): 0.9}
    runs = [{"mode": mode, "seed": seed, "alpha": alpha} for (mode, seed), alpha in alphas.items()]
    gain = bench("yardstick").gains(runs)["ours"]
    # Differences .10 and .12: mean .11, error .01, Student's t with one degree of freedom 12.706.
    assert gain["alpha"] == pytest.approx(0.11)
    assert gain["half"] == pytest.approx(0.12706, rel=1e-4)
    assert gain["seeds"] == 2


def test_prompts_end_with_the_user(chatty_target: Path, tmp_path: Path) -> None:
    write_domain(tmp_path / "talk", 30)
    tokenizer = load_tokenizer(str(chatty_target))
    prompts = bench("yardstick").domain_prompts(tmp_path / "talk", tokenizer, 60, 30)
    texts = [tokenizer.decode(ids).strip() for ids in prompts]
    assert len(set(texts)) == 30
    assert {text.splitlines()[-1].split()[0] for text in texts} == {"how", "hello", "and"}


def test_a_recipe_follows_the_clock() -> None:
    module = bench("yardstick")
    recipe = module.Recipe.parse(
        ["lr=0.1", "warmup=0.1", "final=0.2", "warm_ratio=0.5", "objective=tv+ce", "autocast=true"]
    )
    assert recipe.autocast is True
    assert recipe.lr_at(0.05) == pytest.approx(0.05)
    assert recipe.lr_at(0.1) == pytest.approx(0.1)
    assert recipe.lr_at(1.0) == pytest.approx(0.02)
    assert recipe.objective_at(0.4).weights == {"forward_kl": 1.0}
    assert recipe.objective_at(0.6).weights == {"tv": 1.0, "ce": 1.0}
    for odd in ("speed=3", "lr=fast", "autocast=maybe"):
        with pytest.raises(UserError, match=odd.partition("=")[0]):
            module.Recipe.parse([odd])


def test_the_races_prompts_are_function_heads(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("alpha_race")
    heads = [("m.py", f"def f{number}(a):") for number in range(9)] + [("m.py", "def " + "long" * 50)]
    monkeypatch.setattr(module.stdlib, "function_head_rows", lambda heldout: heads)
    prompts = module.head_prompts(load_tokenizer(str(tiny_target)), True, 20, 5)
    assert len({tuple(prompt) for prompt in prompts}) == 5


def test_the_race_has_everyone_and_intervals(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, out = bench("alpha_race"), tmp_path / "race.json"
    monkeypatch.setattr(
        module, "head_prompts", lambda _t, heldout, _m, count: [[9, 3 + n + 50 * heldout] for n in range(count)]
    )
    options = {
        "seeds": 2,
        "target": str(tiny_target),
        "train_prompts": 12,
        "heldout_prompts": 4,
        "max_tokens": 8,
        "max_prompt_tokens": 40,
        "cache": tmp_path / "cache",
        "threads": 0,
        "out": out,
    }
    module.main(
        ["batch=4"], minutes=0.002, contestants="ours,forward_kl,trl_gkd", compare="minutes", steps=1, **options
    )
    result = json.loads(out.read_text())
    expected = {"ours", "forward_kl", "trl_gkd"}
    assert set(result["summary"]) == expected
    assert {(run["name"], run["seed"]) for run in result["runs"]} == {(name, s) for name in expected for s in (0, 1)}
    gains = [
        by[("ours", seed)]["sampled"] - by[("forward_kl", seed)]["sampled"]
        for by in [{(run["name"], run["seed"]): run for run in result["runs"]}]
        for seed in (0, 1)
    ]
    gain = result["summary"]["forward_kl"]["sampled"]
    assert gain["reference_gain"] == pytest.approx(sum(gains) / 2)
    assert gain["reference_gain_half_width"] == pytest.approx(module.interval(gains)[1])
    module.main(["batch=4", "k=4096"], minutes=1, contestants="", compare="store", steps=4, **options)
    result = json.loads(out.read_text())
    assert {run["steps"] for run in result["runs"]} == {4}
    # Everything is kept: what differs is the rounding of the store.
    assert abs(result["summary"]["store"]["sampled"]["reference_gain"]) < 2e-3


def test_intervals_are_students() -> None:
    module = bench("alpha_race")
    mean, half = module.interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.302653 / math.sqrt(3), rel=1e-5))
    assert module.interval([5.0]) == (5.0, None)
    runs = [
        {"name": name, "seed": seed, "sampled": value + seed, "greedy": 0.0}
        for name, value in (("a", 0.5), ("b", 0.2))
        for seed in (0, 1)
    ]
    gain = module.summary(runs, "a")["b"]["sampled"]
    # Seeds are paired: their own spread is not in the gain.
    assert gain["reference_gain"] == pytest.approx(0.3)
    assert gain["reference_gain_half_width"] == pytest.approx(0.0, abs=1e-9)
