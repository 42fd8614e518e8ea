"""Client of a running engine: its name and version, its answers with token ids and counts, its counters."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from statistics import mode
from typing import Any

from data.responses.endpoint import Choice, EndpointTarget, request_of, with_end
from data.responses.endpoint_keys import Endpoint, is_address, root_of
from data.responses.engine_http import page_at
from distill.engines.protocol.counters import PAGES, parse_page
from distill.engines.protocol.counts import CountsError, DraftCounts
from distill.engines.protocol.engine import STREAM, UNKNOWN, Engine, counts_of, known_engines, read_counts
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.measure.engine_costs import Stream

_LAST = {"connection": "close"}
_SETTLED_SECONDS, _LONGEST_SETTLING = 0.1, 5.0


@dataclass(frozen=True)
class Answer:
    """One response. ids: None if the engine does not list them all. seconds: until the whole answer arrived.

    body: the server's whole JSON answer. first_seconds: until its first part arrived; None if it was not streamed.
    """

    key: str
    ids: list[int] | None
    text: str
    finished: bool
    seconds: float
    counts: DraftCounts | None
    tokens: int
    body: dict[str, Any]
    first_seconds: float | None = None


class EngineClient(EndpointTarget):
    """A server that gets one prompt per request. Requests are not retried, since the server's counters would count both."""

    no_completion = "this is not an answer of an OpenAI-compatible server ({said})"
    most_bytes = 1 << 26
    retries = 0

    def __init__(self, url: str, tokenizer: Any, vocab_rows: int, **how: Any) -> None:
        """``tokenizer``: the target's. ``url``: of the API; /v1 is appended if it is missing. ``how``: other fields of `Endpoint`.

        Raises UserError: `url` is not an address.
        """
        if not is_address(url):
            raise UserError(f"{url or 'no address'}: give the address of the API, e.g. http://127.0.0.1:8000/v1")
        self.root = root_of(url)  # the server itself, where its counters are
        super().__init__(Endpoint(urls=(f"{self.root}/v1",), **how), tokenizer, vocab_rows)
        self.engine: Engine = UNKNOWN
        self.version = self.weights = ""
        self.timed = False  # whether only time and counts matter, not token ids

    def identify(self) -> None:
        """Find the engine's name, version and precision, as far as it states them, and check that its tokenizer is ours.

        Raises UserError: no server, another tokenizer, or several models and no --model.
        """
        self.check()
        owners = self._ask(lambda: [str(getattr(model, "owned_by", "")).lower() for model in self.client.models.list()])
        known = known_engines().values()
        self.engine = next((one for one in known if {*owners} & {*one.dialect.owners}), UNKNOWN)
        pages = [(path, key, one) for one in known for path, key in one.dialect.version_pages]
        for path, key, engine in (("/version", "version", UNKNOWN), *pages):
            value = _json(_page(self.root + path, self.key)).get(key)
            if isinstance(value, str) and value:
                self.version = value
                self.engine = engine if self.engine is UNKNOWN else self.engine
                break
        path, key = self.engine.dialect.weights_page
        self.weights = str(_json(_page(self.root + path, self.key)).get(key, "")) if path else ""

    def ask(self, prompt_ids: Sequence[int], settings: DecodeSettings, key: str) -> Answer:
        """Ask for one response and time it.

        Raises UserError: the server is gone or cannot answer, tokens are outside the vocabulary, or counts contradict themselves.
        """
        dialect = self.engine.dialect
        extras = dialect.timed(settings.seed) if self.timed else {}
        options = request_of(settings, key) | dict(extras or dialect.asks)
        start = time.perf_counter()
        headers = _LAST if dialect.closes_streams and options.get("stream") else None
        response = self._response(list(prompt_ids), headers, **options)
        seconds, content = time.perf_counter() - start, response.content
        arrivals = response.extensions["arrivals"] or [(start, 0)]
        first = None if content.lstrip().startswith(b"{") else arrivals[0][0] - start
        whole = json.loads if first is None else _joined
        return self._ask(lambda: self.read(whole(content), settings, key, seconds, first))

    def stream(self, prompt_ids: Sequence[int], settings: DecodeSettings) -> tuple[Stream, int]:
        """Time the chunks of a response of exactly `max_tokens` tokens; also return gamma, 0 if the server reports no drafts.

        Raises UserError: the server is gone or cannot answer, counts no tokens, or counts contradict themselves.
        """
        options = request_of(settings, "time") | {"ignore_eos": True, "stop_token_ids": []} | STREAM
        response = self._response(list(prompt_ids), _LAST, **options | dict(self.engine.dialect.timed(settings.seed)))
        counts, seconds, tokens, drafted, end = None, list[float](), list[int](), list[int](), 0

        def read() -> None:
            nonlocal counts, end
            for line in response.content.splitlines(keepends=True):
                end += len(line)
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line.removeprefix(b"data: "))
                counts = read_counts(part) or counts
                ids = _ids_in((part.get("choices") or [{}])[0]) or ()
                made, tried = self.engine.dialect.progress(part) or (sum(tokens) + len(ids), 0)
                if made > sum(tokens):
                    seconds.append(next(second for second, size in response.extensions["arrivals"] if size >= end))
                    tokens.append(made - sum(tokens))
                if tried > sum(drafted):
                    drafted.append(tried - sum(drafted))
            if sum(tokens) != settings.max_tokens:
                raise ValueError(f"{sum(tokens)} tokens are counted in a stream of {settings.max_tokens} tokens")

        self._ask(read)  # Only now: the engine may share the processor with us.
        sent = response.extensions["sent"]
        after = sum(tokens) - 1
        if counts is None or not (blocks := after - (counts.accepted or 0) if counts.blocks is None else counts.blocks):
            return Stream(sent, seconds, after), 0
        # Blocks at the end draft less, and a block without a part of its own is in the next one's.
        usual = mode(drafted) if drafted else round((counts.drafted or 0) / blocks)
        return Stream(sent, seconds, blocks), counts.gamma or usual

    def read(
        self, body: dict[str, Any], settings: DecodeSettings, key: str, seconds: float, first: float | None = None
    ) -> Answer:
        """Parse a server's JSON answer; UserError for tokens outside the vocabulary or counts that contradict themselves."""
        choice = body["choices"][0]
        finished = choice.get("finish_reason") == "stop"
        if (ids := _ids_in(choice)) is not None:
            ids = with_end(ids, choice, settings.eos_ids, self.vocab_rows, self.endpoint.url, self.label)
        said = (body.get("usage") or {}).get("completion_tokens")
        # Some engines list only the last token of a character that takes several.
        ids = None if ids is not None and isinstance(said, int) and len(ids) < said else ids
        tokens = len(ids) if ids is not None else int(body["usage"]["completion_tokens"])
        if not tokens:
            raise UserError(f"{self.endpoint.url}: its answer to {key} has no tokens ({choice.get('finish_reason')})")
        try:
            counts = read_counts(body)
        except CountsError as error:
            raise UserError(f"{self.endpoint.url}: the counts of {key} contradict themselves: {error}") from error
        return Answer(key, ids, str(choice.get("text") or ""), finished, seconds, counts, tokens, body, first)

    def scrape(self, settle: bool = False) -> DraftCounts | None:
        """Read the server's counters; None if it has none for drafts; UserError if they contradict themselves.

        ``settle``: wait until they stop changing, since an engine may update them after its answer.
        """
        counters, waited = counters_of(self.root, self.key), 0.0
        while settle and counters is not None and waited < _LONGEST_SETTLING:
            time.sleep(_SETTLED_SECONDS)
            waited += _SETTLED_SECONDS
            before, counters = counters, counters_of(self.root, self.key)
            if before == counters:
                break
        return counters

    def _refusal(self, error: Any, k: int | None) -> str:
        import openai

        said = " ".join(str(getattr(error, "message", error)).split())[:200]
        gone = isinstance(error, openai.APIConnectionError)
        what = f"no server answers ({error.__cause__ or said})" if gone else f"{type(error).__name__}: {said}"
        return f"{self.endpoint.url}: {what}"


