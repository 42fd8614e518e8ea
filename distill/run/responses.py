"""The three stores of a run: training responses, held-out responses at the serving settings, greedy held-out ones."""

import math
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from data.prompts.template import check_masks, template_fingerprint
from data.responses.respond import RenderedPrompt, prompts_fingerprint, respond, store_references
from data.responses.store import Row, Store
from distill.config.run import RunConfig
from distill.config.sections import ServingConfig
from distill.models.load import model_fingerprint, tokenizer_fingerprint
from distill.models.target import ServedTarget
from speculative.decoder.responses import DecodeSettings
from speculative.engine.models import end_token_ids
from speculative.evaluate import HeldoutResponse
from speculative.rules.sampling import SamplingSettings
from speculative.rules.verify import Rule

STORE_FORMAT = 2


def sampling_of(serving: ServingConfig) -> SamplingSettings:
    """The serving section as sampling settings."""
    return SamplingSettings(serving.temperature, serving.top_k, serving.top_p, serving.min_p)


def decode_settings(
    config: RunConfig, target: PreTrainedModel | ServedTarget, gamma: int = 0, rule: Rule | None = None
) -> DecodeSettings:
    """The serving settings of a run, for plain decoding (gamma 0) or judging. Rule `greedy` sets temperature 0."""
    sampling = SamplingSettings(temperature=0.0) if rule == "greedy" else sampling_of(config.serving)
    chosen: Rule = rule or ("greedy" if sampling.greedy else "sample")
    eos_ids = target.facts.eos_ids if isinstance(target, ServedTarget) else end_token_ids(target)
    return DecodeSettings(sampling, gamma, chosen, config.serving.max_tokens, eos_ids, config.seed)


class RunStores:
    """Makes and reads the stores of a run; every rank makes its share."""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, target: PreTrainedModel | ServedTarget, tokenizer: Any
    ) -> None:
        """Fingerprints target and tokenizer; nothing is written yet."""
        self.config, self.accelerator, self.target = config, accelerator, target
        template = config.data.template
        self.identity = {
            "format": STORE_FORMAT,
            "target": target.facts.fingerprint if isinstance(target, ServedTarget) else model_fingerprint(target),
            "target_dtype": str(target.dtype).removeprefix("torch."),
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "template": template_fingerprint(tokenizer, template.mode, template.chat_template_kwargs)[:16],
        }

    def training(self, prompts: list[RenderedPrompt]) -> list[Row]:
        """Rows to train on: the target's answers, or the dataset's own."""
        if self.config.data.responses == "target":
            return self._make(
                "train", prompts, decode_settings(self.config, self.target), self.config.serving.samples_per_prompt
            )
        store = Store(self.config.folder / "responses" / "train")
        manifest = self._manifest(prompts, decode_settings(self.config, self.target), 1) | {"responses": "reference"}
        if self.accelerator.is_main_process and not store.has_all(1, manifest):
            sampling, max_tokens = sampling_of(self.config.serving), self.config.serving.max_tokens
            store_references(store, manifest, self._model(), prompts, sampling, max_tokens)
        self.accelerator.wait_for_everyone()
        return self._checked(store)

    def heldout(self, prompts: list[RenderedPrompt], rule: Rule) -> list[HeldoutResponse]:
        """Frozen held-out responses for judging by a rule: greedy ones for `greedy`, else at the serving settings."""
        if rule == "greedy":
            settings, name = decode_settings(self.config, self.target, rule="greedy"), "heldout-greedy"
        else:
            settings, name = decode_settings(self.config, self.target), "heldout"
        # Another seed than the training responses': the same prompt under both would give the same text.
        return frozen_responses_of(self._make(name, prompts, replace(settings, seed=settings.seed + 1), 1))

    def heldout_by_rule(self, prompts: list[RenderedPrompt]) -> dict[Rule, list[HeldoutResponse]]:
        """Held-out responses for the configured rule, then greedy ones when that is another rule."""
        rules: tuple[Rule, ...] = (self.config.judge_rule, "greedy")
        return {rule: self.heldout(prompts, rule) for rule in dict.fromkeys(rules)}

    def _manifest(self, prompts: list[RenderedPrompt], settings: DecodeSettings, samples: int) -> dict[str, Any]:
        return self.identity | {
            "prompts": prompts_fingerprint(prompts),
            "sampling": settings.sampling.as_dict(),
            "max_tokens": settings.max_tokens,
            "eos_ids": list(settings.eos_ids),
            "samples_per_prompt": samples,
            "shard_size": self.config.serving.shard_size,
            "seed": settings.seed,
            "responses": "target",
        }

    def _make(self, name: str, prompts: list[RenderedPrompt], settings: DecodeSettings, samples: int) -> list[Row]:
        store, manifest = Store(self.config.folder / "responses" / name), self._manifest(prompts, settings, samples)
        if self.accelerator.is_main_process:
            store.open(manifest)
        self.accelerator.wait_for_everyone()  # the folder is there before another rank writes into it
        shard_size = self.config.serving.shard_size
        if not store.has_all(math.ceil(len(prompts) * samples / shard_size), manifest) and self._served():
            assert isinstance(self.target, ServedTarget)
            self.target.endpoint.respond(
                store, manifest, prompts, settings, samples_per_prompt=samples, shard_size=shard_size,
                rank=self.accelerator.process_index, ranks=self.accelerator.num_processes, label=f"{name} responses",
            )  # fmt: skip
        elif not store.has_all(math.ceil(len(prompts) * samples / shard_size), manifest):
            respond(
                store,
                manifest,
                self._model(),
                prompts,
                settings,
                samples_per_prompt=samples,
                batch_size=self.config.serving.batch_size,
                shard_size=shard_size,
                rank=self.accelerator.process_index,
                ranks=self.accelerator.num_processes,
                label=f"{name} responses",
            )
        self.accelerator.wait_for_everyone()
        return self._checked(store)

    def _served(self) -> bool:
        """Whether a server answers."""
        return isinstance(self.target, ServedTarget) and self.target.config.endpoint is not None

    def _model(self) -> PreTrainedModel:
        """The target's weights, loaded only when there is something to answer."""
        return self.target.model if isinstance(self.target, ServedTarget) else self.target

    def _checked(self, store: Store) -> list[Row]:
        rows = store.read()
        check_masks([row.loss_mask for row in rows], str(store.folder))
        return rows


def frozen_responses_of(rows: list[Row]) -> list[HeldoutResponse]:
    """Rows of a store of held-out responses as what a draft is judged on."""
    return [
        HeldoutResponse(row.prompt_id, row.domain, row.prompt_ids, row.response_ids, list(row.log_target_probs))
        for row in rows
    ]
