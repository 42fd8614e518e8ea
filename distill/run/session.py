"""What every program opens first: the accelerator, the context that fits, the target, the self-checks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from transformers import PreTrainedModel

from data.files import write_bytes, write_json
from data.prompts.template import on_day
from data.responses.rendered import RenderedPrompt
from distill.config.layout import DAY, RESPONSES, SELF_CHECKS
from distill.config.run import RunConfig
from distill.models.draft import as_exported, load_draft
from distill.models.student import NO_LIMIT, run_context
from distill.models.target import Target
from distill.run.prompts import PromptSets, load_prompts
from distill.run.responses import decode_settings
from speculative.decoder.responses import DecodeSettings
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.measure.self_checks import self_checks
from speculative.rules.rule import Rule

# Held-out prompts that the self-checks decode.
CHECKED_PROMPTS = 8


def new_accelerator(**options: Any) -> Accelerator:
    """An Accelerator on the best device that has float64, which the sums need: Apple's GPU does not, its CPU does."""
    # The other ranks wait while the main process judges: for longer than the usual ten minutes on real prompts.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=12))
    return Accelerator(cpu=torch.backends.mps.is_available(), kwargs_handlers=[patience], **options)


def dated_tokenizer(target: Target, run: Path, accelerator: Accelerator | None = None) -> Any:
    """The target's tokenizer as a run renders its prompts: a template that writes the date writes that of the run's first start.

    All ranks of a program that makes responses call it, with the accelerator: the main process writes the day down.
    """
    path, day = run / RESPONSES / DAY, date.today()
    if path.exists():
        day = date.fromisoformat(path.read_text(encoding="utf-8").strip())
    elif (
        accelerator is not None
        and accelerator.is_main_process
        and on_day(target.tokenizer, day) is not target.tokenizer
    ):
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, f"{day}\n".encode())
    return on_day(target.tokenizer, broadcast_object_list([day])[0] if accelerator is not None else day)


def run_prompts(
    config: RunConfig, target: Target, accelerator: Accelerator, heldout: int | None = None
) -> tuple[int, Any, PromptSets]:
    """(tokens of prompt and response that a run's sequences may have, the tokenizer that renders its prompts, the prompts). All ranks call it.

    ``heldout``: how many held-out prompts; None = those that judge.

    Raises:
        UserError: see `run_context` and `load_prompts`.
    """
    context = run_context(config, target.facts.context_length)
    tokenizer = dated_tokenizer(target, config.folder, accelerator)
    sets = load_prompts(
        config.data, tokenizer, context, config.serving.max_tokens, heldout or config.judge.prompts, run=config.folder,
        accelerator=accelerator,
    )  # fmt: skip
    return context, tokenizer, sets


def context_limit(*limits: int | None) -> int:
    """Tokens of prompt + response that fit: the smallest of the limits that are known (models', `data.context_length`)."""
    return min([limit for limit in limits if limit], default=NO_LIMIT)


@dataclass(frozen=True)
class Pair:
    """A draft beside its target as they would be served, and held-out prompts that both have room for.

    `context`: tokens of prompt and response that both take. `settings`: plain decoding at the serving settings.
    """

    target: Target
    draft: PreTrainedModel
    context: int
    prompts: list[RenderedPrompt]
    settings: DecodeSettings

    @property
    def keyed(self) -> list[tuple[str, tuple[int, ...]]]:
        """The prompts as the decoder takes them."""
        return [(prompt.prompt_id, prompt.prompt_ids) for prompt in self.prompts]


def open_pair(config: RunConfig, path: str, prompts: int, rule: Rule = "greedy") -> Pair:
    """A config's target, a draft for it (run, checkpoint, directory, hub id), and its first held-out prompts by content hash.

    Raises:
        UserError: a rule that contradicts the temperature, weights that are elsewhere, no draft there or of another
            vocabulary, no prompts.
    """
    if rule != "greedy" and config.serving.temperature == 0:
        raise UserError(f"--rule {rule} samples from the target, but serving.temperature is 0; use --rule greedy")
    if prompts < 1:
        raise UserError(f"--prompts {prompts}: give at least 1")
    target = Target(config.target, new_accelerator().device)
    draft = as_exported(load_draft(path, target), target)
    positions = (max_positions(model.config) for model in (target.model, draft))
    context = context_limit(*positions, config.data.context_length)
    tokenizer = dated_tokenizer(target, config.folder)
    sets = load_prompts(
        config.data, tokenizer, context, config.serving.max_tokens, prompts, heldout_only=True, run=config.folder
    )
    return Pair(target, draft, context, sets.heldout, decode_settings(config.serving, config.seed, target))


def check_instrument(
    config: RunConfig,
    accelerator: Accelerator,
    target: Target,
    prompts: Sequence[RenderedPrompt],
    settings: DecodeSettings,
) -> dict[str, Any]:
    """The self-checks on the first held-out prompts, once per run, at most `judge.batch_size` of them at once.

    Raises:
        SelfCheckError: the judge contradicts itself.
    """
    path = config.folder / SELF_CHECKS
    looks = accelerator.is_main_process and path.exists()
    (found,) = broadcast_object_list([json.loads(path.read_text(encoding="utf-8")) if looks else None])
    if found is not None:
        return found
    keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts[:CHECKED_PROMPTS]]
    result = self_checks(target.model, keyed, settings, batch_size=config.judge.batch_size)
    if accelerator.is_main_process:
        write_json(path, result)
    accelerator.print(
        f"self-checks: target as its own draft alpha {result['alpha_live']:.3f} live, {result['alpha_replay']:.3f} replay; "
        f"speculative greedy = plain greedy on {result['greedy_equal']}/{result['prompts']} prompts"
    )
    for warning in result["warnings"]:
        accelerator.print(f"warning: {warning}")
    accelerator.wait_for_everyone()
    return result
