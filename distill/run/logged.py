"""Take responses from logs, those that can be the target's own: one forward of the target over each, instead of one a token."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from data.files import write_json
from data.prompts.logs import LoggedAnswer
from data.prompts.template import loss_mask, turn_end
from data.responses.batch_file import LeftOut, in_words
from data.responses.rendered import RenderedPrompt, texts_of
from data.responses.store import Row, Store
from distill.config.layout import LOGGED
from distill.config.sections import DataConfig
from distill.models.target import Target
from distill.run.run import Run
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.explain.text_fit import CERTAIN, Evidence, evidence_of
from speculative.rules.sampling import SamplingSettings

# Nats a token between a text's log-probability and the expected one: engines round, quantise, and split logged text in other ways.
MOST_DEVIATION = 0.1
NOT_OWN, UNSTATED = "certainly not the target's own", "without a temperature"


class LoggedAnswers:
    """Logged answers to training prompts on their way into the training store."""

    def __init__(self, run: Run, target: Target, tokenizer: Any, settings: DecodeSettings) -> None:
        """``tokenizer``: of the run's prompts."""
        self.run, self.target, self.tokenizer, self.settings = run, target, tokenizer, settings
        self.turn_end = turn_end(tokenizer, run.config.data.template)
        self.left_out = LeftOut(list)

    def take(
        self, training: Store, prompts: Sequence[RenderedPrompt], fresh: Callable[[], Sequence[HeldoutResponse]]
    ) -> None:
        """Put the answers that can be the target's own into the opened training store. All ranks must call it.

        ``fresh``: makes new responses of the target, to compare with.

        Raises UserError: no answer is left; a model of the logs is certainly not the target; an answer states no temperature.
        """
        run, path, size = self.run, training.folder.with_name(LOGGED), self.run.config.serving.shard_size
        # In an order that does not depend on that of the log.
        chosen = sorted(self._chosen(prompts), key=lambda number: prompts[number].prompt_id)
        keys = "\n".join(prompts[number].prompt_id for number in chosen)
        texts = [json.loads(prompts[number].logged) | {"origin": ""} for number in chosen]
        prompts_digest, digest = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (keys, json.dumps(texts)))
        record = run.seen(lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
        if record.get("log") == digest:
            return
        if record.get("prompts") == prompts_digest:
            raise UserError(
                f"{path}: the log has other answers to these prompts than those that were taken; give the run another name, or delete "
                f"that file and {training.folder} to make the responses again"
            )
        compared = fresh()
        # What a start with another log or share left does not count.
        store = Store(path.with_name(f"{path.stem}-{digest}-{size}"))
        run.seen(lambda: store.open(training.manifest()))
        groups = list(enumerate(chosen[start : start + size] for start in range(0, len(chosen), size)))
        with self.target.loaded() as model:
            parts = run.dealt(
                store.folder / "parts",
                f"logged answers-{digest}",
                groups,
                lambda group: self._score(model, store, group[0], [prompts[number] for number in group[1]]),
                run.config.target.shard,
            )
        scored = [answer for part in parts for answer in part]
        self._refuse_models(scored)
        taken = [answer for answer in scored if not self._left_out(answer["fault"], answer["origin"])]
        if not taken:
            reason, rows = max(self.left_out.items(), key=lambda pair: len(pair[1]))
            raise UserError(f"{rows[0]}: no logged answer can be taken; this one is {reason}")
        medians = (
            float(np.median([answer["log_prob"] for answer in taken])),
            float(np.median([np.mean(response.log_target_probs or [0.0]) for response in compared])),
        )
        run.say(
            f"{len(taken):,} logged answers are taken; median log-probability of a token {medians[0]:.3f}, of fresh answers "
            f"{medians[1]:.3f}; answered again: {in_words(self.left_out)}"
        )

        def adopt() -> None:
            training.adopt(store)
            counts = {reason: len(rows) for reason, rows in self.left_out.items()}
            firsts = {reason: rows[0] for reason, rows in self.left_out.items()}
            facts = {
                "prompts": prompts_digest,
                "log": digest,
                "share": run.config.data.logged_share,
                "taken": len(taken),
            }
            write_json(path, facts | {"left_out": counts, "first": firsts, "median_log_probs": medians})
            for folder in path.parent.glob(f"{path.stem}-*"):
                shutil.rmtree(folder)

        run.once(path, adopt)

    def _left_out(self, reason: str, origin: str) -> bool:
        """Note a row that is left out for a reason; without one it is not."""
        if reason:
            self.left_out[reason].append(origin)
        return bool(reason)

    def _chosen(self, prompts: Sequence[RenderedPrompt]) -> list[int]:
        """Numbers of the prompts whose logged answer was sampled at these settings, by share."""
        config, chosen = self.run.config.data, []
        for number, text in logged_answers(prompts, config.logged_share).items():
            answer = LoggedAnswer(**json.loads(text))
            reason = other_settings(answer, self.settings.sampling)
            if reason == UNSTATED and config.bad_rows == "error":
                raise UserError(
                    f"{answer.origin}: the request states no temperature, so it is unknown what its answer is a sample of; add the "
                    "server's settings to the row, or set data.bad_rows: drop"
                )
            if not self._left_out(reason, answer.origin):
                chosen.append(number)
        if not chosen and not self.left_out:
            raise UserError("data.responses: logged: no source of data.train is a log with answers (docs/logs.md)")
        return chosen

    def _score(
        self, model: PreTrainedModel, store: Store, shard: int, prompts: Sequence[RenderedPrompt]
    ) -> list[dict[str, Any]]:
        """Facts of each answer as JSON; those without a fault become rows of a shard."""
        answers = [LoggedAnswer(**json.loads(prompt.logged)) for prompt in prompts]
        rows = [self._row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        scored, accepted = [], []
        for answer, row, fit in zip(answers, rows, evidence_of(model, rows, self.settings.sampling), strict=True):
            log_probs, fault = fit.log_target_probs.tolist(), NOT_OWN if fit.against > CERTAIN else ""
            accepted += [] if fault else [replace(row, log_target_probs=log_probs)]
            sums = {"surprise": fit.surprise, "tilted_S": fit.tilted_S.tolist(), "tokens": fit.tokens}
            facts = {"origin": answer.origin, "model": answer.model, "fault": fault, **sums}
            scored.append(facts | {"log_prob": float(np.mean(log_probs or [0.0]))})
        if accepted:
            store.write_shard(shard, accepted)
        return scored

    def _row(self, prompt: RenderedPrompt, answer: LoggedAnswer) -> Row:
        """The row of an answer, without probabilities; text lacks the token that ended it. UserError: tokens of another vocabulary."""
        settings, ends = self.settings, self.settings.eos_ids
        ids = answer.ids or list(self.tokenizer(answer.text, add_special_tokens=False).input_ids)
        ended = bool({*ids[-1:]} & {*ends})
        if not ended and answer.finished and answer.end in (None, *ends):  # not by a stop token of the request
            ids, ended = [*ids, answer.end or (self.turn_end if self.turn_end in ends else ends[0])], True
        if max(ids, default=0) >= self.target.facts.vocab_rows:
            raise UserError(
                f"{answer.origin}: the answer has token {max(ids)}, but the target has {self.target.facts.vocab_rows} rows; it is of "
                "another model, so remove the row"
            )
        finished = ended and len(ids) <= settings.max_tokens
        ids = [*prompt.prompt_ids, *ids[: settings.max_tokens]]
        mask = loss_mask(len(prompt.prompt_ids), len(ids))
        return Row(prompt.prompt_id, 0, prompt.domain, ids, mask, (), finished)

    def _refuse_models(self, scored: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError for a model of the logs most of whose answers are certainly not the target's, or the rest of them together."""
        for model in dict.fromkeys(answer["model"] for answer in scored):
            answers = [answer for answer in scored if answer["model"] == model]
            rest = [answer for answer in answers if not answer["fault"]]
            surprise, tokens = sum(answer["surprise"] for answer in rest), sum(answer["tokens"] for answer in rest)
            tilted_S = sum((np.array(answer["tilted_S"]) for answer in rest), np.zeros(1))
            off, wrong = surprise / max(1, tokens), len(answers) - len(rest)
            certain = Evidence(tilted_S, surprise, tokens, np.zeros(0)).against > CERTAIN
            if 2 * wrong > len(answers) or (certain and abs(off) > MOST_DEVIATION):
                raise UserError(
                    f"{answers[0]['origin']}: the answers of model {model!r} are certainly not this target's at these settings: "
                    f"{wrong:,} of {len(answers):,} by themselves, and the log-probability of a token of the others is {off:+.2f} nats "
                    "from the expected one; remove the rows of that model, or set data.responses: fresh"
                )


def refuse_other_share(training: Store, data: DataConfig) -> None:
    """Raise UserError if the store has more answers of logs, or fewer, than this config asks for."""
    path, share = training.folder.with_name(LOGGED), data.logged_share if data.responses == "logged" else 0.0
    if path.exists() and (record := json.loads(path.read_text(encoding="utf-8"))).get("share", share) != share:
        now = f"data.logged_share is {share:g}" if share else f"data.responses is {data.responses}"
        raise UserError(
            f"{path}: {record['taken']:,} responses were taken from logs at data.logged_share {record['share']:g}, and now {now}; "
            f"give the run another name, or delete that file and {training.folder} to make the responses again"
        )


def logged_answers(prompts: Sequence[RenderedPrompt], share: float) -> dict[int, str]:
    """Number of a prompt -> its logged answer as JSON, for this share of those that have one, chosen by id."""
    columns = (texts_of(prompts, name).to_pylist() for name in ("prompt_id", "logged"))
    rows = enumerate(zip(*columns, strict=True))
    return {number: text for number, (key, text) in rows if text and zlib.crc32(key.encode()) < share * 2**32}


def other_settings(answer: LoggedAnswer, wanted: SamplingSettings) -> str:
    """Why an answer is not of these settings, in words; empty if it is."""
    stated = answer.sampling
    if answer.shaped:
        return f"shaped by {', '.join(answer.shaped)}"
    if stated["temperature"] is None:
        return UNSTATED
    if stated["temperature"] == 0 and wanted.greedy:
        return ""
    ours = wanted.as_dict()
    differing = [f"{name} {value} (here {ours[name]})" for name, value in stated.items() if value != ours[name]]
    return f"sampled at {', '.join(differing)}" if differing else ""
