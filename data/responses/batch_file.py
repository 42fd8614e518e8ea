"""Files of batch services: the requests of a run, and results as OpenAI and vLLM write them, in any order.

    {"custom_id": "DIGEST:PROMPT:SAMPLE", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"custom_id": "DIGEST:PROMPT:SAMPLE", "response": {"status_code": 200, "body": {"choices": [...]}}, "error": null}

The digest is that of the store's manifest, so answers of another config are not taken.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

from data.files import digest_of, replacing, writing
from data.responses.endpoint import Choice, request_of, response_of
from data.responses.respond import ResponsePlan, row_of
from data.responses.store import Row, Store
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.progress import each

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# A chat request whose one message is the whole prompt, special tokens included.
VERBATIM = "{{ messages[0]['content'] }}"
_HELD_ROWS = 4096  # answers in memory before they are written


class WantedAnswers:
    """An opened store with the answers that it lacks, by `custom_id`: (shard, place in the plan)."""

    def __init__(self, store: Store, plan: ResponsePlan, settings: DecodeSettings) -> None:
        """Raises UserError: the manifest or a shard of the store cannot be read."""
        self.store, self.plan, self.settings = store, plan, settings
        self.digest, self.keys = digest_of(store.manifest())[:16], frozenset(plan.keys.to_pylist())
        self.lacking = {
            f"{self.digest}:{plan.keys[place].as_py()}": (shard, place)
            for shard, places in plan.share(store)[0]
            for place in places
        }


@dataclass
class LeftOut:
    """Rows or prompts that are left out: their number and the first, by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, what: str) -> None:
        """Count one."""
        self.counts[reason] += 1
        self.first.setdefault(reason, what)

    def __str__(self) -> str:
        reasons = (f"{count:,} {reason} (the first {self.first[reason]})" for reason, count in self.counts.items())
        return "; ".join(reasons) or "none"


def write_requests(path: Path, wanted: Sequence[WantedAnswers], model: str, url: str, tokenizer: Any) -> LeftOut:
    """Write a request for each lacking answer. Return prompts that a chat request cannot ask, because no text has their tokens.

    Raises UserError: the file cannot be written.
    """
    jobs = [(one, custom_id, place) for one in wanted for custom_id, (_, place) in one.lacking.items()]
    left_out = LeftOut()
    with writing(path), replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for one, custom_id, place in each(jobs, "batch requests"):
            prompt, sample = one.plan.job(place)
            options = request_of(one.settings, f"{prompt.prompt_id}:{sample}")
            asked: dict[str, Any] = {"prompt": list(prompt.prompt_ids), "logprobs": 1}
            if url == CHAT:
                text = tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False)
                if tokenizer(text, add_special_tokens=False)["input_ids"] != list(prompt.prompt_ids):
                    left_out.add("prompts are the tokens of no text", prompt.prompt_id)
                    continue
                messages = [{"role": "user", "content": text}]
                asked = {"messages": messages, "chat_template": VERBATIM, "logprobs": True}
            body = {"model": model, **asked, **options, "return_tokens_as_token_ids": True}
            request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
            file.write(json.dumps(request, ensure_ascii=False) + "\n")
    return left_out


def read_results(path: Path, wanted: Sequence[WantedAnswers], vocab_rows: int) -> LeftOut:
    """Move answers of a file into their stores. Return the rows without a usable answer; what an earlier start read is skipped.

    Raises UserError: a row of another config, no usable row at all, a file that cannot be read, disk full.
    """
    left_out, before = LeftOut(), sum(len(one.lacking) for one in wanted)
    try:
        with path.open("rb") as file:
            numbered = enumerate(each(file, "batch results"), start=1)
            while some := list(islice(numbered, _HELD_ROWS)):
                _take(some, path, wanted, vocab_rows, left_out)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if left_out.counts and sum(len(one.lacking) for one in wanted) == before:
        raise UserError(f"{path}: no row has an answer that this run lacks: {left_out}")
    return left_out


def _take(
    some: Sequence[tuple[int, bytes]], path: Path, wanted: Sequence[WantedAnswers], vocab_rows: int, left_out: LeftOut
) -> None:
    """Store the answers of some lines."""
    by_digest, rows = {one.digest: one for one in wanted}, defaultdict[tuple[str, int], dict[int, Row]](dict)
    for number, line in some:
        origin = f"{path}:{number}"
        try:
            result = dict(json.loads(line))
        except (ValueError, TypeError):
            left_out.add("rows are cut off or not JSON", origin)
            continue
        digest, _, key = (custom_id := str(result.get("custom_id"))).partition(":")
        if (one := by_digest.get(digest)) is None:
            raise UserError(
                f"{origin}: custom_id {custom_id!r} is of another config (target, template, sampling, max_tokens or seed); "
                "write the requests again with --batch-requests"
            )
        if custom_id not in one.lacking:
            if key not in one.keys:
                left_out.add("rows are of prompts that this run does not have", origin)
            continue
        shard, place = one.lacking[custom_id]
        try:
            rows[digest, shard][place] = _row(result, one, place, vocab_rows, origin)
        except UserError as error:
            left_out.add("rows have an error or no usable answer", str(error))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            left_out.add("rows have an error or no usable answer", f"{origin}: not a completion ({error})")
        else:
            del one.lacking[custom_id]
    for (digest, shard), places in rows.items():
        by_digest[digest].store.write_shard(shard, [places[place] for place in sorted(places)])


def _row(result: Mapping[str, Any], one: WantedAnswers, place: int, vocab_rows: int, origin: str) -> Row:
    """The row of a result. Raises UserError: an error of the service, another prompt's answer, or tokens that cannot be read."""
    response = result.get("response") or {}
    body = response.get("body") or {}
    error: Any = result.get("error") or body.get("error")
    if error or response.get("status_code", 200) != HTTPStatus.OK:
        while isinstance(error, Mapping):
            error = error.get("error") or error.get("message") or str(error)
        raise UserError(f"{origin}: status {response.get('status_code')}, {' '.join(str(error).split())[:200]}")
    prompt, sample = one.plan.job(place)
    choice: Choice = body["choices"][0]
    chat = (choice.get("logprobs") or {}).get("content")
    theirs = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    if theirs != list(prompt.prompt_ids) and (theirs is not None or "message" in choice):
        said = f"{theirs[:6]}..., here {list(prompt.prompt_ids[:6])}..." if theirs else "it lists no prompt_token_ids"
        raise UserError(f"{origin}: not proven to be the answer to this prompt's tokens ({said})")
    if chat is not None:
        names, values = ([token[name] for token in chat] for name in ("token", "logprob"))
        choice = {**choice, "logprobs": {"tokens": names, "token_logprobs": values}}
    key = f"{prompt.prompt_id}:{sample}"
    return row_of(prompt, sample, response_of(choice, prompt.prompt_ids, one.settings, key, vocab_rows, origin))
