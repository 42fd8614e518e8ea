"""Judge a checkpoint on held-out prompts: replay of held-out responses gives the score, real decoding of some prompts proves it."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.responses.endpoint import EndpointTarget
from distill.config.layout import JUDGING
from distill.models.draft import as_exported, load_draft
from distill.models.target import Target
from distill.run.checkpoint import judged_scores
from distill.run.run import Run
from distill.training.module import DraftModule
from distill.verdict.decoding import DECODED_TOGETHER
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, Drafting
from speculative.engine.cached_model import speed_warnings
from speculative.engine.memory import release
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.evaluate import (
    HeldoutResponse,
    Judgement,
    LiveSums,
    ReplaySums,
    decode_live,
    fresh_check,
    judge_sums,
    live_check,
    one_per_prompt,
    replay_sums,
    require_text,
)
from speculative.measure.intervals import interval, sum_by_prompt
from speculative.measure.replay import agreement_warning, agreement_words, expected_blocks_of
from speculative.measure.token_scores import score_batches, score_tokens
from speculative.rules.rule import Rule


class DraftJudge:
    """Judges drafts with all ranks of a run. Each rank takes some of the work, and results do not depend on the number of ranks."""

    def __init__(
        self,
        run: Run,
        settings: DecodeSettings,
        target: Target,
        heldout: dict[Rule, list[HeldoutResponse]],
        drafting: Drafting = "autoregressive",
    ) -> None:
        """``settings``: with the rule and gamma to judge under. ``heldout``: held-out responses by rule, that one first.

        ``drafting``: how the draft will be served.
        """
        self.run, self.judging, self.settings, self.drafting = run, run.config.judge, settings, drafting
        self.target, self.heldout = target, heldout

    def __call__(self, step: int, draft: DraftModule, folder: Path) -> dict[str, Any]:
        """{step, score, rule, gamma, alpha, tau, ..., domains, replay, live_check, greedy: the same for greedy decoding}.

        All ranks must call it, and get the same. ``folder``: of the checkpoint. Parts that are done stay in its
        `JUDGING` until the caller deletes that.
        """
        for text in self.heldout.values():
            require_text(text)
        parts = folder / JUDGING
        served = self._draft(draft)
        record = {"step": step} | self._replayed(served, parts)
        if self.judging.live == "checkpoint":
            prove = self._asked if self.run.config.target.at_server else self._decoded
            record |= prove(served, step, parts)
        release()  # Training needs the memory until the next checkpoint is judged.
        return record | {"ranks": self.run.ranks}

    def _draft(self, module: DraftModule) -> Draft:
        return Draft(as_exported(module.exported(), self.target), self.drafting)

    def _replayed(self, draft: Draft, parts: Path) -> dict[str, Any]:
        """The judgement by replay, under every rule, and its score."""
        rule, *further = self.heldout
        main = self._replay(draft, self.heldout[rule], rule, parts, rule.name)
        rest = {one.name: self._replay(draft, self.heldout[one], one, parts, one.name).record() for one in further}
        return {"score": main.tau} | main.record() | rest

    def _replay(self, draft: Draft, text: Sequence[HeldoutResponse], rule: Rule, parts: Path, name: str) -> Judgement:
        settings = self.settings.under(rule, self.settings.gamma)
        batches = score_batches(text, draft.model)
        batches[0] = [*(index for index, item in enumerate(text) if not item.response_ids), *batches[0]]
        dealt = self.run.dealt(
            parts, name, batches, lambda batch: asdict(replay_sums(draft, [text[index] for index in batch], settings))
        )
        places = [index for batch in batches for index in batch]
        joined = {
            key: [
                value for _, value in sorted(zip(places, (item for part in dealt for item in part[key]), strict=True))
            ]
            for key in ("accepted_N", "tokens_N", "blocks_NK", "drafted_NJ", "kept_NJ")
        }
        return judge_sums(text, settings, ReplaySums(**joined, gammas=dealt[0]["gammas"]))

    def _decoded(self, draft: Draft, step: int, parts: Path) -> dict[str, Any]:
        """{live_check, warnings} of the prompts whose turn it is."""
        groups, digest = self._turn(step)
        batch_size = min(self.judging.batch_size, DECODED_TOGETHER)

        def work(group: Sequence[HeldoutResponse]) -> dict[str, Any]:
            with self.target.loaded() as target:
                sums = decode_live(target, draft, group, self.settings, batch_size)
                return {"sums": [asdict(item) for item in sums], "slow": speed_warnings(target, draft.model)}

        # Where ranks share a target, only the main process has memory for all of it.
        alone = self.run.config.target.shard
        try:
            with self.target.single_load():
                dealt = self.run.dealt(parts, f"live-{digest}", groups, work, alone)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"judge.live: checkpoint decodes with the whole target {self.run.config.target.path} beside the training state, which does "
                f"not fit in memory ({str(error).splitlines()[0]}); lower judge.batch_size or set judge.live: end"
            ) from error
        check = live_check([LiveSums(**item) for part in dealt for item in part["sums"]])
        slow = dict.fromkeys(item for part in dealt for item in part["slow"])
        warnings = agreement_warning(check.replay), *slow
        return {"live_check": check.record(), "warnings": [item for item in warnings if item]}

    def _turn(self, step: int) -> tuple[list[list[HeldoutResponse]], str]:
        """(groups of `judge.live_prompts` prompts: at each checkpoint the next ones, until all had a turn; their digest, because parts that
        an earlier start left may be of other prompts).
        """
        text = sorted(one_per_prompt(self.heldout[self.settings.rule]), key=lambda item: item.key)
        count = min(self.judging.live_prompts, len(text))
        turn = self.run.seen(lambda: sum(item < step for item, _ in judged_scores(self.run.folder)))
        chosen = [text[(turn * count + place) % len(text)] for place in range(count)]
        chosen.sort(key=lambda item: (len(item.prompt_ids), item.key))
        groups = [chosen[place : place + DECODED_TOGETHER] for place in range(0, count, DECODED_TOGETHER)]
        return groups, hashlib.sha256(" ".join(item.key for item in chosen).encode()).hexdigest()[:12]

    def _asked(self, draft: Draft, step: int, parts: Path) -> dict[str, Any]:
        """{fresh_check, warnings}: the server answers the prompts whose turn it is again, and the draft replays both responses."""
        (groups, digest), server, rule = self._turn(step), self.target.endpoint, self.settings.rule
        if self.run.main:
            server.check()

        def again(target: EndpointTarget, response: HeldoutResponse) -> HeldoutResponse:
            said = target.answer(response.prompt_ids, self.settings, f"{response.key} {step}")
            return replace(response, response_ids=said.response_ids, log_target_probs=said.log_target_probs)

        def sums_of(texts: Sequence[HeldoutResponse]) -> list[list[float]]:
            sums, keys = replay_sums(draft, texts, self.settings), [response.prompt for response in texts]
            accepted_P, tokens_P = (sum_by_prompt(keys, np.array(own_N)) for own_N in (sums.accepted_N, sums.tokens_N))
            return np.stack((accepted_P, tokens_P), 1).tolist()

        def work(group: Sequence[HeldoutResponse]) -> dict[str, list[list[float]]]:
            places = {response.prompt: place for place, response in enumerate(group)}
            new = [answer for _, answer in server.each(again, group)]
            stored = [response for response in self.heldout[rule] if response.prompt in places]
            stored.sort(key=lambda response: places[response.prompt])
            new.sort(key=lambda response: places[response.prompt])
            return {"new": sums_of(new), "stored": sums_of(stored)}

        found = self.run.dealt(parts, f"fresh-{digest}", groups, work)
        new, stored = (np.array([sums for part in found for sums in part[which]]) for which in ("new", "stored"))
        check = fresh_check(new, stored)
        warning = (
            f"alpha is {check.alpha:.3f} on new responses of the server and {check.stored_alpha:.3f} on the stored ones "
            "to the same prompts"
        )
        return {"fresh_check": check.record(), "warnings": [] if check.agrees else [f"{warning} (z {check.z:+.1f})"]}

    def replay_now(self, module: DraftModule) -> dict[str, float]:
        """{alpha, tau} on the held-out responses of the configured rule: one draft pass, no target, on the main process."""
        rule, gamma = self.settings.rule, self.settings.gamma
        draft = self._draft(module)
        scores = score_tokens(draft.model, self.heldout[rule], self.settings.sampling, offsets=draft.offsets(gamma, 1))
        tokens = sum(map(len, scores))
        alpha = sum(own.accept_probs(rule).sum() for own in scores) / tokens
        return {"alpha": float(alpha), "tau": float(tokens / expected_blocks_of(scores, rule, (gamma,)).sum())}

    def headline(self, record: dict[str, Any]) -> str:
        """One line: alpha and tau with intervals, and what the prompts that were decoded live gave; a warning if they disagree."""
        judgement = Judgement.model_validate(record)
        line = (
            f"step {judgement.step:>5}  {judgement.rule}  alpha {judgement.alpha:.3f} {interval(judgement.alpha_ci)}  "
            f"tau {judgement.tau:.2f} {interval(judgement.tau_ci, '.2f')} at gamma {judgement.gamma} by replay"
        )
        if (check := judgement.live_check) is not None:
            line += f"; live {check.tau:.2f} on {check.prompts} prompts ({agreement_words(check.replay, check.tokens)})"
        if (fresh := judgement.fresh_check) is not None:
            line += f"; alpha {fresh.alpha:.3f} on {fresh.prompts} prompts that the server answered again (z {fresh.z:+.1f})"
        if check is None and fresh is None:
            line += f"; no prompt decoded live (judge.live: {self.judging.live})"
        return "\n  warning: ".join((line, *judgement.warnings))


def require_served(paths: Sequence[str], target: Target, longest: int) -> None:
    """Refuse, before the long work, a judge.served that could not be judged at the end.

    Raises UserError: not there, another vocabulary, or a context shorter than `longest`, prompt and response.
    """
    for path in paths:
        limit = max_positions(load_draft(path, target).config)
        if limit is not None and limit < longest:
            raise UserError(
                f"judge.served: {path} has a context of {limit} tokens, but the longest held-out prompt and its response need up to "
                f"{longest}; remove it, or lower data.max_prompt_tokens or serving.max_tokens"
            )
