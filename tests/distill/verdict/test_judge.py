"""The judge of checkpoints: replay scores them, prompts decoded live prove it, parts are shared and kept."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import perturbed, prompts_of, tiny_model
from tiny_training import fresh_accelerator, run_config

from distill.config.layout import JUDGEMENT, JUDGING, PROGRESS, step_folder
from distill.loss.definitions import Objective
from distill.run.run import Run
from distill.training.module import DraftModule
from distill.verdict import judge as module
from distill.verdict.judge import DraftJudge
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, Drafting
from speculative.errors import UserError
from speculative.evaluate import decode_heldout, judge, judge_by_replay
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

LENGTHS = [5, 8, 6, 7, 9, 5, 11, 6, 4, 7]


@pytest.fixture(scope="module")
def setting() -> Any:
    target = tiny_model()
    target.config.pard_token = 0
    settings = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), 12, (), 0)
    heldout = decode_heldout(target, prompts_of(LENGTHS), settings, "all")
    whole: Any = SimpleNamespace(
        model=target,
        saved_dtype=torch.float32,
        dtype=torch.float32,
        device=target.device,
        loaded=lambda: contextlib.nullcontext(target),
        single_load=contextlib.nullcontext,
    )
    return whole, DraftModule(perturbed(target), Objective({"ce": 1.0})), settings, heldout


def judge_of(
    setting: Any, folder: Path, live: str = "checkpoint", drafting: Drafting = "autoregressive", **judging: Any
) -> DraftJudge:
    target, _, settings, heldout = setting
    config = run_config(folder, judge={"gamma": 3, "live": live} | judging)
    run = Run(config, fresh_accelerator(folder))
    for step in (0, 2, 4, 6):
        (made := step_folder(run.folder, step)).mkdir(parents=True, exist_ok=True)
        (made / PROGRESS).touch()
    return DraftJudge(run, settings, target, {Rule.named("sample"): heldout}, drafting)


def judged(judge: DraftJudge, module: DraftModule, step: int = 0) -> dict[str, Any]:
    return judge(step, module, step_folder(judge.run.folder, step))


@pytest.mark.parametrize(("drafting", "offsets"), [("autoregressive", None), ("parallel", 3)])
def test_replay_judges_the_kind_of_block_that_is_served(
    setting: Any, tmp_path: Path, drafting: Drafting, offsets: int | None
) -> None:
    _, module, settings, heldout = setting
    judge = judge_of(setting, tmp_path, "end", drafting)
    scores = score_tokens(module.exported(), heldout, settings.sampling, offsets=offsets)
    tau = sum(map(len, scores)) / expected_blocks_of(scores, Rule.named("sample"), (3,)).sum()
    record = judged(judge, module)
    assert record["score"] == record["tau"] == pytest.approx(tau)
    assert judge.replay_now(module)["tau"] == pytest.approx(tau)
    assert "live_check" not in record


def test_both_kinds_agree_in_the_first_token_and_each_with_its_own_replay(setting: Any, tmp_path: Path) -> None:
    records = [
        judged(judge_of(setting, tmp_path / kind, "checkpoint", kind), setting[1])  # type: ignore[arg-type]
        for kind in ("autoregressive", "parallel")
    ]
    assert records[0]["alpha"] == pytest.approx(records[1]["alpha"]), "the first token of a block is the same"
    assert records[1]["replay"][1] == pytest.approx(records[0]["replay"][1])
    assert records[1]["replay"][3] != pytest.approx(records[0]["replay"][3], rel=1e-4)
    assert all(record["live_check"]["replay"]["agrees"] for record in records)


def test_parts_give_what_the_whole_text_gives(setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow twin: `judge_by_replay` and `judge` of all prompts at once."""
    target, draft, settings, heldout = setting
    with monkeypatch.context() as patch:
        patch.setattr(module, "DECODED_TOGETHER", 3)
        patch.setattr("speculative.measure.token_scores.ROWS_PER_FORWARD", 4)
        record = judged(judge_of(setting, tmp_path), draft)
    whole = judge_by_replay(Draft(draft.exported()), heldout, settings).record()
    # Batches of other sizes round float32 differently.
    for key in ("alpha", "alpha_ci", "tau", "tau_ci", "replay"):
        assert record[key] == pytest.approx(whole[key], rel=1e-6), key
    for key in ("accept_sums", "tokens", "blocks"):
        assert record["per_response"][key] == pytest.approx(whole["per_response"][key], rel=1e-6), key
    assert (record["prompts"], record["tokens"]) == (whole["prompts"], whole["tokens"])
    live, _ = judge(target.model, Draft(draft.exported()), heldout, settings)
    assert record["live_check"]["tau"] == pytest.approx(live.tau)
    assert record["live_check"]["prompts"] == len(LENGTHS)
    assert record["live_check"]["replay"]["z"] == pytest.approx(live.replay_check.z, rel=1e-4)


