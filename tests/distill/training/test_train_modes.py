"""Stored signals in a whole run; warm-up, checkpoints that disagree and spikes in a tiny loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import ScriptedJudge, fit, make_loop, run_config

from distill import respond as respond_command
from distill import train
from distill.config.layout import list_steps
from distill.config.load import load_config
from distill.models.target import Target
from distill.run.verdict_record import load_verdict
from distill.training.trainer import MOST_SKIPS, NotFinite, Trainer
from distill.verdict import conclusion
from speculative.measure.measured import DRAFT
from speculative.measure.self_checks import SelfCheckError

# 61 examples: an epoch of four steps is over when the run ends.
STORED = ["signal.k=8", "judge.live_prompts=3", "train.steps=6", "judge.every=3"]


class TestStoredSignals:
    @pytest.fixture(scope="class")
    def stored(self, tiny_config: Path) -> Path:
        """A run trained from a store, its target in memory for the responses, to judge and for the verdict, but not in a step."""
        overrides = ["name=stored", "signal.source=store", *STORED]
        facts = respond_command.run(tiny_config, overrides)
        assert facts is not None
        in_memory: list[bool] = []
        started: list[Target] = []
        make, step = Target.__init__, Trainer.step

        def noting(self: Target, *arguments: Any) -> None:
            make(self, *arguments)
            started.append(self)

        def watching(self: Trainer, window: Any) -> Any:
            in_memory.append(any(target._model is not None for target in started))
            return step(self, window)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Target, "__init__", noting)
            patched.setattr(Trainer, "step", watching)
            patched.setattr(conclusion, "write_page", lambda run: None)
            patched.setattr(conclusion, "plot_run", lambda run: None)
            assert train.main([str(tiny_config), *overrides]) == 0
        assert in_memory == [False] * 6
        return load_config(tiny_config, overrides).folder

    def test_checkpoints_are_judged_by_replay_and_proved_with_a_target_loaded_for_it(self, stored: Path) -> None:
        verdict = load_verdict(stored)
        assert [record.live for record in verdict.checkpoints] == [False] * 3
        checks = [record.live_check for record in verdict.checkpoints]
        assert all(check is not None and check.prompts == 3 and check.replay.agrees for check in checks)
        row = verdict.judged(DRAFT)
        assert row.how["tau"] == "live"
        assert row.tau_ci[0] <= row.tau <= row.tau_ci[1]
        best = next(record for record in verdict.checkpoints if record.step == verdict.drafts[-1].step)
        assert best.tau == best.replay[verdict.gamma]

    def test_metrics_say_how_low_the_estimate_of_alpha_may_be(self, stored: Path) -> None:
        lines = [json.loads(line) for line in (stored / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "loss" in line]
        assert all(0 < line["alpha_slack"] < 1 for line in steps)
        assert set(steps[0]["seconds"]) == {"data", "teacher", "student", "loss", "optimizer"}

    def test_a_store_must_be_there_and_whole(
        self, tiny_config: Path, stored: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train.main([str(tiny_config), "name=none-there", "signal.source=store"]) == 2
        assert "understudy respond" in capsys.readouterr().err
        assert not [*(stored.parent / "none-there").glob("responses/*/*")], "refused before a prompt was answered"
        shard = next((stored / "responses" / "train").glob("topk-*"))
        shard.write_bytes(shard.read_bytes()[:-1])
        assert train.main([str(tiny_config), "name=stored", "signal.source=store", *STORED]) == 2
        said = capsys.readouterr().err
        assert shard.name in said
        assert "Traceback" not in said


def test_warm_up_has_its_own_objective(tmp_path: Path) -> None:
    loop = make_loop(
        run_config(tmp_path, loss={"name": "tv", "warmup": {"name": "forward_kl", "ratio": 0.5}}, train={"steps": 6})
    )
    seen = []
    for step in range(6):
        loop.progress.step = step
        loop.step(loop.micro_batches(step))
        seen.append(next(iter(loop.module.objective.weights)))
    assert seen == ["forward_kl"] * 3 + ["tv"] * 3


class MissingJudge(ScriptedJudge):
    """Live decoding and replay differ at these steps, or new responses and stored ones."""

    missed, anew = (2, 4, 5), False

    def __call__(self, step: int, *asked: Any) -> dict[str, Any]:
        agrees = step not in self.missed
        if self.anew:
            fresh = {"prompts": 6, "tokens": 60, "alpha": 0.5, "stored_alpha": 0.8, "z": -5.0, "agrees": agrees}
            return super().__call__(step, *asked) | {"fresh_check": fresh}
        check = {
            "prompts": 4,
            "tau": 2.0,
            "tau_ci": [1.5, 2.5],
            "accepted_per_drafted": 0.5,
            "replay": {"z": 9.0, "agrees": agrees},
        }
        return super().__call__(step, *asked) | {"live_check": check}


@pytest.mark.parametrize("anew", [False, True])
def test_three_checkpoints_at_which_live_decoding_and_replay_differ_stop_a_run(
    tmp_path: Path, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MissingJudge, "anew", anew)
    config = run_config(tmp_path, train={"steps": 8}, judge={"every": 1})
    with pytest.raises(SelfCheckError, match=r"at 3 checkpoints \(steps 2, 4, 5\).*judge.live: end"):
        fit(make_loop(config, MissingJudge()))
    assert list_steps(config.folder)[-1] == 5
    judge = config.judge.model_copy(update={"live": "end"})
    loop = make_loop(config.model_copy(update={"judge": judge}), MissingJudge())
    fit(loop)
    assert loop.judge.steps == [6, 7, 8]


class TestSpikes:
    def spiked(self, tmp_path: Path) -> Trainer:
        loop = make_loop(run_config(tmp_path, optim={"lr": 1e-2}, train={"steps": 100}))
        for _ in range(16):
            loop.spikes.is_spike(0.5)
        return loop

    def test_a_spike_is_skipped_with_a_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        loop = self.spiked(tmp_path)
        before = {name: weight.clone() for name, weight in loop.module.state_dict().items()}
        loop.accelerator.clip_grad_norm_ = lambda *_: torch.tensor(700.0)  # type: ignore[method-assign]
        result = loop.step(loop.micro_batches(0))
        assert result.skipped
        torch.testing.assert_close(dict(loop.module.state_dict()), before, rtol=0, atol=0)
        said = capsys.readouterr().err
        assert "gradient norm 700 is 1400 times the recent median; update skipped" in said
        del loop.accelerator.clip_grad_norm_
        assert not loop.step(loop.micro_batches(1)).skipped

    def test_spikes_without_end_stop_the_run(self, tmp_path: Path) -> None:
        loop = self.spiked(tmp_path)
        loop.accelerator.clip_grad_norm_ = lambda *_: torch.tensor(700.0)  # type: ignore[method-assign]
        for step in range(MOST_SKIPS - 1):
            loop.step(loop.micro_batches(step))
        with pytest.raises(NotFinite, match=r"20 updates skipped in a row.*no checkpoint yet.*lower optim.lr"):
            loop.step(loop.micro_batches(MOST_SKIPS))
