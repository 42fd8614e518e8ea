"""Prompts and responses of a run: training responses, held-out responses at the serving settings, greedy held-out responses."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from data.files import MANIFEST, Manifest, write_bytes
from data.prompts.template import check_learnable, on_day, template_fingerprint
from data.responses.batch_file import WantedAnswers
from data.responses.journal import settle
from data.responses.rendered import RenderedPrompt, texts_of
from data.responses.respond import ResponsePlan, respond
from data.responses.servers import LocalSays, local_says
from data.responses.store import INDEX, Row, Store, StoredRows
from data.signals.columns import bytes_per_token
from data.signals.store import SignalManifest, signal_manifest
from distill.config.layout import DAY, HELDOUT, HELDOUT_GREEDY, RESPONSES, TARGET_FACTS, TRAINING
from distill.config.sections import ServingConfig
from distill.models.load import tokenizer_fingerprint
from distill.models.student import run_context
from distill.models.target import Target, TargetFacts, target_notes
from distill.run.logged import LoggedAnswers, refuse_other_share
from distill.run.prompts import PromptSets, load_prompts
from distill.run.provenance import describe_run
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.evaluate import HeldoutResponse
from speculative.rules.rule import Rule

STORE_FORMAT = 4


def decode_settings(serving: ServingConfig, seed: int, target: Target) -> DecodeSettings:
    """Settings of plain decoding at the serving settings; `DecodeSettings.under` turns them into those of a judgement."""
    sampling = serving.sampling
    return DecodeSettings(sampling, 0, Rule.usual(sampling.temperature), serving.max_tokens, target.facts.eos_ids, seed)


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


def dated_tokenizer(target: Target, folder: Path, run: Run | None = None) -> Any:
    """The target's tokenizer for a run's prompts. A template that writes the date writes the day of the run's first start.

    ``run``: given when responses are made; all ranks must call it, and the day is stored in its ``folder``.
    """
    path = folder / RESPONSES / DAY

    def day() -> date:
        today = date.today()
        if path.exists():
            return date.fromisoformat(path.read_text(encoding="utf-8").strip())
        if run is not None and on_day(target.tokenizer, today) is not target.tokenizer:
            path.parent.mkdir(exist_ok=True)
            write_bytes(path, f"{today}\n".encode())
        return today

    return on_day(target.tokenizer, day() if run is None else run.seen(day))


class RunData:
    """Prompts and responses of a run, made by all ranks together on first use and kept in its folder."""

    def __init__(self, run: Run, target: Target) -> None:
        """Nothing is read or made yet."""
        self.run, self.target, self.folder = run, target, run.folder / RESPONSES
        self.settings = decode_settings(run.config.serving, run.config.seed, target)

    @functools.cached_property
    def context(self) -> int:
        """Maximum tokens of prompt and response; UserError: see `run_context`."""
        config = self.run.config
        return run_context(config.student, config.data.context_length, self.target.facts.context_length)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that renders the run's prompts."""
        return dated_tokenizer(self.target, self.run.folder, self.run)

    @functools.cached_property
    def prompts(self) -> PromptSets:
        """Training and held-out prompts; UserError: see `load_prompts`."""
        config, rows = self.run.config, self.target.facts.vocab_rows
        for note in target_notes(self.target.side, config.serving.sampling, config.data.template):
            self.run.say(f"warning: {note}")
        limits = self.context, config.serving.max_tokens, config.judge.prompts
        return load_prompts(config.data, self.tokenizer, *limits, run=self.run, vocab_rows=rows)

    @functools.cached_property
    def training(self) -> StoredRows:
        """The target's responses to train on."""
        prompts, samples = self.prompts.train, self.run.config.serving.samples_per_prompt
        with self.run.progress.timed("respond"):
            self._take_logged(prompts)
            return self._make(TRAINING, prompts, self.settings, samples)

    def _take_logged(self, prompts: Sequence[RenderedPrompt]) -> None:
        store, manifest, config = Store(self.folder / TRAINING), self.manifest(self.settings), self.run.config
        self.run.seen(lambda: refuse_other_share(store, config.data))
        if config.data.responses == "logged":
            self.run.seen(lambda: store.open(manifest))
            fresh = functools.partial(self.heldout_of, self.prompts.heldout, config.serving_rule)
            LoggedAnswers(self.run, self.target, self.tokenizer, self.settings).take(store, prompts, fresh)

    @functools.cached_property
    def heldout(self) -> dict[Rule, list[HeldoutResponse]]:
        """The run's own held-out responses, by acceptance rule, the configured rule first."""
        prompts = self.prompts.heldout
        with self.run.progress.timed("respond"):
            return {rule: self.heldout_of(prompts, rule, select=True) for rule in self.heldout_rules}

    @property
    def chosen_by_text(self) -> bool:
        """Whether the draft's first weights depend on the target's responses."""
        return self.run.config.student.intermediate_size is not None

    @property
    def domains(self) -> list[str]:
        """Domains of the training prompts, sorted."""
        return sorted(set(texts_of(self.prompts.train, "domain").unique().to_pylist()))

    def provenance(self) -> Mapping[str, Any]:
        """Origin of a checkpoint: code, machine, target, sampling."""
        return describe_run(self.run.config.seed) | {
            "target": self.run.config.target.path,
            "target_fingerprint": self.target.facts.fingerprint,
            "tokenizer_fingerprint": self._identity["tokenizer"],
            "sampling": self.settings.sampling.as_dict(),
        }

    def heldout_of(
        self, prompts: Sequence[RenderedPrompt], rule: Rule, *, select: bool = False
    ) -> list[HeldoutResponse]:
        """Held-out responses for a rule: greedy ones for `greedy`, else at the serving settings.

        ``select``: make them the run's own held-out text. Otherwise that stays unchanged, and nothing is written if no response is
        missing.
        """
        name, settings = self._heldout_set(rule)
        return heldout_responses(self._make(name, prompts, settings, 1, select))

    def _heldout_set(self, rule: Rule) -> tuple[str, DecodeSettings]:
        """Folder and settings of the held-out responses for a rule."""
        greedy = rule.greedy
        settings, name = (self.settings.under(rule, 0), HELDOUT_GREEDY) if greedy else (self.settings, HELDOUT)
        # Not the seed of the training responses, which would give a prompt in both sets the same text.
        return name, replace(settings, seed=settings.seed + 1)

    @property
    def heldout_rules(self) -> list[Rule]:
        """Of the run's own held-out responses: the configured one, and that of greedy text when that is another."""
        return list(dict.fromkeys((self.run.config.judge_rule, Rule.usual(0))))

    def lacking(self) -> list[WantedAnswers]:
        """What the run's stores lack, held-out responses first. Logged answers are taken before, once the held-out ones are there.

        Until then, training responses of a run with logs are left out. One process calls it.
        """
        prompts, samples = self.prompts, self.run.config.serving.samples_per_prompt
        wanted = [self._lacking(*self._heldout_set(rule), prompts.heldout, 1) for rule in self.heldout_rules]
        if self.run.config.data.responses == "logged" and any(one.lacking for one in wanted):
            return wanted
        self._take_logged(prompts.train)
        return [*wanted, self._lacking(TRAINING, self.settings, prompts.train, samples)]

    def _lacking(
        self, name: str, settings: DecodeSettings, prompts: Sequence[RenderedPrompt], samples: int
    ) -> WantedAnswers:
        store, plan = Store(self.folder / name), ResponsePlan(prompts, samples, self.run.config.serving.shard_size)
        store.open(self.manifest(settings))
        settle(store)
        return WantedAnswers(store, plan, settings)

    def past(self, rule: Rule) -> Sequence[Row]:
        """Stored responses to the training prompts; none if the rule needs other settings than theirs; UserError if damaged."""
        store, settings = Store(self.folder / TRAINING), self.settings
        if not (store.folder / MANIFEST).exists() or rule.greedy != settings.sampling.greedy:
            return []
        stored, wanted = store.manifest(), self.manifest(settings)
        return store.rows() if all(stored.get(key) == wanted[key] for key in ("target", "sampling")) else []

    @functools.cached_property
    def _identity(self) -> Manifest:
        """What all responses are made with. All ranks must call it first."""
        facts, tokenizer = self.target.facts, self.target.tokenizer
        self.run.once(self.run.folder / TARGET_FACTS, self.target.remember)
        return {
            "format": STORE_FORMAT,
            "target": facts.fingerprint,
            "target_dtype": facts.dtype,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "template": template_fingerprint(tokenizer, self.run.config.data.template)[:16],
        }

    def manifest(self, settings: DecodeSettings) -> Manifest:
        """Manifest of a store of responses at these settings."""
        return {
            **self._identity,
            "sampling": settings.sampling.as_dict(),
            "max_tokens": settings.max_tokens,
            "eos_ids": list(settings.eos_ids),
            "seed": settings.seed,
        }

    def _make(
        self, name: str, prompts: Sequence[RenderedPrompt], settings: DecodeSettings, samples: int, select: bool = True
    ) -> StoredRows:
        """The plan's rows, checked and in its order. With ``select`` the main process stores that order for all ranks."""
        store, manifest, run = Store(self.folder / name), self.manifest(settings), self.run
        plan = ResponsePlan(prompts, samples, self.run.config.serving.shard_size, run.rank, run.ranks)

        def whole() -> bool:
            store.open(manifest)
            if self.run.claimed:
                settle(store)
            return bool(store.present(plan.keys).all())

        if not run.seen(whole):  # The folder must exist before another rank writes into it.
            if self.target.config.endpoint is None:
                with self.target.loaded() as model:
                    respond(store, plan, model, settings, batch_size=self.run.config.serving.batch_size)
            else:
                self._served(store, plan, settings)
            run.wait()
            if run.main:
                run.await_seen(lambda: bool(store.present(plan.keys).all()), store.folder)
        if select:
            run.once(store.folder / INDEX, lambda: store.select(plan.keys, plan.domains()))
        rows = store.rows() if select else store.chosen(plan.keys, plan.domains())
        run.await_seen(lambda: all(path.exists() for path in rows.files), store.folder)
        tokens, learned = int(rows.tokens_N.sum()), int(rows.response_tokens_N.sum())
        check_learnable(len(rows), tokens, learned, str(store.folder))
        return rows

    def _served(self, store: Store, plan: ResponsePlan, settings: DecodeSettings) -> None:
        """Let the servers answer, after a comparison of each with the local weights if there are some."""
        config, facts, servers = self.run.config, self.target.facts, self.target.endpoint

        def local() -> LocalSays:
            with self.target.loaded() as model:
                return local_says(model, plan.prompts)

        if servers.local is None and not config.target.at_server:
            servers.local = self.run.seen(local)
        stored = config.signal.source != "online" and store.folder.name == TRAINING
        size = bytes_per_token(config.signal.k, facts.vocab_rows) if stored else 0.0
        servers.respond(store, plan, settings, signal_bytes=size)


def heldout_responses(rows: Sequence[Row]) -> list[HeldoutResponse]:
    """Rows of a store as held-out responses to judge a draft on."""
    return [
        HeldoutResponse(row.prompt_id, row.domain, row.prompt_ids, row.response_ids, list(row.log_target_probs))
        for row in rows
    ]
