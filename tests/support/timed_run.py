"""What the engine's clock needs of a run."""

from pathlib import Path

from distill.config.layout import VERDICT
from distill.run.verdict_record import Verdict


def write_verdict(run: Path, rule: str) -> None:
    """A verdict, which `time` and `readback --speed` need: only its tau by gamma matters to them."""
    verdict = Verdict(
        version="1",
        rule=rule,
        gamma=3,
        prompts=40,
        tokens=1600,
        outcome="no_speed",
        headline="",
        drafts=[{"way": "draft"}],
        replay={0: 1.0, 1: 1.6, 2: 2.0, 3: 2.3},
    )
    (run / VERDICT).write_text(verdict.model_dump_json())
