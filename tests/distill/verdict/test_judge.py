"""The judge of checkpoints: a parallel draft is judged as the blocks that it will be served in, live and by replay."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import perturbed, prompts_of, tiny_model

from distill.config.sections import JudgeConfig
from distill.loss.definitions import Objective
from distill.training.module import DraftModule
from distill.verdict.judge import DraftJudge
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Drafting
from speculative.evaluate import frozen_responses
from speculative.measure.replay import expected_blocks_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.sampling import SamplingSettings


@pytest.fixture(scope="module")
def setting() -> Any:
    target = tiny_model()
    target.config.pard_token = 0
    settings = DecodeSettings(SamplingSettings(1.0), 3, "sample", 12, (), 0)
    heldout = frozen_responses(target, prompts_of([5, 8, 6, 7]), settings, "all")
    whole: Any = SimpleNamespace(model=target, saved_dtype=torch.float32, dtype=torch.float32, device=target.device)
    return whole, DraftModule(perturbed(target), Objective({"ce": 1.0})), settings, heldout


def judge_of(setting: Any, drafting: Drafting, live: str) -> DraftJudge:
    target, _, settings, heldout = setting
    judging = JudgeConfig(gamma=3, live=live)  # type: ignore[arg-type]
    return DraftJudge(judging, settings, target, {"sample": heldout}, drafting)


@pytest.mark.parametrize(("drafting", "offsets"), [("autoregressive", None), ("parallel", 3)])
def test_replay_judges_the_kind_of_block_that_is_served(setting: Any, drafting: Drafting, offsets: int | None) -> None:
    _, module, settings, heldout = setting
    judge = judge_of(setting, drafting, "end")
    scores = score_tokens(module.exported(), heldout, settings.sampling, offsets=offsets)
    tau = sum(map(len, scores)) / expected_blocks_of(scores, "sample", (3,)).sum()
    assert judge(0, module)["score"] == pytest.approx(tau)
    assert judge.dial(module)["tau"] == pytest.approx(tau)


def test_both_kinds_agree_in_the_first_token_and_each_with_its_own_replay(setting: Any) -> None:
    records = [judge_of(setting, drafting, "checkpoint")(0, setting[1]) for drafting in ("autoregressive", "parallel")]
    assert records[0]["alpha"] == pytest.approx(records[1]["alpha"]), "the first token of a block is the same"
    assert records[1]["replay"][1] == pytest.approx(records[0]["replay"][1])
    assert records[1]["replay"][3] != pytest.approx(records[0]["replay"][3], rel=1e-4)
    assert all(record["live"] and record["replay_check"]["agrees"] for record in records)
