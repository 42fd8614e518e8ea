"""The stores of a run: training responses, held-out responses at the serving settings, greedy held-out responses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from data.files import MANIFEST, Manifest, write_json
from data.prompts.prompt import PromptRow
from data.prompts.template import check_learnable, render_prompt, template_fingerprint
from data.responses.rendered import RenderedPrompt, StoredPrompts, prompts_fingerprint, write_prompts
from data.responses.respond import ResponsePlan, respond, store_references
from data.responses.store import INDEX, Row, Store, StoredRows
from data.responses.synthetic import mixed_rows, sampled_rows, synthetic_rows
from data.signals.store import SignalManifest, signal_manifest
from distill.config.layout import (
    HELDOUT,
    HELDOUT_GREEDY,
    PROMPTS,
    RESPONSES,
    SYNTHETIC,
    TARGET_FACTS,
    TRAINING,
    USER_TURNS,
)
from distill.config.sections import ServingConfig
from distill.models.load import tokenizer_fingerprint
from distill.models.target import Target, TargetFacts
from distill.run.prompts import HELDOUT_FILE, as_rendered, rows_of
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

STORE_FORMAT = 3

TURN_TOKENS = 128  # longer user turns of the target are left out


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
        self.of_dataset, self.judge_rule = config.data.responses == "reference", config.judge_rule
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
        """Rows to train on: responses of the target, or answers of the dataset."""
        if not self.of_dataset:
            return self._make(TRAINING, prompts, self.settings, self.serving.samples_per_prompt)
        store, plan = Store(self.folder / TRAINING), ResponsePlan(prompts, 1, self.serving.shard_size)
        manifest = {**self.manifest(self.settings), "responses": "reference", "prompts": prompts_fingerprint(prompts)}
        if self.run.main:
            store_references(store, manifest, plan, self.serving.max_tokens)
        return self._in_order(store, plan)

    def with_synthetic(
        self, own: Sequence[RenderedPrompt], tokenizer: Any, context: int
    ) -> tuple[Sequence[RenderedPrompt], str]:
        """(training prompts followed by synthetic ones, one line about how many were made, kept and left out). All ranks must call it.

        Synthetic prompts are made from training prompts and are never near a held-out one. The target's text is kept in the run's
        folder and everything else follows from it, so a killed run makes the same prompts. ``tokenizer``: the one that renders the
        run's prompts. ``context``: maximum tokens of prompt and response.

        Raises UserError: magpie without a chat template, mix with prompts that share no words.
        """
        config = self.run.config
        asked = config.data.synthetic
        if asked is None:
            return own, ""
        template, folder = config.data.template, self.run.folder / PROMPTS
        rows = [prompt.row() for prompt in own]
        heldout = [prompt.row() for prompt in StoredPrompts(folder / HELDOUT_FILE)]
        if config.data.heldout:  # Also the ones that are not judged.
            heldout += rows_of(config.data.heldout, [] if config.data.bad_rows == "drop" else None)[0]
        if asked.method == "mix":
            candidates = mixed_rows(rows, config.seed)
        else:
            settings = replace(
                self.settings,
                sampling=SamplingSettings(1.0),
                rule="sample",
                max_tokens=TURN_TOKENS,
                seed=self.settings.seed + 3,
            )

            def user_turns(openings: Sequence[RenderedPrompt], samples: int) -> list[tuple[str, list[int]]]:
                """What the target writes after each opening, stored like its responses."""
                made = self._make(USER_TURNS, openings, settings, samples, select=False)
                return [(row.prompt_id, row.response_ids) for row in made]

            candidates = sampled_rows(rows, tokenizer, user_turns, self.settings.eos_ids, config.seed, template)
        most = min(context - self.serving.max_tokens, config.data.max_prompt_tokens or context)

        def ids(row: PromptRow) -> list[int]:
            return render_prompt(row, tokenizer, template)

        made, counts = synthetic_rows(rows, heldout, asked.count, candidates, lambda row: len(ids(row)) <= most)
        prompts, told = [as_rendered(row, ids(row)) for row in made], synthetic_line(asked.method, counts)
        if self.run.main:
            fingerprint = write_prompts(folder / f"{SYNTHETIC}.arrow", prompts)
            record = asked.model_dump(mode="json") | {"prompts": fingerprint, "counts": counts}
            write_json(folder / f"{SYNTHETIC}.json", record)
            self.run.say(told)
        return [*own, *prompts], told

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
        same = all(known.get(key) == own[key] for key in ("target", "sampling", "responses"))
        return store.rows() if same else []

    def manifest(self, settings: DecodeSettings) -> Manifest:
        """Manifest of a store of responses at these settings."""
        return self.identity | {
            "sampling": settings.sampling.as_dict(),
            "max_tokens": settings.max_tokens,
            "eos_ids": list(settings.eos_ids),
            "seed": settings.seed,
            "responses": "target",
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


def synthetic_line(method: str, counts: dict[str, int]) -> str:
    """One line about how many synthetic prompts were made, kept and left out."""
    left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if why not in ("made", "kept"))
    told = f"{counts['kept']} synthetic training prompts ({method}) of {counts['made']} candidates"
    return told + (f", left out: {left_out}" if left_out else "")


def frozen_responses_of(rows: Sequence[Row]) -> list[HeldoutResponse]:
    """Rows of a store as held-out responses to judge a draft on."""
    return [
        HeldoutResponse(row.prompt_id, row.domain, row.prompt_ids, row.response_ids, list(row.log_target_probs))
        for row in rows
    ]