def test_a_killed_judge_does_not_repeat_what_is_done(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DECODED_TOGETHER", 4)
    monkeypatch.setattr("speculative.measure.token_scores.ROWS_PER_FORWARD", 4)
    expected = judged(judge_of(setting, tmp_path / "whole"), setting[1])
    for kills, name in enumerate(("replay_sums", "replay_sums", "decode_live", "decode_live")):
        real, calls = getattr(module, name), []

        def killed(*asked: Any, real: Any = real, calls: list[int] = calls, **more: Any) -> Any:
            if calls:
                raise KeyboardInterrupt
            calls.append(1)
            return real(*asked, **more)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, killed)
            with pytest.raises(KeyboardInterrupt):
                judged(judge_of(setting, tmp_path / "killed"), setting[1])
        done = list((step_folder(tmp_path / "killed" / "run", 0) / JUDGING).iterdir())
        assert len(done) == (1, 2, 4, 5)[kills], "one part more each time; replay needs three, live decoding three"
    assert judged(judge_of(setting, tmp_path / "killed"), setting[1]) == expected


def test_a_rank_without_work_does_not_load_the_target(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts are there, so this rank has none to make; the warnings come with the parts."""
    monkeypatch.setattr(module, "DECODED_TOGETHER", 4)
    monkeypatch.setattr(module, "speed_warnings", lambda *models: ["slow here"])
    expected = judged(judge_of(setting, tmp_path), setting[1])
    whole, *others = setting
    without = SimpleNamespace(**{name: value for name, value in vars(whole).items() if name != "loaded"})
    assert judged(judge_of((without, *others), tmp_path), setting[1]) == expected
    assert expected["warnings"].count("slow here") == 1


def test_a_target_that_does_not_fit_beside_training_is_one_line(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(module, "decode_live", full)
    with pytest.raises(UserError, match=r"2\.00 GiB\); lower judge\.batch_size or set judge\.live: end"):
        judged(judge_of(setting, tmp_path), setting[1])


def test_parts_of_other_prompts_are_not_taken_for_these(setting: Any, tmp_path: Path) -> None:
    """judge.live_prompts may change when a killed run continues."""
    judged(judge_of(setting, tmp_path / "run", live_prompts=4), setting[1])
    continued = judged(judge_of(setting, tmp_path / "run"), setting[1])
    assert continued == judged(judge_of(setting, tmp_path / "whole"), setting[1])


def test_each_checkpoint_decodes_the_next_prompts_until_all_had_a_turn(
    setting: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = module.decode_live

    def noted(target: Any, draft: Any, prompts: Any, *rest: Any) -> Any:
        seen.extend(one.key for one in prompts)
        return real(target, draft, prompts, *rest)

    monkeypatch.setattr(module, "decode_live", noted)
    judge = judge_of(setting, tmp_path, live_prompts=4)
    turns = []
    for step in (0, 2, 6):  # 4 was saved at an interrupt and never judged
        seen.clear()
        record = judged(judge, setting[1], step=step)
        assert record["live_check"]["prompts"] == 4
        (step_folder(judge.run.folder, step) / JUDGEMENT).write_text(json.dumps(record), encoding="utf-8")
        turns.append(set(seen))
    keys = {one.key for one in setting[3]}
    assert turns[0] | turns[1] | turns[2] == keys
    assert len(turns[0] | turns[1]) == 8


def test_the_line_of_a_checkpoint_says_how_each_number_was_obtained(setting: Any, tmp_path: Path) -> None:
    judge = judge_of(setting, tmp_path)
    record = json.loads(json.dumps(judged(judge, setting[1])))
    line = judge.headline(record)
    check = record["live_check"]
    assert f"tau {record['tau']:.2f} [" in line
    assert "] at gamma 3 by replay; live" in line
    assert f"live {check['tau']:.2f} on 10 prompts (replay" in line
    assert f"z {check['replay']['z']:+.1f})" in line
    for live in ("end", "never"):
        judge = judge_of(setting, tmp_path / live, live)
        said = judge.headline(json.loads(json.dumps(judged(judge, setting[1]))))
        assert said.endswith(f"by replay; no prompt decoded live (judge.live: {live})")


def test_text_without_a_token_is_refused(setting: Any, tmp_path: Path) -> None:
    judge = judge_of(setting, tmp_path)
    judge.heldout = {Rule.named("sample"): []}
    with pytest.raises(UserError, match="no held-out response"):
        judged(judge, setting[1])
