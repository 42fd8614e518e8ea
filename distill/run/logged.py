"""Take responses from logs, those that can be the target's own: one forward of the target over each, instead of one a token."""

import hashlib
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.files import Manifest, write_json
from data.prompts.logs import LoggedAnswer, read_answer
from data.prompts.template import turn_end
from data.responses.logged import UNSTATED, logged_row, other_settings
from data.responses.rendered import RenderedPrompt, texts_of
from data.responses.respond import ProgressBar
from data.responses.store import Row, Store
from distill.config.layout import LOGGED, TRAINING
from distill.models.target import Target
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.text_fit import CERTAIN, Evidence, evidence_of

# Nats a token between a text's log-probability and the expected one: engines round, quantise, and split logged text in other ways.
MOST_DEVIATION = 0.1
NOT_OWN, FOREIGN = "certainly not the target's own", "of tokens that the target does not have"


@dataclass(frozen=True)
class ScoredAnswer:
    """Facts of a logged answer, as JSON. ``fault``: why it is not taken."""

    origin: str
    model: str
    fault: str
    tokens: int
    log_prob: float  # mean of a token
    surprise: float
    tilted_S: list[float]


class LoggedAnswers:
    """Logged answers to training prompts on their way into the training store."""

    def __init__(self, run: Run, target: Target, tokenizer: Any, settings: DecodeSettings, manifest: Manifest) -> None:
        """``tokenizer``: of the run's prompts. ``manifest``: of the training store."""
        self.run, self.target, self.settings, self.manifest = run, target, settings, manifest
        self.tokenizer, self.end = tokenizer, turn_end(tokenizer, run.config.data.template)
        self.left_out: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # of each reason, the first row

    def take(self, folder: Path, prompts: Sequence[RenderedPrompt], fresh: Sequence[HeldoutResponse]) -> None:
        """Put the answers that can be the target's own into the training store in ``folder``. All ranks must call it.

        ``fresh``: new responses of the target, to compare with.

        Raises UserError: no answer is left; a model of the logs is certainly not the target; an answer states no temperature.
        """
        chosen = self._chosen(prompts)
        names = " ".join(prompts[number].prompt_id for number in chosen)
        digest = hashlib.sha256(names.encode()).hexdigest()[:16]
        if self.run.seen(lambda: _record(folder).get("prompts") == digest):
            return
        store = Store(folder / "logged")
        self.run.seen(lambda: store.open(self.manifest))
        scored = self._scored(store, prompts, chosen, digest)
        self._refuse_models(scored)
        for answer in scored:
            if answer.fault:
                self._leave_out(answer.fault, answer.origin)
        taken = [answer for answer in scored if not answer.fault]
        if not taken:
            reason = self.left_out.most_common(1)[0][0]
            raise UserError(f"{self.first[reason]}: no logged answer can be taken; this one is {reason}")
        record = {
            "prompts": digest,
            "taken": len(taken),
            "tokens": sum(answer.tokens for answer in taken),
            "median_log_prob": float(np.median([answer.log_prob for answer in taken])),
            "median_log_prob_of_fresh": float(
                np.median([np.mean(own.log_target_probs) for own in fresh if own.response_ids])
            ),
            "left_out": {reason: {"rows": rows, "first": self.first[reason]} for reason, rows in self.left_out.items()},
        }

        def adopt() -> None:
            Store(folder / TRAINING).adopt(store)
            write_json(folder / LOGGED, record)
            shutil.rmtree(store.folder)

        self.run.once(folder / LOGGED, adopt)
        self.run.say(summary_of(record))

    def _leave_out(self, reason: str, origin: str) -> None:
        self.left_out[reason] += 1
        self.first.setdefault(reason, origin)

    def _chosen(self, prompts: Sequence[RenderedPrompt]) -> list[int]:
        """Numbers of the prompts whose logged answer was sampled at these settings, by share."""
        config, chosen = self.run.config.data, []
        columns = (texts_of(prompts, name).to_pylist() for name in ("prompt_id", "logged"))
        for number, (prompt_id, text) in enumerate(zip(*columns, strict=True)):
            if not text or zlib.crc32(prompt_id.encode()) >= config.logged_share * 2**32:
                continue
            answer = read_answer(text)
            reason = other_settings(answer, self.settings.sampling)
            if reason == UNSTATED and config.bad_rows == "error":
                raise UserError(
                    f"{answer.origin}: the request states no temperature, so it is unknown what its answer is a sample of; add the "
                    "server's settings to the row, or set data.bad_rows: drop"
                )
            if reason:
                self._leave_out(reason, answer.origin)
            else:
                chosen.append(number)
        if not chosen and not self.left_out:
            raise UserError("data.responses: logged: no source of data.train is a log with answers (docs/logs.md)")
        return chosen

    def _scored(
        self, store: Store, prompts: Sequence[RenderedPrompt], chosen: Sequence[int], digest: str
    ) -> list[ScoredAnswer]:
        """Facts of all chosen answers, in order; rows without a fault are in the store. ``digest``: of the chosen prompts."""
        size = self.run.config.serving.shard_size
        groups = list(enumerate(chosen[start : start + size] for start in range(0, len(chosen), size)))
        mine = sum(len(numbers) for shard, numbers in groups if shard % self.run.ranks == self.run.rank)
        with ProgressBar("logged answers", mine, 0, self.run.main) as bar, self.target.loaded():

            def work(group: tuple[int, Sequence[int]]) -> list[dict[str, Any]]:
                shard, numbers = group
                answers = [read_answer(prompts[number].logged) for number in numbers]
                scored, rows = self._score([prompts[number] for number in numbers], answers)
                if rows:
                    store.write_shard(shard, rows)
                bar.count(sum(answer.tokens for answer in scored))
                bar.store(len(scored))
                return [vars(answer) for answer in scored]

            parts = self.run.dealt(store.folder / "parts", digest, groups, work, self.run.config.target.shard)
        return [ScoredAnswer(**answer) for part in parts for answer in part]

    def _score(
        self, prompts: Sequence[RenderedPrompt], answers: Sequence[LoggedAnswer]
    ) -> tuple[list[ScoredAnswer], list[Row]]:
        """(facts of each answer, the rows of those without a fault)."""
        rows = [
            logged_row(prompt, answer, self.tokenizer, self.settings, self.end)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        fits = [max(row.input_ids) < self.target.facts.vocab_rows for row in rows]
        readable = [row for row, fit in zip(rows, fits, strict=True) if fit]
        evidence = iter(evidence_of(self.target.model, readable, self.settings.sampling))
        scored, own = [], []
        for row, fit, answer in zip(rows, fits, answers, strict=True):
            found = next(evidence) if fit else Evidence(np.zeros(1), 0.0, 0, np.zeros(0))
            fault = FOREIGN if not fit else NOT_OWN if found.against > CERTAIN else ""
            log_probs = found.log_target_probs.tolist()
            facts = found.tokens, float(np.mean(log_probs or [0.0])), found.surprise, found.tilted_S.tolist()
            scored.append(ScoredAnswer(answer.origin, answer.model, fault, *facts))
            if not fault:
                own.append(replace(row, log_target_probs=log_probs))
        return scored, own

    def _refuse_models(self, scored: Sequence[ScoredAnswer]) -> None:
        """Raise UserError for a model of the logs most of whose answers are certainly not the target's, or the rest of them together."""
        for model in dict.fromkeys(answer.model for answer in scored):
            answers = [answer for answer in scored if answer.model == model]
            rest = [answer for answer in answers if not answer.fault]
            tokens, surprise = sum(answer.tokens for answer in rest), sum(answer.surprise for answer in rest)
            tilted_S = sum((np.array(answer.tilted_S) for answer in rest), np.zeros(1))
            whole, off = Evidence(tilted_S, surprise, tokens, np.zeros(0)), surprise / max(1, tokens)
            wrong = len(answers) - len(rest)
            if 2 * wrong > len(answers) or (whole.against > CERTAIN and abs(off) > MOST_DEVIATION):
                raise UserError(
                    f"{answers[0].origin}: the answers of model {model!r} are certainly not this target's at these settings: "
                    f"{wrong:,} of {len(answers):,} by themselves, and the log-probability of a token of the others is {off:+.2f} nats "
                    "from the expected one; remove the rows of that model, or set data.responses: fresh"
                )


def summary_of(record: dict[str, Any]) -> str:
    """One line about what was taken and left out."""
    medians = record["median_log_prob"], record["median_log_prob_of_fresh"]
    line = (
        f"{record['taken']:,} logged answers of {record['tokens']:,} tokens are taken; median log-probability of a token "
        f"{medians[0]:.3f}, of fresh answers {medians[1]:.3f}"
    )
    left_out = [f"{rows['rows']:,} {reason} (the first {rows['first']})" for reason, rows in record["left_out"].items()]
    return f"{line}; answered again: {', '.join(left_out)}" if left_out else line


def _record(folder: Path) -> dict[str, Any]:
    """What an earlier start took; empty without one."""
    path = folder / LOGGED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
