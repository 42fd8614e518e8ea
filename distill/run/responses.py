"""The stores of a run: training responses, held-out responses at the serving settings, greedy held-out responses."""

from collections.abc import Sequence
from dataclasses import replace

from data.files import MANIFEST, Manifest
from data.prompts.template import check_learnable, template_fingerprint
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan, respond
from data.responses.store import INDEX, Row, Store, StoredRows
from data.signals.store import SignalManifest, signal_manifest
from distill.config.layout import (
    HELDOUT,
    HELDOUT_GREEDY,
    RESPONSES,
    TARGET_FACTS,
    TRAINING,
)
from distill.config.sections import ServingConfig
from distill.models.load import tokenizer_fingerprint
from distill.models.target import Target, TargetFacts
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule

STORE_FORMAT = 4


def decode_settings(serving: ServingConfig, seed: int, target: Target) -> DecodeSettings:
    """Settings of plain decoding at the serving settings; `DecodeSettings.under` turns them into those of a judgement."""
    sampling = serving.sampling
    rule: Rule = "greedy" if sampling.greedy else "sample"
    return DecodeSettings(sampling, 0, rule, serving.max_tokens, target.facts.eos_ids, seed)


def signal_manifest_of(run: Run, facts: TargetFacts) -> SignalManifest:
    """The manifest of the run's stored probabilities; UserError for a signal.k that is too large."""
    config = run.config
    return signal_manifest(
        config.signal.k,
        temperature=config.loss.temperature,
        vocab_rows=facts.vocab_rows,
        target=facts.fingerprint,
        target_dtype=facts.dtype,
        prompts=config.loss.prompt_weight > 0,
    )


class RunStores:
    """Make and read the stores of a run; every rank makes its share."""

    def __init__(self, run: Run, target: Target) -> None:
        """Fingerprint target and tokenizer and write facts about the target; makes no responses."""
        config = run.config
        self.folder, self.serving = run.folder / RESPONSES, config.serving
        self.run, self.target = run, target
        self.judge_rule = config.judge_rule
        self.settings = decode_settings(config.serving, config.seed, target)
        self.identity = {
            "format": STORE_FORMAT,
            "target": target.facts.fingerprint,
            "target_dtype": target.facts.dtype,
            "tokenizer": tokenizer_fingerprint(target.tokenizer),
            "template": template_fingerprint(target.tokenizer, config.data.template)[:16],
        }
        run.once(run.folder / TARGET_FACTS, target.remember)

    def training(self, prompts: Sequence[RenderedPrompt]) -> StoredRows:
        """The target's responses to train on."""
        return self._make(TRAINING, prompts, self.settings, self.serving.samples_per_prompt)

    def heldout(self, prompts: Sequence[RenderedPrompt], rule: Rule, *, select: bool = False) -> list[HeldoutResponse]:
        """Frozen held-out responses for a rule: greedy ones for `greedy`, else at the serving settings.

        ``select``: make them the run's own held-out text. Otherwise that stays unchanged, and nothing is written if no response is
        missing.
        """
        greedy = rule == "greedy"
        settings, name = (self.settings.under(rule, 0), HELDOUT_GREEDY) if greedy else (self.settings, HELDOUT)
        # Not the seed of the training responses, which would give a prompt in both sets the same text.
        return frozen_responses_of(self._make(name, prompts, replace(settings, seed=settings.seed + 1), 1, select))

    def heldout_by_rule(self, prompts: Sequence[RenderedPrompt]) -> dict[Rule, list[HeldoutResponse]]:
        """The run's own held-out responses for the configured rule, then greedy ones when that is another rule."""
        rules: tuple[Rule, ...] = (self.judge_rule, "greedy")
        return {rule: self.heldout(prompts, rule, select=True) for rule in dict.fromkeys(rules)}

    def past(self, rule: Rule) -> Sequence[Row]:
        """Stored responses to the training prompts; none if the rule needs other settings than theirs; UserError if damaged."""
        store, settings = Store(self.folder / TRAINING), self.settings
        if not (store.folder / MANIFEST).exists() or (rule == "greedy") != settings.sampling.greedy:
            return []
        known, own = store.manifest(), self.manifest(settings)
        same = all(known.get(key) == own[key] for key in ("target", "sampling"))
        return store.rows() if same else []

    def manifest(self, settings: DecodeSettings) -> Manifest:
        """Manifest of a store of responses at these settings."""
        return self.identity | {
            "sampling": settings.sampling.as_dict(),
            "max_tokens": settings.max_tokens,
            "eos_ids": list(settings.eos_ids),
            "seed": settings.seed,
        }

    def _make(
        self, name: str, prompts: Sequence[RenderedPrompt], settings: DecodeSettings, samples: int, select: bool = True
    ) -> StoredRows:
        store, manifest, run = Store(self.folder / name), self.manifest(settings), self.run
        plan = ResponsePlan(prompts, samples, self.serving.shard_size, run.rank, run.ranks)

        def whole() -> bool:
            store.open(manifest)
            return bool(store.present(plan.keys).all())

        if not run.seen(whole):  # The folder must exist before another rank writes into it.
            if self.target.config.endpoint is None:
                respond(store, plan, self.target.model, settings, batch_size=self.serving.batch_size)
            else:
                self.target.endpoint.respond(store, plan, settings)
            run.wait()
            if run.main:
                run.await_seen(lambda: bool(store.present(plan.keys).all()), store.folder)
        return self._in_order(store, plan, select)

    def _in_order(self, store: Store, plan: ResponsePlan, select: bool = True) -> StoredRows:
        """The plan's rows, checked and in its order. With ``select`` the main process stores that order for all ranks."""
        if select:
            self.run.once(store.folder / INDEX, lambda: store.select(plan.keys, plan.domains()))
        rows = store.rows() if select else store.chosen(plan.keys, plan.domains())
        self.run.await_seen(lambda: all(path.exists() for path in rows.files), store.folder)
        tokens, learned = int(rows.tokens_N.sum()), int(rows.response_tokens_N.sum())
        check_learnable(len(rows), tokens, learned, str(store.folder))
        return rows


def frozen_responses_of(rows: Sequence[Row]) -> list[HeldoutResponse]:
    """Rows of a store as held-out responses to judge a draft on."""
    return [
        HeldoutResponse(row.prompt_id, row.domain, row.prompt_ids, row.response_ids, list(row.log_target_probs))
        for row in rows
    ]
