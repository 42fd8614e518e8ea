"""A few held-out prompts decoded with a run's best draft, to look at."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from distill.config.load import load_config
from distill.models.draft import served_copy
from distill.models.load import load_model
from distill.report.screen import last_screen, marked_completion
from distill.run.folder import load_verdict
from distill.run.prompts import load_prompts
from distill.run.responses import decode_settings
from distill.run.session import context_limit, load_target, new_accelerator, positions_of
from speculative.decode import decode
from speculative.drafters.drafter import ModelDrafter


def show_run(run: Path, exported: Path | None) -> None:
    """Prints the verdict of a finished run, a few completions, and what to type next.

    Raises:
        UserError: the run is not finished, or its target is gone.
    """
    verdict = load_verdict(run)
    # A target that is only served elsewhere cannot show what it accepts.
    shown = held_out_completions(run, count=3) if verdict["target_tokens_per_second"] is not None else []
    last_screen(Console(), run, verdict, shown, exported)


def held_out_completions(run: Path, count: int) -> list[Panel]:
    """Completions of the first held-out prompts with the best draft, accepted tokens marked.

    Raises:
        UserError: the run is not finished, or its target is gone.
    """
    config = load_config(run / "config.yaml")
    target, tokenizer, saved = load_target(config.target, new_accelerator().device)
    draft = served_copy(load_model("best checkpoint", str(run / "best" / "student")), saved, target)
    sets = load_prompts(
        config.data,
        tokenizer,
        context_limit(config, positions_of(target), positions_of(draft)),
        config.serving.max_tokens,
        config.judge.prompts,
        heldout_only=True,
    )
    settings = replace(decode_settings(config, target, config.judge.gamma, config.judge_rule), seed=config.seed + 2)
    prompts = [(prompt.prompt_id, prompt.prompt_ids) for prompt in sets.heldout[:count]]
    responses, _ = decode(target, ModelDrafter(draft), prompts, settings)
    return [marked_completion(tokenizer, response) for response in responses]
