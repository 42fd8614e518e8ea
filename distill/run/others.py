"""Other targets that one draft learns from: runs of their own, answered and stored before, of one tokenizer and one way of serving."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from data.batches.examples import Examples
from data.responses.rendered import RenderedPrompt
from distill.config.layout import CONFIG, TARGET_FACTS
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.models.load import tokenizer_fingerprint
from distill.models.student import run_context
from distill.models.target import Target
from distill.run.prompts import load_prompts
from distill.run.responses import RunStores
from distill.run.session import dated_tokenizer
from distill.run.synthetic import with_synthetic
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse

# Keys of the config that both runs must have alike: the draft is served one way, and one objective reads all signals.
ALIKE = (
    "serving.temperature", "serving.top_p", "serving.top_k", "serving.min_p", "serving.max_tokens", "judge.rule", "signal.kind", "signal.k",
    "signal.samples", "loss.temperature", "loss.prompt_weight",
)  # fmt: skip


@dataclass(frozen=True)
class OtherTarget:
    """A target beside the run's own: what it said to train on, with what share, and its frozen held-out responses to judge on."""

    name: str
    weight: float
    config: RunConfig
    target: Target
    examples: Examples
    heldout: list[HeldoutResponse]


def open_others(
    config: RunConfig,
    accelerator: Accelerator,
    target: Target,
    train: Collection[RenderedPrompt],
    heldout: Collection[RenderedPrompt],
    context: int,
) -> list[OtherTarget]:
    """What `target.others` name, in their order; all ranks call it. Their weights are not loaded where everything is answered.

    ``train``, ``heldout``: the run's own prompts.

    Raises:
        UserError: no run there, or one not answered; of another tokenizer, vocabulary or way of serving; one run trains on what the other
            holds out; a sequence longer than ``context``.
    """
    found = []
    for number, other in enumerate(config.target.others):
        key, folder = f"target.others.{number}.run", Path(other.run)
        if not (folder / TARGET_FACTS).exists():
            raise UserError(
                f"{key} {folder}: no run that was answered; run `understudy respond CONFIG --signal {config.signal.kind} target.path=...` of "
                "that target first, with the same data and serving"
            )
        own = load_config(folder / CONFIG).model_copy(update={"output": str(folder.parent), "name": folder.name})
        _require_alike(config, own, key)
        one = Target(own.target, torch.device("cpu"), folder, f"{key}: target.path")
        if tokenizer_fingerprint(one.tokenizer) != tokenizer_fingerprint(target.tokenizer):
            raise UserError(f"{key} {folder}: {own.target.path} has another tokenizer than {config.target.path}")
        if one.facts.vocab_rows != target.facts.vocab_rows:
            raise UserError(
                f"{key} {folder}: {own.target.path} has {one.facts.vocab_rows} vocabulary rows, {config.target.path} {target.facts.vocab_rows}"
            )
        limit, tokenizer = run_context(own, one.facts.context_length), dated_tokenizer(one, folder, accelerator)
        sets = load_prompts(
            own.data, tokenizer, limit, own.serving.max_tokens, own.judge.prompts, run=folder, accelerator=accelerator
        )  # fmt: skip
        _require_apart(key, (train, heldout), (sets.train, sets.heldout))
        stores = RunStores(own, accelerator, one)
        prompts, _ = with_synthetic(own, tokenizer, sets.train, stores, limit, accelerator)
        examples = stores.training(prompts).examples
        if len(examples) and (longest := int(examples.lengths_N.max())) > context:
            raise UserError(f"{key} {folder}: a sequence of {longest} tokens; this run's pair takes {context}")
        found.append(
            OtherTarget(
                own.target.path, other.weight, own, one, examples, stores.heldout(sets.heldout, config.judge_rule)
            )
        )
        one.release()
    return found


def _require_alike(config: RunConfig, other: RunConfig, key: str) -> None:
    for name in ALIKE:
        section, field = name.split(".")
        ours, theirs = (getattr(getattr(one, section), field) for one in (config, other))
        if ours != theirs:
            raise UserError(
                f"{key} {other.folder}: {name} is {theirs} there and {ours} here; one draft needs them alike"
            )


def _require_apart(
    key: str,
    own: tuple[Collection[RenderedPrompt], Collection[RenderedPrompt]],
    other: tuple[Collection[RenderedPrompt], Collection[RenderedPrompt]],
) -> None:
    """Raises UserError where one of two runs trains on a prompt that the other holds out."""
    for (trained, _), (_, kept), whose in ((own, other, "this run"), (other, own, "that run")):
        held_out = {tuple(prompt.prompt_ids) for prompt in kept}
        both = sum(tuple(prompt.prompt_ids) in held_out for prompt in trained)
        if both:
            raise UserError(
                f"{key}: {whose} trains on {both} prompts that the other holds out; give both the same data"
            )
