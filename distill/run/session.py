"""What every program opens first: the accelerator, the context that fits, the target, the self-checks."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from transformers import PreTrainedModel

from data.files import write_json
from data.responses.respond import RenderedPrompt
from distill.config.run import RunConfig
from distill.config.sections import TargetConfig
from distill.models.target import ServedTarget
from distill.run.responses import decode_settings
from speculative.measure.self_checks import self_checks


def new_accelerator(**options: Any) -> Accelerator:
    """An Accelerator on the best device that has float64, which the sums need: Apple's GPU does not, its CPU does."""
    # The other ranks wait while the main process judges: for longer than the usual ten minutes on real prompts.
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=12))
    return Accelerator(cpu=torch.backends.mps.is_available(), kwargs_handlers=[patience], **options)


def load_target(config: TargetConfig, device: torch.device) -> tuple[PreTrainedModel, Any, torch.dtype]:
    """(target on its device, its tokenizer, the dtype its weights are saved in).

    Raises:
        UserError: not there, not loadable, hub not reachable.
    """
    target = ServedTarget(config, device)
    return target.model, target.tokenizer, target.saved_dtype


def context_limit(config: RunConfig, *limits: int | None) -> int:
    """Tokens of prompt + response that fit: the smallest limit of the models, or a lower `data.context_length`."""
    return min([limit for limit in (*limits, config.data.context_length) if limit], default=1 << 20)


def positions_of(model: PreTrainedModel) -> int | None:
    """The context that a model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_instrument(
    config: RunConfig, accelerator: Accelerator, target: ServedTarget, prompts: Sequence[RenderedPrompt]
) -> dict[str, Any]:
    """The self-checks on the first held-out prompts, once per run.

    Raises:
        SelfCheckError: the judge contradicts itself.
    """
    path = config.folder / "self_checks.json"
    found = path.exists()
    accelerator.wait_for_everyone()  # all ranks have looked before one of them writes
    if found:
        return json.loads(path.read_text(encoding="utf-8"))
    keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts[:8]]
    result = self_checks(target.model, keyed, decode_settings(config, target, config.judge.gamma, config.judge_rule))
    if accelerator.is_main_process:
        write_json(path, result)
    accelerator.print(
        f"self-checks: target as its own draft alpha {result['alpha_live']:.3f} live, {result['alpha_replay']:.3f} replay; "
        f"speculative greedy = plain greedy on {result['greedy_equal']}/{result['prompts']} prompts"
    )
    accelerator.wait_for_everyone()
    return result
