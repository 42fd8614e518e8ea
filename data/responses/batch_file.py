"""Files of batch services: the requests of a run, and results as OpenAI and vLLM write them, in any order.

    {"custom_id": "DIGEST:PROMPT:SAMPLE", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"custom_id": "DIGEST:PROMPT:SAMPLE", "response": {"status_code": 200, "body": {"choices": [...]}}, "error": null}

The digest is that of the store's manifest, so answers of another config are not taken.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
# Of a chat request whose one message is the whole prompt, special tokens included.
VERBATIM = "{{ messages[0]['content'] }}"
HELD_ROWS = 4096  # answers in memory before they are written
PROVEN_ROWS = 8  # of each store, before the first is written

LeftOut = defaultdict[str, list[str]]  # the rows that are left out, by reason
Prove = Callable[[Sequence[Row], DecodeSettings], None]  # Raises UserError for answers that are not the target's.


class WantedAnswers:
    """An opened store with the answers that it lacks, by `custom_id`: (shard, place in the plan)."""

    def __init__(self, store: Store, plan: ResponsePlan, settings: DecodeSettings) -> None:
        """Raises UserError: the manifest or a shard of the store cannot be read."""
        self.store, self.plan, self.settings, self.proven = store, plan, settings, False
        self.digest, self.keys = digest_of(store.manifest())[:16], frozenset(plan.keys.to_pylist())
        lacking = ((shard, place) for shard, places in plan.share(store)[0] for place in places)
        self.lacking = {f"{self.digest}:{plan.keys[place].as_py()}": (shard, place) for shard, place in lacking}


def write_requests(path: Path, wanted: Sequence[WantedAnswers], model: str, url: str, tokenizer: Any) -> None:
    """Write a request for each lacking answer; UserError if the file cannot be written."""
    jobs = [(want, custom_id, place) for want in wanted for custom_id, (_, place) in want.lacking.items()]
    with writing(path), replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for want, custom_id, place in each(jobs, "batch requests"):
            prompt, sample = want.plan.job(place)
            form: dict[str, Any] = {"prompt": list(prompt.prompt_ids), "logprobs": 1}
            if url == CHAT:
                text = tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False)
                form = {"messages": [{"role": "user", "content": text}], "chat_template": VERBATIM, "logprobs": True}
            body = {"model": model, **form, **request_of(want.settings, f"{prompt.prompt_id}:{sample}")}
            body |= {"return_tokens_as_token_ids": True}
            request = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
            file.write(json.dumps(request, ensure_ascii=False) + "\n")


def read_results(path: Path, wanted: Sequence[WantedAnswers], vocab_rows: int, prove: Prove) -> LeftOut:
    """Move answers of a file into their stores. Return the rows without a usable answer; what an earlier start read is skipped.

    Raises UserError: a row of another config, no usable row at all, a file that cannot be read, disk full; see also `Prove`.
    """
    left_out, usable = LeftOut(list), 0
    try:
        with path.open("rb") as file:
            numbered = enumerate(each(file, "batch results"), start=1)
            while some := [(f"{path}:{number}", line) for number, line in islice(numbered, HELD_ROWS)]:
                usable += _take(some, wanted, vocab_rows, left_out, prove)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if left_out and not usable:
        raise UserError(f"{path}: no row has an answer of this run: {in_words(left_out)}")
    return left_out


def in_words(left_out: LeftOut) -> str:
    """How many rows are left out for each reason, and the first of them."""
    return "; ".join(f"{len(rows):,} {reason} (the first {rows[0]})" for reason, rows in left_out.items()) or "none"


def _take(
    lines: Sequence[tuple[str, bytes]],
    wanted: Sequence[WantedAnswers],
    vocab_rows: int,
    left_out: LeftOut,
    prove: Prove,
) -> int:
    """Store the answers of some lines, each with its place in the file. Return how many there are, stored before or now."""
    before = 0
    taken: dict[str, dict[int, Row]] = {want.digest: {} for want in wanted}
    by_digest = {want.digest: want for want in wanted}
    for origin, line in lines:
        try:
            result = dict(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            left_out["rows are cut off or not JSON"].append(origin)
            continue
        digest, _, key = (custom_id := str(result.get("custom_id"))).partition(":")
        if (want := by_digest.get(digest)) is None:
            raise UserError(
                f"{origin}: custom_id {custom_id!r} is of another config (target, template, sampling, max_tokens or seed); "
                "write the requests again with --batch-requests"
            )
        if custom_id not in want.lacking:
            if key in want.keys:
                before += 1
            else:
                left_out["rows are of prompts that this run does not have"].append(origin)
            continue
        place = want.lacking[custom_id][1]
        try:
            taken[digest][place] = _row(result, want, place, vocab_rows, origin)
        except UserError as error:
            left_out["rows have an error or no usable answer"].append(str(error))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            left_out["rows have an error or no usable answer"].append(f"{origin}: not a completion ({error})")
    for want in wanted:
        rows = taken[want.digest]
        if rows and not want.proven:
            prove([*rows.values()][:PROVEN_ROWS], want.settings)
            want.proven = True
        shards = defaultdict[int, list[Row]](list)
        for custom_id, (shard, place) in [*want.lacking.items()] if rows else ():
            if place in rows:
                shards[shard].append(rows[place])
                del want.lacking[custom_id]
        for shard, answers in shards.items():
            want.store.write_shard(shard, answers)
    return before + sum(map(len, taken.values()))


def _row(result: Mapping[str, Any], want: WantedAnswers, place: int, vocab_rows: int, origin: str) -> Row:
    """The row of a result. Raises UserError: an error of the service, another prompt's answer, or tokens that cannot be read."""
    response = result.get("response") or {}
    body = response.get("body") or {}
    error: Any = result.get("error") or body.get("error")
    if error or response.get("status_code", 200) != HTTPStatus.OK:
        while isinstance(error, Mapping):
            error = error.get("error") or error.get("message") or str(error)
        raise UserError(f"{origin}: status {response.get('status_code')}, {' '.join(str(error).split())[:200]}")
    prompt, sample = want.plan.job(place)
    choice: Choice = body["choices"][0]
    theirs = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    if theirs != list(prompt.prompt_ids) and (theirs is not None or "message" in choice):
        raise UserError(f"{origin}: not the answer to this prompt's tokens (prompt_token_ids: {str(theirs)[:40]})")
    if (chat := (choice.get("logprobs") or {}).get("content")) is not None:
        names, values = ([token[name] for token in chat] for name in ("token", "logprob"))
        choice = {**choice, "logprobs": {"tokens": names, "token_logprobs": values}}
    key = f"{prompt.prompt_id}:{sample}"
    return row_of(prompt, sample, response_of(choice, prompt.prompt_ids, want.settings, key, vocab_rows, origin))