def _joined(stream: bytes) -> dict[str, Any]:
    """A streamed answer as if it were not: texts and token ids joined, of every other key the last value."""
    lines = [line[5:].strip() for line in stream.splitlines() if line.startswith(b"data:")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    if broken := [event["error"] for event in events if event.get("error")]:
        raise ValueError(f"its stream ended with {broken[0]}")
    parts = [part for event in events for part in event.get("choices") or ()]
    body, choice = ({k: v for one in of for k, v in one.items() if v is not None} for of in (events, parts))
    if "token_ids" in choice:
        choice["token_ids"] = [token for part in parts for token in part.get("token_ids") or ()]
    return body | {"choices": [choice | {"text": "".join(part.get("text") or "" for part in parts)}]}


def _ids_in(choice: Choice) -> list[int] | None:
    """Return the token ids of a response by any of the known keys; None if there is only text."""
    content = (choice.get("logprobs") or {}).get("content") or []
    for ids in (choice.get("token_ids"), choice.get("tokens"), [part.get("id") for part in content] or None):
        if isinstance(ids, list) and all(type(token) is int for token in ids):
            return list(ids)
    return None


def counters_of(root: str, key: str = "") -> DraftCounts | None:
    """Read a server's draft counters; None if it has none; UserError if they contradict themselves."""
    for path in PAGES:
        page = _page(root + path, key)
        try:
            counters = counts_of(parse_page(page)) if page else None
        except CountsError as error:
            raise UserError(f"{root}{path}: {error}") from error
        if counters is not None:
            return counters
    return None


def _page(url: str, key: str) -> str | None:
    """Return the text of a page; None if there is no such page."""
    page = page_at(url, key)
    return page.text if page is not None and page.status_code == HTTPStatus.OK else None


def _json(text: str | None) -> Mapping[str, Any]:
    """Parse a page as a JSON object; empty if it is not one."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text or ""), dict):
            return found
    return {}
