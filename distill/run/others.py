"""Other targets of a draft: runs with stored responses, the same tokenizer and the same serving settings."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.batches.examples import Examples
from data.responses.rendered import RenderedPrompt
from distill.config.layout import CONFIG, PROVENANCE, TARGET_FACTS
from distill.config.load import load_trusted
from distill.config.run import RunConfig
from distill.models.target import Target
from distill.models.vocabulary import tokens_by_id
from distill.run.checkpoint import resume_point
from distill.run.responses import RunStores
from distill.run.run import Run
from distill.run.session import run_prompts
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse

# Keys that must be equal in both configs: the draft is served one way, and one objective reads all signals.
ALIKE = (
    "serving.temperature", "serving.top_p", "serving.top_k", "serving.min_p", "serving.max_tokens", "signal.kind", "signal.k",
    "signal.samples", "loss.temperature", "loss.prompt_weight",
)  # fmt: skip


@dataclass(frozen=True)
class OtherTarget:
    """Another target: its examples to train on, their weight, and its frozen held-out responses to judge on."""

    name: str
    weight: float
    run: Run
    target: Target
    examples: Examples
    heldout: list[HeldoutResponse]

    def told(self) -> dict[str, Any]:
        """Record for the provenance of a run: the target, its weight, and a hash of all its responses."""
        digest = hashlib.sha256(self.examples.keys_N.tobytes())
        digest.update(json.dumps([(one.prompt_ids, one.response_ids) for one in self.heldout]).encode())
        return {
            "target": self.name, "target_fingerprint": self.target.facts.fingerprint, "weight": self.weight,
            "responses": digest.hexdigest()[:16],
        }  # fmt: skip


def open_others(
    run: Run,
    target: Target,
    train: Collection[RenderedPrompt],
    heldout: Collection[RenderedPrompt],
    context: int,
) -> list[OtherTarget]:
    """Open the runs of `target.others`, in their order. All ranks must call it. No weights are loaded, nothing is written there.

    ``train``, ``heldout``: the run's own prompts.

    Raises UserError: no run there, or without responses; another tokenizer, vocabulary or serving; a target listed twice; one run trains on
    what the other holds out; a sequence longer than ``context``.
    """
    config, found = run.config, list[OtherTarget]()
    known = {target.facts.fingerprint: "this run"}
    for number, other in enumerate(config.target.others):
        key, folder = f"target.others.{number}.run", Path(other.run)
        if not (folder / TARGET_FACTS).exists():
            raise UserError(
                f"{key} {folder}: has no stored responses; first run `understudy respond CONFIG --signal {config.signal.kind} target.path=...` for "
                "that target, with the same data and serving"
            )
        own = load_trusted(folder / CONFIG, config.target.trust_remote_code).model_copy(
            update={"output": str(folder.parent), "name": folder.name}
        )
        _require_alike(config, own, key)
        # Its store is read here with this run's signal settings, whatever that run trains with.
        own = own.model_copy(update={"signal": config.signal})
        there = Run(own, run.accelerator)
        one = Target(own.target, run.device, folder, f"{key}: target.path")
        if one.facts.fingerprint in known:
            raise UserError(f"{key} {folder}: its target is also that of {known[one.facts.fingerprint]}; list it once")
        known[one.facts.fingerprint] = key
        if tokens_by_id(one.tokenizer) != tokens_by_id(target.tokenizer):
            raise UserError(f"{key} {folder}: another tokenizer than {config.target.path}'s; one draft needs one")
        if one.facts.vocab_rows != target.facts.vocab_rows:
            raise UserError(
                f"{key} {folder}: {own.target.path} has {one.facts.vocab_rows} vocabulary rows, {config.target.path} {target.facts.vocab_rows}"
            )
        limit, tokenizer, sets = run_prompts(there, one)
        stores = RunStores(there, one, answers=False)
        prompts, _ = stores.with_synthetic(sets.train, tokenizer, limit)
        _require_apart(key, (train, heldout), (prompts, sets.heldout))
        examples, text = stores.training(prompts).examples, stores.heldout(sets.heldout, config.judge_rule)
        longest = max((len(said.prompt_ids) + len(said.response_ids) for said in text), default=0)
        longest = max(longest, int(examples.lengths_N.max(initial=0)))
        if longest > context:
            raise UserError(
                f"{key} {folder}: has a sequence of {longest} tokens, but this run's limit is {context}; answer that run with data.context_length: "
                f"{context}"
            )
        found.append(OtherTarget(own.target.path, other.weight, there, one, examples, text))
    return found


def require_unchanged(run: Run, told: Sequence[Mapping[str, Any]]) -> None:
    """Refuse to continue from a checkpoint that was trained on other responses of the other targets; scores would not be comparable.

    ``told``: `OtherTarget.told` of each; on the main process only. UserError: they have changed, or the checkpoint does not say.
    """
    checkpoint = resume_point(run.folder)[1]
    if checkpoint is None:
        return
    path = checkpoint / PROVENANCE
    try:
        before = json.loads(path.read_text(encoding="utf-8")).get("other_targets", [])
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read, so what it was trained on is unknown; delete {checkpoint}") from error
    for number, (then, now) in enumerate(zip(before, told, strict=False)):
        if then != now:
            raise UserError(
                f"target.others.{number}.run {run.config.target.others[number].run}: its responses have changed since {checkpoint} was "
                "trained; choose another name=..., or delete that run's checkpoints"
            )


def _require_alike(config: RunConfig, other: RunConfig, key: str) -> None:
    pairs = {name: [attrgetter(name)(one) for one in (config, other)] for name in ALIKE}
    for name, (ours, theirs) in (pairs | {"judge.rule": [config.judge_rule, other.judge_rule]}).items():
        if ours != theirs:
            raise UserError(f"{key} {other.folder}: {name} is {theirs} there and {ours} here; they must be equal")


def _require_apart(
    key: str,
    own: tuple[Collection[RenderedPrompt], Collection[RenderedPrompt]],
    other: tuple[Collection[RenderedPrompt], Collection[RenderedPrompt]],
) -> None:
    """Raise UserError if one of two runs trains on a prompt that the other holds out."""
    for (trained, _), (_, kept), whose in ((own, other, "this run"), (other, own, "that run")):
        # Templates may differ between targets or write the date, so the same text may have other ids.
        ids, words = {tuple(prompt.prompt_ids) for prompt in kept}, {prompt.prompt_id for prompt in kept}
        both = sum(tuple(prompt.prompt_ids) in ids or prompt.prompt_id in words for prompt in trained)
        if both:
            raise UserError(f"{key}: {whose} trains on {both} prompts the other holds out; give both the same data")
