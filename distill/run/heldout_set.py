"""The stored held-out responses of a finished run, on which any draft can be judged without the target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from data.responses.store import Store
from distill.config.layout import HELDOUT, HELDOUT_GREEDY, RESPONSES
from distill.config.load import load_run
from distill.config.run import RunConfig
from distill.models.draft import served_draft
from distill.models.target import Target
from distill.run.responses import heldout_responses
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings


@dataclass(frozen=True)
class HeldoutSet:
    """Held-out responses of a run, how the target sampled them, and its tokenizer and facts; its weights load on first use."""

    run: Path
    config: RunConfig
    rule: Rule
    responses: list[HeldoutResponse]
    sampling: SamplingSettings
    target: Target
    manifest: dict[str, Any]

    def draft(self, path: str) -> PreTrainedModel:
        """Load a draft (run, checkpoint, directory, hub id) as served with this target; UserError if missing or of another vocabulary."""
        return served_draft(path, self.target)


def load_heldout_set(run: Path, rule: str | None = None, trusted: bool = False) -> HeldoutSet:
    """The held-out text of a run for a rule, by default its judge.rule. ``trusted``: see `load_run`.

    Raises UserError: no run there, or held-out prompts without responses.
    """
    config = load_run(run, trusted)
    chosen = Rule.named(rule) if rule else config.judge_rule
    folder = run / RESPONSES / (HELDOUT_GREEDY if chosen.greedy else HELDOUT)
    if not folder.is_dir():
        have = sorted(path.name for path in (run / RESPONSES).glob("heldout*"))
        raise UserError(
            f"{folder}: is missing; this run has held-out responses only in {', '.join(have) or 'no folder'}; "
            "choose a rule for these, or finish the run"
        )
    store = Store(folder)
    manifest = dict(store.manifest())
    return HeldoutSet(
        run,
        config,
        chosen,
        heldout_responses(store.read()),
        SamplingSettings(**manifest["sampling"]),
        Target(config.target, torch.device("cuda" if torch.cuda.is_available() else "cpu"), run),
        manifest,
    )
