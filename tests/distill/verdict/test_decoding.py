"""A verdict's prompts, decoded in groups that ranks share and that a killed run keeps."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_models import perturbed, prompts_of, tiny_model
from tiny_training import fresh_accelerator, run_config

from distill.config.layout import JUDGING, PROPOSALS
from distill.run.run import Run
from distill.verdict import decoding as module
from distill.verdict.decoding import Decoding, NamedDraft
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

TARGET = tiny_model()
BEST = NamedDraft("draft", "not read here", 2, Draft(perturbed(TARGET)))
SETTINGS = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), 12, (), 0)
PROMPTS = prompts_of([5, 8, 6, 7, 9, 5, 11])


def dealt(folder: Path) -> Decoding:
    run = Run(run_config(folder), fresh_accelerator(folder))
    run.folder.mkdir(parents=True, exist_ok=True)
    return Decoding(run)


def rows_of(log: Path) -> list[dict[str, Any]]:
    """Sorted, with probabilities rounded, because a batch of other rows rounds differently."""
    rows = [
        {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
        for row in pq.read_table(log).to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["prompt"], row["block"], row["place"]))


def test_groups_say_what_one_call_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DECODED_TOGETHER", 3)
    whole, parts = tmp_path / "whole.parquet", tmp_path / PROPOSALS
    together = Decoding()(TARGET, BEST, PROMPTS, SETTINGS, 16, whole)
    decoding = dealt(tmp_path)
    found = decoding(TARGET, BEST, PROMPTS, SETTINGS, 16, parts)
    assert [(one.key, one.response_ids, one.blocks, one.accepted_counts) for one in found] == [
        (one.key, one.response_ids, one.blocks, one.accepted_counts) for one in together
    ]
    assert [one.key for one in found] == [key for key, _ in PROMPTS]
    assert rows_of(parts) == rows_of(whole)
    assert (tmp_path / "run" / JUDGING).exists()
    decoding.end()
    assert not (tmp_path / "run" / JUDGING).exists()


def test_a_killed_verdict_decodes_what_is_left_and_takes_no_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DECODED_TOGETHER", 3)
    real, seen = module.decode, list[str]()

    def noted(target: Any, drafter: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        if len(seen) == 6:
            raise KeyboardInterrupt
        seen.extend(key for key, _ in prompts)
        return real(target, drafter, prompts, *rest, **options)

    monkeypatch.setattr(module, "decode", noted)
    with pytest.raises(KeyboardInterrupt):
        dealt(tmp_path)(TARGET, BEST, PROMPTS, SETTINGS, 16, tmp_path / PROPOSALS)
    seen.append("started again")
    found = dealt(tmp_path)(TARGET, BEST, PROMPTS, SETTINGS, 16, tmp_path / PROPOSALS)
    assert (len(seen), seen[-1]) == (8, max(PROMPTS, key=lambda one: len(one[1]))[0]), "the last group has one prompt"
    assert len({row["prompt"] for row in rows_of(tmp_path / PROPOSALS)}) == len(PROMPTS)
    # The target alone, another draft, another gamma, and the same without a log are other jobs.
    other = NamedDraft("draft", BEST.path, 2, Draft(perturbed(TARGET, scale=0.5)))
    for one, gamma in ((None, 0), (other, 3), (BEST, 2), (BEST, 3)):
        before = len(seen)
        dealt(tmp_path)(TARGET, one, PROMPTS, SETTINGS.under(Rule.named("sample"), gamma), 16)
        assert len(seen) == before + len(PROMPTS)
    assert dealt(tmp_path)(TARGET, BEST, PROMPTS, SETTINGS, 16, tmp_path / PROPOSALS) == found
    assert len(seen) == 8 + 4 * len(PROMPTS), "all parts are there"
