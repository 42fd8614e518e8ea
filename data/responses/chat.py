"""A target at a hosted chat API, which has no `prompt_logprobs`; the signal is the probabilities of its own response tokens.

The protocol is `/v1/chat/completions` with `logprobs` and `top_logprobs`. The server applies the chat template and returns tokens as
text. Its probabilities are the model's own, before temperature and truncation. It has none for the end token, which is left out of
a response.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from data.responses.endpoint import Choice, EndpointTarget, request_seed
from data.responses.prompt_logprobs import TopK, topk_table
from data.responses.rendered import RenderedPrompt
from data.responses.served import TOP
from data.responses.store import Row, Store
from data.signals.signal import TopKSignal
from data.signals.store import SignalStore
from speculative.decoder.responses import DecodeSettings, Response
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings


class ChatTarget(EndpointTarget):
    """Like `EndpointTarget`, with chat messages. `kept`: a `signal_manifest` of kind topk, to store the k most probable tokens."""

    def __init__(self, *of_endpoint: Any, token_bytes: Callable[[], Mapping[int, bytes]]) -> None:
        """``token_bytes``: the text of each id of the target's vocabulary, without special tokens."""
        super().__init__(*of_endpoint)
        self.kept: dict[str, Any] | None = None
        self._token_bytes = token_bytes
        self._tops: dict[str, TopK] = {}

    @property
    def top(self) -> int:
        """Number of most probable tokens to request."""
        return 0 if self.kept is None else int(self.kept["k"])

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Text of a token -> id. If a raw byte and a written token have the same text, the written token is used."""
        written = {text: token for token, text in sorted(self._token_bytes().items())}
        added = self.tokenizer.added_tokens_decoder.items()
        return written | {str(one.content).encode(): token for token, one in added}

    def check(self) -> None:
        """Check which model answers; its chat template is checked at each response. Raises UserError as `EndpointTarget.check`."""
        self._recognise()

    def _next_token(self, text: str) -> dict[str, float]:
        messages = [{"role": "user", "content": text}]
        places = _places(self._chat(messages, max_tokens=1, temperature=1.0, top_logprobs=TOP)[0])
        return {one["token"]: float(one["logprob"]) for one in places[0]["top_logprobs"]} if places else {}

    def _check_probabilities(self, sampling: SamplingSettings, prompts: Sequence[RenderedPrompt]) -> None:
        """No check: the probabilities are the model's own, and the config refuses settings that need others."""

    def _answer(self, prompt: RenderedPrompt, settings: DecodeSettings, key: str) -> Response:
        sampling = settings.sampling
        turns = json.loads(prompt.turns) if prompt.turns else {"messages": [{"role": "user", "content": prompt.text}]}
        asked: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request_seed(settings.seed, key),
            "top_logprobs": self.top,
        }
        # Leave out settings that are off, because hosted servers know few parameters.
        asked |= {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        choice, counted = self._chat(**turns, **asked)
        if counted not in (None, len(prompt.prompt_ids)):
            raise UserError(
                f"{self.endpoint.url}: counts {counted} tokens in a prompt of {len(prompt.prompt_ids)}, so its chat template differs from "
                "that of target.path; set data.template.chat_template_kwargs, or set target.path to the served model"
            )
        places = _places(choice)
        ids = [self._id_of(place) for place in places]
        text = choice["message"].get("content") or ""
        if None in ids or (text and not ids):
            which = repr(places[ids.index(None)]["token"]) if ids else "no tokens of its text"
            raise UserError(
                f"{self.endpoint.url}: returns {which}, which the vocabulary of target.path does not have; target.path must be the "
                "served model, and the server must return logprobs"
            )
        finished = choice.get("finish_reason") in ("stop", "tool_calls")
        response = Response(key, list(prompt.prompt_ids), finish_reason="end" if finished else "length")
        response.response_ids = [token for token in ids if token is not None]
        # The model's own probabilities are those of the settings only if these change nothing; otherwise they are unknown.
        own = [float(place["logprob"]) if sampling == SamplingSettings() else math.nan for place in places]
        response.log_target_probs = [0.0] * len(own) if sampling.greedy else own
        if self.top:
            self._tops[key] = self._top_of(places)
        return response

    def _id_of(self, entry: Choice) -> int | None:
        text = bytes(entry["bytes"]) if entry.get("bytes") else str(entry["token"]).encode()
        return self._ids.get(text)

    def _top_of(self, places: Sequence[Choice]) -> TopK:
        """The most probable tokens at each place. Tokens outside of the vocabulary count as part of the rest."""
        known = [
            {token: float(one["logprob"]) for one in place["top_logprobs"] if (token := self._id_of(one)) is not None}
            for place in places
        ]
        ids_N = np.array([token for place in known for token in place], dtype=np.int64)
        logs_N = np.array([log_prob for place in known for log_prob in place.values()], dtype=np.float64)
        try:
            return topk_table(ids_N, logs_N, np.array([len(place) for place in known], dtype=np.int64), self.top)
        except ValueError as error:
            raise UserError(f"{self.endpoint.url}: {error}") from error

    def _chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[Choice, int | None]:
        """(first choice of the answer to a conversation, number of prompt tokens that the server reports)."""
        raw, model = self.client.chat.completions.with_raw_response, self.model
        body = {"logprobs": True, **options}

        def call() -> tuple[Choice, int | None]:
            answer = json.loads(raw.create(model=model, messages=messages, extra_body=body).http_response.content)
            choice = answer["choices"][0]
            return {**choice, "message": choice["message"]}, (answer.get("usage") or {}).get("prompt_tokens")

        return self._ask(call, options["top_logprobs"])

    def _before_shard(self, store: Store, rows: Sequence[Row]) -> None:
        """Write the signal of a shard's responses before the shard, so that every stored shard has its signal."""
        if self.kept is None:
            return
        signals = SignalStore(store.folder)
        signals.open(self.kept, [len(row.response_ids) for row in rows], [row.key for row in rows])
        tops = (self._tops.pop(f"{row.prompt_id}:{row.sample}") for row in rows)
        signals.write({number: TopKSignal(*map(torch.from_numpy, top)) for number, top in enumerate(tops)})
        signals.close()

    def require_kept(self, store: SignalStore) -> None:
        """Raise UserError if responses have no signal because they were made with another `signal.source` or `signal.k`."""
        if missing := len(store.missing()):
            raise UserError(
                f"{store.folder}: {missing} responses were stored without their {store.manifest['k']} most probable tokens; delete that "
                "folder to make them again, or set signal.k to its earlier value"
            )


def _places(choice: Choice) -> list[Choice]:
    """One entry per response token: token, logprob, top_logprobs."""
    return (choice.get("logprobs") or {}).get("content") or []
