"""Reads a request: whether its response can be logged, its sampling settings, and its conversation."""

import functools
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.live.options import GatewayOptions
from distill.live.traffic.record import SANE, is_setting, keyed_hash
from speculative.errors import UserError

PATHS = ("/v1/chat/completions", "/v1/completions")
LOGGED_BODY_BYTES = 1 << 20  # Parsing a body blocks all other requests, so larger ones are forwarded unread.
SLICE, NO_LOG, CONVERSATION = b"x-understudy-slice", b"x-understudy-no-log", b"x-understudy-conversation"
ALL = "all"
SETTINGS = ("temperature", "top_p", "top_k", "min_p")  # settings of the target's distribution, as in SamplingSettings
_ID_CHARACTERS = 64
# With these keys, the response is not a sample of the target at its sampling settings.
_CONSTRAINTS = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "frequency_penalty",
    "presence_penalty",
    "logits_processors",
    "thinking_token_budget",
)
_NOT_LOGGED = {
    "n": "n",
    "best_of": "best_of",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "prompt_logprobs": "logprobs",
    "echo": "echo",
    "use_beam_search": "beam search",
    "prompt_embeds": "content",
    "suffix": "content",
}


@dataclass(frozen=True)
class LoggedRequest:
    """A request. why_not: why its response is not logged; empty if it is.

    content: messages or prompt; the prompt hash is made of it. conversation: bytes that are the same in every turn. sampling: None if a
    setting is the engine's unknown default.
    """

    id: str
    slice: str
    why_not: str
    content: Any
    conversation: bytes
    sampling: dict[str, float | int | None] | None
    constrained: bool
    body: bytes


def read_request(
    path: str, headers: Mapping[bytes, bytes], body: bytes, options: GatewayOptions, salt: bytes = b""
) -> LoggedRequest:
    """Read a POST. ``salt``: the log's secret. With --text or --usage the body sent to the engine asks for more; otherwise it is the
    client's, byte for byte.
    """
    record_id, slice_name = _word(headers, b"x-request-id", _ID_CHARACTERS), _word(headers, SLICE)
    caller = headers.get(b"authorization", b"").decode("latin-1")
    if record_id and caller:  # The last record of an id counts, so another caller must not be able to reuse it.
        record_id += f"-{keyed_hash(salt, 'caller', caller)[:16]}"
    parsed = _parse(body) if path in PATHS else None
    content = None if parsed is None else parsed.get("messages" if path == PATHS[0] else "prompt")
    why_not = _why_not(path, headers, parsed, content)
    why_not = why_not or ("large" if len(body) > LOGGED_BODY_BYTES else "")
    sampling, constrained = None, False
    if parsed is not None and not why_not:
        sampling, constrained = _sampling(parsed, parse_sampling(options.sampling)), _constrained(parsed)
        body = _asking(parsed, body, options.text, options.usage)
    conversation = headers.get(CONVERSATION) or _conversation(content, body)
    record_id, slice_name = record_id or uuid.uuid4().hex, slice_name or ALL
    return LoggedRequest(record_id, slice_name, why_not, content, conversation, sampling, constrained, body)


@functools.cache
def parse_sampling(text: str) -> dict[str, float]:
    """`temperature=0.7,top_p=0.8` as numbers. Raises UserError for an unknown key or a value that is not a number."""
    sampling = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            sampling[key.strip()] = int(value) if key.strip() == "top_k" else float(value)
        except ValueError as error:
            raise UserError(f"--sampling {part}: give a number") from error
        if key.strip() not in SETTINGS:
            raise UserError(f"--sampling {part}: the known settings are {', '.join(SETTINGS)}")
    return sampling


def _word(headers: Mapping[bytes, bytes], name: bytes, most: int = 64) -> str:
    """A header's value if it is a valid word, else an empty string."""
    value = headers.get(name, b"").decode("latin-1")
    return value if len(value) <= most and SANE.fullmatch(value) else ""


def _parse(body: bytes) -> dict[str, Any] | None:
    if len(body) > LOGGED_BODY_BYTES:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _why_not(path: str, headers: Mapping[bytes, bytes], parsed: dict[str, Any] | None, content: Any) -> str:
    if path not in PATHS:
        return "path"
    if headers.get(NO_LOG, b"0") not in (b"0", b"false", b""):
        return "asked"
    if parsed is None:
        return "unreadable"
    for key, reason in _NOT_LOGGED.items():
        if _wanted(key, parsed.get(key)):
            return reason
    return "" if _is_text(content) else "content"


def _wanted(key: str, value: Any) -> bool:
    if value is None or value is False:
        return False
    if key in ("n", "best_of"):
        return value != 1
    return key in ("logprobs", "prompt_logprobs") or bool(value)  # 0 of them is the sampled token's own.


def _is_text(content: Any) -> bool:
    """Whether the prompt is one text or one list of ids, or all messages are text."""
    if isinstance(content, str):
        return True
    if not isinstance(content, list) or not content:
        return False
    if all(type(token) is int for token in content):
        return True
    return all(isinstance(message, dict) and _is_plain(message) for message in content)


def _is_plain(message: dict[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return isinstance(message.get("role"), str) and isinstance(content, str | None)


def _sampling(parsed: dict[str, Any], defaults: Mapping[str, float]) -> dict[str, float | int | None] | None:
    """The four sampling settings and max_tokens; None if one of the four is unknown or not a number."""
    settings = {key: defaults.get(key) if parsed.get(key) is None else parsed[key] for key in SETTINGS}
    if any(value is not None and not is_setting(value) for value in settings.values()):
        return None
    if settings["temperature"] == 0:  # Truncation does not change the first choice.
        settings = {"temperature": 0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if None in settings.values():
        return None
    most = parsed.get("max_completion_tokens", parsed.get("max_tokens"))
    return {**settings, "max_tokens": most if type(most) is int and is_setting(most) else None}


def _constrained(parsed: dict[str, Any]) -> bool:
    """Whether a grammar, a bias or a penalty constrains the text."""
    if any(parsed.get(key) for key in _CONSTRAINTS) or parsed.get("repetition_penalty") not in (None, 1, 1.0):
        return True
    form, choice = parsed.get("response_format"), parsed.get("tool_choice")
    return (isinstance(form, dict) and form.get("type") != "text") or choice not in (None, "none", "auto")


def _asking(parsed: dict[str, Any], body: bytes, text: bool, usage: bool) -> bytes:
    """The body for the engine: the client's own, unless ids or usage must be requested."""
    more: dict[str, Any] = {"return_token_ids": True} if text and parsed.get("return_token_ids") is not True else {}
    options = parsed.get("stream_options")
    if usage and parsed.get("stream") and not (isinstance(options, dict) and options.get("include_usage")):
        more["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    try:
        return json.dumps({**parsed, **more}, allow_nan=False).encode() if more else body
    except (ValueError, RecursionError):  # A number that JSON cannot express; the engine refuses it.
        return body


def _conversation(content: Any, body: bytes) -> bytes:
    """The messages up to and including the first user message; for a completion, the prompt."""
    if isinstance(content, list) and content and all(isinstance(message, dict) for message in content):
        users = (number for number, message in enumerate(content) if message.get("role") == "user")
        content = content[: next(users, len(content) - 1) + 1]
    return body if content is None else json.dumps(content, sort_keys=True).encode()
