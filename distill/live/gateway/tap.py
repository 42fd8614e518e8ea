"""Reads an engine's response while it is forwarded: token ids, usage, finish reason and draft counts. It changes nothing."""

import json
from collections import deque
from typing import Any

from distill.engines.protocol.counts import DraftCounts
from distill.engines.protocol.engine import read_counts

MOST_BYTES = 8 << 20  # of a JSON response, or of one line of a stream; larger ones are not read
# Quotes inside text are escaped, so this is the key. Such an event has only text and ids.
_NOTHING = b'"finish_reason":null'
_LAST_EVENTS = 4  # Counts are in one of the last events, with usage or with the finish reason.


class Tap:
    """One response. After `end`: readable, finish, tokens and ids (None: not reported), counts, odd_counts (inconsistent counts)."""

    def __init__(self, stream: bool, keep_ids: bool) -> None:
        """``stream``: server-sent events; otherwise one JSON object. ``keep_ids``: keep token ids."""
        self.stream, self.keep_ids = stream, keep_ids
        self.readable, self.ended, self.odd_counts = True, False, False
        self.finish = ""
        self.prompt_tokens: int | None = None
        self.response_tokens: int | None = None
        self.prompt_ids: list[int] | None = None
        self.response_ids: list[int] | None = None
        self.counts: DraftCounts | None = None
        self._rest = bytearray()
        self._last: deque[dict[str, Any]] = deque(maxlen=_LAST_EVENTS)

    def feed(self, piece: bytes) -> None:
        """Take the next bytes. Afterwards ``ended`` tells whether a stream has sent its last event."""
        if not self.readable:
            return
        if self.stream and not self._rest and piece.endswith(b"\n"):
            self._lines(piece)
            return
        self._rest += piece
        if self.stream and b"\n" in piece:
            whole = self._rest.rfind(b"\n") + 1
            lines, self._rest = bytes(self._rest[:whole]), self._rest[whole:]
            self._lines(lines)
        if len(self._rest) > MOST_BYTES:
            self.readable = False
            self._rest.clear()

    def end(self) -> None:
        """Finish reading: no more bytes come."""
        if self.readable and not self.stream:
            self._event(bytes(self._rest))
        self._rest.clear()
        for event in reversed(self._last):
            try:
                self.counts = self.counts or read_counts(event)
            except ValueError:
                self.odd_counts = True
        for side in ("prompt", "response"):
            ids, tokens = getattr(self, f"{side}_ids"), getattr(self, f"{side}_tokens")
            if tokens is None and ids is not None:
                setattr(self, f"{side}_tokens", len(ids))
            elif ids is not None and len(ids) != tokens:
                setattr(self, f"{side}_ids", None)  # A reasoning parser may hide some tokens.

    def _lines(self, lines: bytes) -> None:
        for line in lines.split(b"\n"):
            if line.startswith(b"data:") and (self.keep_ids or _NOTHING not in line or b'"usage"' in line):
                self._event(line[5:].strip())

    def _event(self, text: bytes) -> None:
        if self.stream and text == b"[DONE]":
            self.ended = True
            return
        try:
            self._read(json.loads(text))
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            self.readable = False

    def _read(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.finish = "error"
        choices = event.get("choices") or ()
        choice = choices[0] if choices else {}
        finish = choice.get("finish_reason")
        if self.keep_ids:
            if self.prompt_ids is None:
                self.prompt_ids = _ids(event.get("prompt_token_ids") or choice.get("prompt_token_ids"))
            if (ids := _ids(choice.get("token_ids"))) is not None:
                self.response_ids = self.response_ids or []
                self.response_ids += ids
        self.finish = finish or self.finish
        if (usage := event.get("usage")) is not None:
            self.prompt_tokens = _count(usage, "prompt_tokens")
            self.response_tokens = _count(usage, "completion_tokens")
        if finish or not choices or usage is not None:
            self._last.append(event)


def _ids(ids: Any) -> list[int] | None:
    return ids if isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids) else None


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None
