"""The synthetic prompts of a run: made from its training prompts, kept beside them, never near its held-out ones."""

from collections.abc import Sequence
from typing import Any

from data.files import write_json
from data.prompts.prompt import PromptRow
from data.prompts.template import render_prompt
from data.responses.rendered import RenderedPrompt, StoredPrompts, write_prompts
from data.responses.synthetic import mixed_rows, sampled_rows, synthetic_rows
from distill.config.layout import PROMPTS, SYNTHETIC
from distill.run.prompts import HELDOUT_FILE, as_rendered, rows_of
from distill.run.responses import RunStores
from distill.run.run import Run


def with_synthetic(
    run: Run, tokenizer: Any, own: Sequence[RenderedPrompt], stores: RunStores, context: int
) -> tuple[Sequence[RenderedPrompt], str]:
    """The training prompts and the synthetic ones behind them; one line of how many were made, kept, left out and why. All ranks call it.

    What the target writes is kept in the run's folder, and all else follows from it, so a killed run makes the same prompts.

    Args:
        tokenizer: the target's, as the run renders its prompts.
        own: training prompts.
        context: tokens of prompt and response.

    Raises:
        UserError: magpie without a chat template, mix with prompts that have nothing in common.
    """
    config = run.config
    asked = config.data.synthetic
    if asked is None:
        return own, ""
    template, folder = config.data.template, run.folder / PROMPTS
    rows = [prompt.row() for prompt in own]
    heldout = [prompt.row() for prompt in StoredPrompts(folder / HELDOUT_FILE)]
    if config.data.heldout:
        heldout += rows_of(config.data.heldout, [] if config.data.bad_rows == "drop" else None)[
            0
        ]  # also those not judged
    if asked.method == "mix":
        candidates = mixed_rows(rows, config.seed)
    else:
        candidates = sampled_rows(
            rows, tokenizer, lambda openings, samples: stores.user_turns(openings, samples, asked.temperature, asked.max_tokens),
            stores.settings.eos_ids, config.seed, template,
        )  # fmt: skip
    most = min(context - config.serving.max_tokens, config.data.max_prompt_tokens or context)

    def ids(row: PromptRow) -> list[int]:
        return render_prompt(row, tokenizer, template)

    made, counts = synthetic_rows(rows, heldout, asked.count, candidates, lambda row: len(ids(row)) <= most)
    prompts = [as_rendered(row, ids(row)) for row in made]
    if run.main:
        fingerprint = write_prompts(folder / f"{SYNTHETIC}.arrow", prompts)
        write_json(
            folder / f"{SYNTHETIC}.json", asked.model_dump(mode="json") | {"prompts": fingerprint, "counts": counts}
        )
        run.say(synthetic_line(asked.method, counts))
    return [*own, *prompts], synthetic_line(asked.method, counts)


def synthetic_line(method: str, counts: dict[str, int]) -> str:
    """What came of it, in one line."""
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if why not in ("made", "kept"))
    told = f"{counts['kept']} synthetic training prompts ({method}) of {counts['made']} candidates"
    return told + (f", left out: {left_out}" if left_out else "")
