"""What the end of a run takes over from its checkpoints' judgements."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distill.config.load import load_config
from distill.config.sections import ParallelConfig
from distill.models.target import Target
from distill.verdict import conclusion
from distill.verdict.decoding import Decoding
from speculative.measure.measured import DRAFT, UNDISTILLED


class _Asked(Exception):
    pass


@pytest.mark.parametrize("parallel", [None, ParallelConfig(tokens=8)])
def test_a_baseline_judged_as_untrained_blocks_is_judged_again_token_by_token(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch, parallel: ParallelConfig | None
) -> None:
    config = load_config(tiny_run / "config.yaml")
    judge = config.judge.model_copy(update={"live": "never"})
    student = config.student.model_copy(update={"parallel": parallel})
    config = config.model_copy(update={"judge": judge, "student": student})
    seen: dict[str, Any] = {}

    def gather_by_replay(_: Any, drafts: Any, known: Any) -> None:
        seen.update(known=known, drafting=[one.draft.drafting for one in drafts])
        raise _Asked

    monkeypatch.setattr(conclusion, "gather_by_replay", gather_by_replay)
    loaded = conclusion.load_model

    def with_mask(*asked: Any) -> Any:
        model = loaded(*asked)
        model.config.pard_token = 0
        return model

    monkeypatch.setattr(conclusion, "load_model", with_mask)
    answers = SimpleNamespace(
        run=SimpleNamespace(config=config, folder=config.folder),
        target=Target(config.target, torch.device("cpu")),
        heldout={},
        context=64,
        sets=SimpleNamespace(heldout=[]),
        tokenizer=None,
        past=lambda rule: [],
    )
    with pytest.raises(_Asked):
        conclusion.result_of(answers, {}, Decoding())  # type: ignore[arg-type]
    assert (UNDISTILLED in seen["known"]) == (parallel is None)
    assert DRAFT in seen["known"]
    assert seen["drafting"] == ["autoregressive", "parallel" if parallel else "autoregressive"]
