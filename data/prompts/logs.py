"""Read OpenAI-style logs: the prompt of each request, with the answer and the sampling settings that the log states.

    {"request": {...}, "response": {...}}                       one row; the response of a stream is the list or the text of its events
    {"id": "a", "request": {...}}, {"id": "a", "response": {...}}                       two rows, in any order, also of two files
    {"custom_id": "a", "body": {...}}, {"custom_id": "a", "response": {"body": {...}}}            the files of a batch

Requests are those of chat (`messages`) and completions (`prompt`). Any value may be JSON text.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from data.prompts.columns import MESSAGES_NAMES, PROMPT_NAMES, domain_of, near, prompt_row
from data.prompts.conversation import REASONING_KEYS, conversation_prompts, tools_of
from data.prompts.prompt import PromptRow, PromptSource
from speculative.errors import UserError

KEYS = ("custom_id", "request_id", "id")
SETTINGS = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# A penalty, a bias or a grammar, and the value of each that changes nothing: with one, an answer is no sample of the target at these
# settings. Empty values change nothing either.
SHAPING = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "best_of": 1,
    "ignore_eos": False,
    "response_format": {"type": "text"},
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar")),
}
REASONS = {"stop_reason", "matched_stop"}  # of vLLM, of SGLang
HIDDEN = ("tool_calls", "function_call", "refusal", *REASONING_KEYS)  # parts of an answer beside its text


@dataclass(frozen=True)
class LoggedAnswer:
    """``origin``: the row. ``ids``: tokens, if they were logged. ``finished``: it ended by itself, with the token ``end`` if that is known.
    ``sampling``: `SETTINGS` of the request, the temperature None if it states none. ``shaped``: its settings of `SHAPING`.
    """

    origin: str
    model: str
    text: str
    ids: list[int]
    finished: bool
    end: int | None
    sampling: dict[str, Any]
    shaped: list[str]


def is_log(columns: Collection[str], source: PromptSource) -> bool:
    """Whether these are the columns of requests or responses."""
    names = {*columns}
    halves = {"custom_id", "request_id"} & names and {"body", "response"} & names
    # Many data sets have an id, a prompt and a response.
    answers = {"id", "response"} <= names and not {*PROMPT_NAMES, *MESSAGES_NAMES} & names
    return not (source.prompt_column or source.messages_column) and bool("request" in names or halves or answers)


class Exchanges:
    """Joins requests with their responses, over all files of a source."""

    def __init__(self, source: PromptSource, domain: str) -> None:
        self.source, self.domain = source, domain
        self._requests: dict[str, PromptRow] = {}  # without their response
        self._responses: dict[str, tuple[Any, str]] = {}  # without their request
        self._joined: dict[str, bytes] = {}  # digest of the last response of each key, which a log may repeat

    def rows(self, values: Mapping[str, Any], origin: str) -> list[PromptRow]:
        """The prompt that this row completes, if it does. Raises UserError: no request or response that can be read."""
        try:
            return self._rows(values, origin)
        except (AttributeError, TypeError, LookupError) as error:
            raise UserError(f"{origin}: not an exchange in OpenAI's format ({error}); fix or remove the row") from error

    def _rows(self, values: Mapping[str, Any], origin: str) -> list[PromptRow]:
        request = _parsed(values.get("request") or values.get("body"), origin)
        response = _parsed(values.get("response"), origin)
        key = next((str(values[name]) for name in KEYS if values.get(name) is not None), "")
        if not (request and response) and not ((request or response) and key):
            raise UserError(f"{origin}: a row of a log has request and response, or one and a key ({', '.join(KEYS)})")
        if not request and key not in self._requests:
            if self._joined.get(key) != _digest(response):
                waiting = self._responses.setdefault(key, (response, origin))
                _refuse_another(key, origin, waiting[1], waiting[0] == response)
            return []
        if request:
            if (column := self.source.domain_column) and column not in values:
                raise UserError(f"{origin}: no column {column!r}{near(column, values)}; it has {', '.join(values)}")
            domain = domain_of(values, column, self.domain, origin)
            row = self._prompt(request, domain, origin)
        else:
            row = self._requests.pop(key)
        if not response and key in self._responses:
            response, origin = self._responses.pop(key)
        if not response:
            first = self._requests.setdefault(key, row)
            _refuse_another(key, origin, first.origin, replace(row, origin=first.origin) == first)
            return []
        if key:
            self._joined[key] = _digest(response)
        return [_answered(row, response, origin)]

    def rest(self, bad_rows: list[UserError] | None) -> Iterator[PromptRow]:
        """Prompts without a response. A response without a request is an error, to raise or to add to ``bad_rows``."""
        yield from (replace(row, logged="") for row in self._requests.values())
        for key, (_, origin) in self._responses.items():
            error = UserError(
                f"{origin}: no row has the request of the response {key!r}; add the file with the requests"
            )
            if bad_rows is None:
                raise error
            bad_rows.append(error)

    def _prompt(self, request: Any, domain: str, origin: str) -> PromptRow:
        """The prompt of a request; ``logged`` has what an answer needs of it."""
        # -1 is how engines write a top_k that is off.
        sampling = {
            name: off if request.get(name) in (None, -1) else request[name] + 0 for name, off in SETTINGS.items()
        }
        shaped = [name for name, off in SHAPING.items() if request.get(name) not in (None, off, "", [], {})]
        stops = bool(request.get("stop"))
        logged = json.dumps(
            {"model": str(request.get("model")), "sampling": sampling, "shaped": shaped, "stops": stops}
        )
        if request.get("messages") is not None:
            turns = conversation_prompts(request["messages"], "messages", origin, self.source.system, False)[0]
            if turns[1] is not None:
                raise UserError(f"{origin}: the request ends in an assistant turn; remove the row")
            tools = tools_of(request.get("tools"), "tools", origin)
            return PromptRow(None, turns[0], None, domain, origin, tools, logged=logged)
        prompt = request.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        ids = _ids(prompt)
        text = json.dumps(ids) if ids else prompt
        if not isinstance(text, str) or not text:
            raise UserError(f"{origin}: the request has no messages and no prompt; remove the row")
        row = prompt_row(text, None, domain, origin, None if ids else self.source.system)
        return replace(row, prompt_ids=tuple(ids) or None, logged=logged)


def _refuse_another(key: str, origin: str, earlier: str, same: bool) -> None:
    """Raise UserError unless a row is the same as the earlier one that waits under its key, by which halves are joined."""
    if not same:
        raise UserError(
            f"{origin}: another row has its key {key!r} ({earlier}), so their other halves cannot be told apart; make each of the two "
            "logs a source of its own, or remove the row"
        )


def _digest(response: Any) -> bytes:
    return hashlib.blake2b(json.dumps(response, sort_keys=True, default=str).encode(), digest_size=8).digest()


def _answered(row: PromptRow, response: Any, origin: str) -> PromptRow:
    """A request's prompt with its response. Raises UserError: an error of the server, or no whole text."""
    status = response.get("status_code", 200) if isinstance(response, dict) else 200
    body = response.get("body", response) if isinstance(response, dict) else response
    events = body if isinstance(body, list) else [body]
    if status != 200 or any(not isinstance(event, dict) or event.get("error") for event in events):
        raise UserError(f"{origin}: the response is an error (status {status}); remove the row")
    text, ids, prompt_ids, request = "", [], row.prompt_ids, json.loads(row.logged)
    last: dict[str, Any] = {}
    hidden, reasons = set[str](), set[str]()
    for event in events:
        choice: dict[str, Any] = next((item for item in event.get("choices") or () if not item.get("index")), {})
        turn = choice.get("message") or choice.get("delta") or choice
        text += turn.get("content") or turn.get("text") or ""
        ids += _ids(choice.get("token_ids"))
        hidden |= {name for name in HIDDEN if turn.get(name)}
        reasons |= choice.keys() & REASONS
        last |= {name: value for name, value in (event | choice).items() if value is not None}
        prompt_ids = tuple(_ids(last.get("prompt_token_ids"))) or prompt_ids
    finish = last.get("finish_reason")
    if finish not in ("stop", "length", "tool_calls"):
        raise UserError(f"{origin}: the response is not whole (finish_reason {finish!r}); remove the row")
    if not ids and (hidden or not text):
        what = f"{', '.join(sorted(hidden))} without token_ids" if hidden else "no text"
        raise UserError(f"{origin}: the response has {what}; remove the row")
    # A text as reason is a stop string of the request, not the target's end. Without a reason nothing says which of the two it was.
    unknown = request.pop("stops") and not reasons
    finished = not (finish == "length" or unknown or any(isinstance(last.get(name), str) for name in REASONS))
    request["model"] = str(last.get("model") or request["model"])
    end = next((last[name] for name in sorted(REASONS) if isinstance(last.get(name), int)), None)
    answer = LoggedAnswer(origin=origin, text=text, ids=ids, finished=finished, end=end, **request)
    return replace(row, logged=json.dumps(asdict(answer)), prompt_ids=prompt_ids)


def _parsed(value: Any, origin: str) -> Any:
    """An object, the list of a stream's events, or JSON or event text of either; None if it is missing."""
    try:
        if isinstance(value, str) and value.strip():
            if re.match(r"\s*(data)?:", value):  # A line that begins with a colon is a comment.
                lines = [line.removeprefix("data:").strip() for line in value.split("\n") if line.startswith("data:")]
                value = [json.loads(line) for line in lines if line != "[DONE]"]
            else:
                value = json.loads(value)
            json.dumps(value, ensure_ascii=False).encode()  # Raises for half of a surrogate pair.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: request or response is not JSON ({error}); fix or remove the row") from error
    return value


def _ids(value: Any) -> list[int]:
    """A list of token ids; empty for anything else."""
    whole = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    return value if whole else []
