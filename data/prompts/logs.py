"""Read OpenAI-style logs: the prompt of each request, with the answer and the sampling settings that the log states.

    {"request": {...}, "response": {...}}                       one row; the response of a stream is the list or the text of its events
    {"id": "a", "request": {...}}, {"id": "a", "response": {...}}                       two rows, in any order, also of two files
    {"custom_id": "a", "body": {...}}, {"custom_id": "a", "response": {"body": {...}}}            the files of a batch

Requests are those of chat (`messages`) and completions (`prompt`). Any value may be JSON text.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from data.prompts.columns import domain_of, prompt_row
from data.prompts.conversation import REASONING_KEYS, conversation_prompts, tools_of
from data.prompts.prompt import PromptRow, PromptSource
from speculative.errors import UserError

KEYS = ("custom_id", "request_id", "id")
# A penalty, a bias, a grammar or added text: an answer is then no sample of the target at its temperature alone.
SHAPING = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
SETTINGS = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True)
class LoggedAnswer:
    """The answer of a row. ``origin``: where its response is. ``ids``: its tokens, if they were logged; else ``text`` is all of it.

    ``finished``: it ended by itself. ``sampling``: the settings of the request; the temperature is None where it does not state one.
    ``shaped``: names of settings that change the target's distribution in another way.
    """

    origin: str
    model: str
    text: str
    ids: list[int] | None
    finished: bool
    sampling: dict[str, Any]
    shaped: list[str]

    def written(self) -> str:
        """JSON that `read_answer` reads."""
        return json.dumps(asdict(self))


def read_answer(text: str) -> LoggedAnswer:
    """The answer that `LoggedAnswer.written` wrote."""
    return LoggedAnswer(**json.loads(text))


def is_log(columns: Collection[str], source: PromptSource) -> bool:
    """Whether these are the columns of requests or responses."""
    if source.prompt_column or source.messages_column:
        return False
    return "request" in columns or bool({"custom_id", "request_id"} & {*columns} and {"body", "response"} & {*columns})


class Exchanges:
    """Joins requests with their responses, over all files of a source."""

    def __init__(self, source: PromptSource, domain: str) -> None:
        self.source, self.domain = source, domain
        self._requests: dict[str, PromptRow | None] = {}  # without their response; None: that came
        self._responses: dict[str, tuple[Any, str]] = {}  # without their request

    def rows(self, values: Mapping[str, Any], origin: str) -> list[PromptRow]:
        """The prompts that this row completes. Raises UserError: it is neither a request nor a response that can be read."""
        request = _parsed(values.get("request") or values.get("body"), "request", origin)
        response = _parsed(values.get("response"), "response", origin)
        key = next((str(values[name]) for name in KEYS if values.get(name) is not None), "")
        if request is None and response is None:
            raise UserError(f"{origin}: a row of a log needs a request or a response; remove it")
        if not key and (request is None or response is None):
            raise UserError(f"{origin}: a row with half of an exchange needs a key, one of {', '.join(KEYS)}")
        if request is None:
            if key not in self._requests:
                self._responses[key] = response, origin
                return []
            row, self._requests[key] = self._requests[key], None
            return [answered(row, response, origin)] if row else []
        row = self._prompt(request, domain_of(values, self.source.domain_column, self.domain, origin), origin)
        if response is None and key in self._responses:
            response, origin = self._responses.pop(key)
        if response is not None:
            return [answered(row, response, origin)]
        self._requests[key] = row
        return []

    def rest(self, bad_rows: list[UserError] | None) -> Iterator[PromptRow]:
        """Prompts without a response, to be answered. A response without a request is an error, to raise or to add to ``bad_rows``."""
        for row in filter(None, self._requests.values()):
            yield replace(row, logged="")
        for key, (_, origin) in self._responses.items():
            error = UserError(
                f"{origin}: no row has the request of the response {key!r}; add the file with the requests"
            )
            if bad_rows is None:
                raise error
            bad_rows.append(error)

    def _prompt(self, request: Any, domain: str, origin: str) -> PromptRow:
        request = request.get("body", request)
        content = json.dumps(
            {"model": request.get("model"), "sampling": _sampling(request), "shaped": _shaped(request)}
        )
        if "messages" in request:
            asked = conversation_prompts(request["messages"], "messages", origin, self.source.system, False)
            turns, answer, _ = asked[0]
            if answer is not None:
                raise UserError(f"{origin}: the request ends in an assistant turn; remove the row")
            tools = tools_of(request.get("tools"), "tools", origin)
            return PromptRow(None, turns, None, domain, origin, tools, logged=content)
        prompt = request.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        if ids := _ids(prompt):
            return replace(
                prompt_row(json.dumps(ids), None, domain, origin, None), prompt_ids=tuple(ids), logged=content
            )
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f"{origin}: the request has no messages and no prompt; remove the row")
        return replace(prompt_row(prompt, None, domain, origin, self.source.system), logged=content)


def answered(row: PromptRow, response: Any, origin: str) -> PromptRow:
    """A request's prompt with its response. Raises UserError: an error of the server, or no text."""
    status = response.get("status_code", 200) if isinstance(response, dict) else 200
    body = response.get("body", response) if isinstance(response, dict) else response
    events = body if isinstance(body, list) else [body]
    if status != 200 or not all(isinstance(event, dict) for event in events) or any(one.get("error") for one in events):
        raise UserError(f"{origin}: the response is an error (status {status}); remove the row")
    text, ids, finish, stop, model, prompt_ids, unread = "", [], "", None, "", row.prompt_ids, False
    for event in events:
        model = str(event.get("model") or model)
        choice: dict[str, Any] = next((one for one in event.get("choices") or () if not one.get("index")), {})
        turn = choice.get("message") or choice.get("delta") or choice
        text += str(turn.get("content") or turn.get("text") or "")
        unread = unread or any(turn.get(name) for name in ("tool_calls", "function_call", "refusal", *REASONING_KEYS))
        ids += _ids(choice.get("token_ids")) or []
        finish, stop = str(choice.get("finish_reason") or finish), choice.get("stop_reason", stop)
        logged_ids = _ids(event.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        prompt_ids = tuple(logged_ids) if logged_ids else prompt_ids
    if not (ids or text) or (unread and not ids):
        what = "reasoning or tool calls without token_ids" if unread else "no text"
        raise UserError(f"{origin}: the response has {what}; remove the row")
    if finish not in ("stop", "length", "tool_calls"):
        raise UserError(f"{origin}: the response is not whole (finish_reason {finish or None!r}); remove the row")
    asked = json.loads(row.logged)
    # A string of the request ended it, not the target.
    finished = finish != "length" and not isinstance(stop, str)
    answer = LoggedAnswer(
        origin, model or str(asked["model"]), text, ids or None, finished, asked["sampling"], asked["shaped"]
    )
    return replace(row, logged=answer.written(), prompt_ids=prompt_ids)


def _parsed(value: Any, name: str, origin: str) -> Any:
    """A request or response: an object, the list of a stream's events, or JSON or event text of either; None if it is missing."""
    try:
        if isinstance(value, str) and value.lstrip().startswith("data:"):
            lines = (line.removeprefix("data:").strip() for line in value.splitlines() if line.startswith("data:"))
            return [json.loads(line) for line in lines if line != "[DONE]"]
        value = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: {name} is not JSON ({error}); fix or remove the row") from error
    if not isinstance(value, dict | list | None) or (name == "request" and isinstance(value, list)):
        raise UserError(f"{origin}: {name} is a {type(value).__name__}, not an object; fix or remove the row")
    return value


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a request states; -1 is how engines write a top_k that is off."""
    stated = {name: request.get(name) for name in SETTINGS if request.get(name) not in (None, -1)}
    return SETTINGS | {name: value for name, value in stated.items() if isinstance(value, int | float)}


def _shaped(request: Mapping[str, Any]) -> list[str]:
    kind = request.get("response_format")
    plain = {"response_format"} if isinstance(kind, dict) and kind.get("type") == "text" else set()
    penalty = ["repetition_penalty"] if request.get("repetition_penalty") not in (None, 1) else []
    return [name for name in SHAPING if request.get(name) and name not in plain] + penalty


def _ids(value: Any) -> list[int] | None:
    whole = isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    return value if whole and value else None
