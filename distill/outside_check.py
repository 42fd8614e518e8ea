"""A second opinion on an exported draft: transformers' own assisted generation on held-out prompts, beside ours."""

from pathlib import Path
from typing import Any

from distill.assisted import check_with_transformers
from distill.config import RunConfig
from distill.prompts import load_prompts
from distill.responses import decode_settings
from distill.served_draft import load_draft
from distill.train import context_limit, load_target, new_accelerator, positions_of
from distill.validate import served_copy
from speculative.decode import decode
from speculative.drafters import ModelDrafter
from speculative.errors import UserError
from speculative.metrics import live_metrics


def outside_check(config: RunConfig, exported: Path, prompts: int, gamma: int) -> dict[str, Any]:
    """Greedy tokens and tau of `transformers` with the exported draft as assistant, and of our decoder, same prompts.

    {gamma, prompts, equal, first_difference, transformers: {tau, ...}, ours: {tau, tau_ci, ...}, within_interval}

    Raises:
        UserError: no target in the config, or the exported draft does not fit it.
    """
    if config.target is None:
        raise UserError("this config has no target (target: null): there is nothing to check a draft against")
    target, tokenizer, saved = load_target(config.target, new_accelerator().device)
    draft = served_copy(load_draft(str(exported), target, tokenizer), saved, target)
    max_tokens = config.serving.max_tokens
    context = context_limit(config, positions_of(target), positions_of(draft))
    heldout = load_prompts(config.data, tokenizer, context, max_tokens, prompts, heldout_only=True).heldout
    theirs = check_with_transformers(
        target,
        exported,
        [prompt.prompt_ids for prompt in heldout],
        max_tokens,
        gamma,
        trust_remote_code=config.target.trust_remote_code,
    )
    settings = decode_settings(config, target, gamma, "greedy")
    keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in heldout]
    ours = live_metrics(decode(target, ModelDrafter(draft), keyed, settings)[0], gamma)
    low, high = ours["tau_ci"]
    del theirs["per_prompt"]
    return {
        "gamma": gamma,
        "prompts": len(heldout),
        "equal": theirs["equal"],
        "first_difference": theirs["first_difference"],
        "transformers": theirs,
        "ours": ours,
        "within_interval": low <= theirs["tau"] <= high,
    }
