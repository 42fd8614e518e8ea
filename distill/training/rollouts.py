"""Sequences generated during training: the draft's own responses, and responses of the target decoded with the current draft.

run/rollouts/NAME-g00003/   a token store like the target's responses; speculative rows say which draft tokens were rejected

A *generation* is used for `data.rollouts.every` steps. The draft at the first of these steps makes it. A resumed run reads it from
disk, so it sees the same sequences.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from data.batches.collate import Example
from data.responses.rendered import RenderedPrompt, prompt_lengths, prompts_fingerprint
from data.responses.respond import ResponsePlan, respond
from data.responses.store import Row, Store
from distill.config.layout import ROLLOUTS
from distill.models.draft import cast_copy
from distill.models.load import model_fingerprint, tokenizer_fingerprint
from distill.run import checkpoint
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

ROLLOUT_FORMAT = 2
GAMMA, REJECTED_WEIGHT = 4, 2.0  # drafted tokens per block; loss weight where a drafted token was rejected
# Returns an ordinary causal LM with the current weights of the trained module.
CurrentDraft = Callable[[], PreTrainedModel]


def chosen_prompts(
    prompts: Sequence[RenderedPrompt], count: int, seed: int, generation: int
) -> Sequence[RenderedPrompt]:
    """At most `count` prompts of a generation: the next ones in a fixed shuffled order, which wraps around."""
    order = np.random.default_rng([seed, len(prompts)]).permutation(len(prompts))
    count = min(count, len(prompts))
    return [prompts[order[(generation * count + place) % len(prompts)]] for place in range(count)]


class Rollouts:
    """Generate and read the generations of a run. Each rank generates its own shards."""

    def __init__(self, run: Run, target: PreTrainedModel, tokenizer: Any, prompts: Sequence[RenderedPrompt]) -> None:
        self.run, self.config, self.target, self.end_ids = run, run.config, target, end_token_ids(target, tokenizer)
        self.prompts, self.folder = prompts, run.folder / ROLLOUTS
        fingerprints = {"target": model_fingerprint(target), "tokenizer": tokenizer_fingerprint(tokenizer)}
        self.identity = {"format": ROLLOUT_FORMAT, **fingerprints}

    @property
    def longest(self) -> int:
        """Maximum tokens of a rollout including its prompt."""
        return int(prompt_lengths(self.prompts).max()) + self.config.serving.max_tokens

    def examples(self, kind: str, generation: int, draft: CurrentDraft) -> list[Example]:
        """student: the draft's own responses, sampled at temperature 1 (on-policy distillation, arXiv 2306.13649). speculative: the
        target's, decoded with the draft at the serving settings; their text has the distribution of the target alone, and positions where
        a draft token was rejected have weight `REJECTED_WEIGHT`, all others 1.

        Raises UserError: disk full; a store of other settings; a damaged shard.
        """
        example = Row.example if kind == "student" else _weighted
        return [example(row) for row in self._generation(kind, generation, draft)]

    def _settings(self, kind: str, generation: int) -> DecodeSettings:
        serving = self.config.serving
        # Training and held-out responses use the run's seed and the next one, so no generation may use either.
        seed = self.config.seed + 2**32 * (1 + 2 * generation + (kind == "speculative"))
        settings = DecodeSettings(max_tokens=serving.max_tokens, eos_ids=self.end_ids, seed=seed, fit_context=True)
        if kind == "student":
            return replace(settings, sampling=SamplingSettings(1.0), rule=Rule.usual(1.0))
        sampling = serving.sampling
        rule = self.config.serving_rule
        rule = Rule.usual(sampling.temperature) if rule.draws else rule.at(sampling.temperature)
        return replace(settings, sampling=sampling, rule=rule, gamma=GAMMA)

    def _generation(self, kind: str, generation: int, draft: CurrentDraft) -> list[Row]:
        """Rows of a generation; this rank generates its share of the missing shards."""
        settings, serving = self._settings(kind, generation), self.config.serving
        prompts = chosen_prompts(self.prompts, self.config.data.rollouts.prompts, self.config.seed, generation)
        manifest = self.identity | {
            "kind": kind,
            "generation": generation,
            "prompts": prompts_fingerprint(prompts),
            "sampling": settings.sampling.as_dict(),
            "rule": settings.rule.name,
            "gamma": settings.gamma,
            "max_tokens": settings.max_tokens,
            "eos_ids": list(settings.eos_ids),
            "seed": settings.seed,
            "shard_size": serving.shard_size,
        }
        store = Store(self.folder / f"{kind}-g{generation:05d}")
        plan = ResponsePlan(prompts, 1, serving.shard_size, self.run.rank, self.run.ranks)
        keys = plan.keys

        def lacking() -> bool:
            self._delete_old(kind, generation)
            store.open(manifest)
            return not store.present(keys).all()

        # Only the main process looks, before any rank writes: gathering the draft needs all ranks or none.
        if self.run.seen(lacking):
            self._make(kind, store, plan, settings, draft())
        self.run.wait()
        self.run.await_seen(lambda: bool(store.present(keys).all()), store.folder)
        if lost := int((~store.present(keys)).sum()):
            raise UserError(f"{store.folder}: {lost} of {len(keys)} responses missing; the same command generates them")
        return store.read()

    def _make(
        self, kind: str, store: Store, plan: ResponsePlan, settings: DecodeSettings, draft: PreTrainedModel
    ) -> None:
        target = self.target
        how: dict[str, Any] = {"batch_size": self.config.serving.batch_size, "show": False}
        if draft.dtype != target.dtype:  # in which it is served
            draft = cast_copy(draft, (target.dtype,), target.device)
        if kind == "student":
            return respond(store, plan, draft, settings, **how)
        respond(store, plan, target, settings, drafter=ModelDrafter(draft), **how)

    def _delete_old(self, kind: str, generation: int) -> None:
        """Delete generations older than the previous one that a resume from the last checkpoint cannot need."""
        resumable = checkpoint.last_resumable(self.run.folder)
        oldest = generation - 1
        if resumable is not None:
            oldest = min(oldest, resumable // self.config.data.rollouts.every)
        for path in self.folder.glob(f"{kind}-g*"):
            number = path.name.removeprefix(f"{kind}-g")
            if number.isdigit() and int(number) < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _weighted(row: Row) -> Example:
    example = row.example()
    weights = np.ones(len(example.input_ids), dtype=np.float32)
    weights[np.flatnonzero(example.loss_mask)[np.flatnonzero(row.rejected)]] = REJECTED_WEIGHT
    return replace(example, weights=weights)
