"""A local server that speaks vLLM's protocol on top of a real tiny model, and fails at times."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer

from speculative.rules.sampling import SamplingSettings, logits_to_probs

MODEL = tiny_model(vocab_size=TOKENS, seed=3)


@dataclass
class Behaviour:
    """How the server differs from a good one."""

    served: tuple[str, ...] = ("tiny",)
    model: Any = MODEL  # whose top log-probabilities it gives
    key: str | None = None
    token_ids: bool = True
    token_names: bool = True  # names of the form token_id:N when they are asked for
    keeps_end_token: bool = True
    prompt_logprobs: bool = True
    max_logprobs: int = 64
    processed: bool = True
    shift: int = 0  # added to every id that it says
    lost_places: int = 0  # places without prompt_logprobs, as from a prefix cache
    scale: float = 1.0  # of log-probabilities: 0.5 is no distribution any more
    faults: dict[int, str] = field(
        default_factory=dict
    )  # number of the completion request -> 500, drop, slow, junk, never
    always: str | None = None  # a fault of every request with a seed, which are those for responses
    seconds: float = 0.0  # that an answer takes
    chat_ids: list[int] | None = None  # what its chat template makes of any chat; None: it has no chat API
    dead_after: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: Any, headers: tuple[tuple[str, str], ...] = ()) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(content))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def error(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"message": message, "code": status}}, (("retry-after-ms", "5"),))

    def refused(self) -> bool:
        key = self.behaviour.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.error(401, "Unauthorized")
        return True

    def do_GET(self) -> None:
        if self.refused():
            return
        if self.path != "/v1/models":
            self.error(404, "Not Found")
            return
        self.reply(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.behaviour.served]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        behaviour = self.behaviour
        with behaviour.lock:
            number = len(behaviour.requests)
            behaviour.requests.append(request)
        fault = behaviour.faults.get(number) or (behaviour.always if "seed" in request else None)
        if behaviour.dead_after is not None and number >= behaviour.dead_after:
            fault = "drop"
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
        elif fault == "500":
            self.error(500, "out of luck")
        elif fault == "junk":
            self.reply(200, b"<html>welcome</html>")
        elif not self.refused():
            time.sleep(0.6 if fault == "slow" else 60 if fault == "never" else behaviour.seconds)
            if self.path == "/v1/chat/completions" and behaviour.chat_ids is not None:
                self.reply(200, {"choices": [], "prompt_token_ids": behaviour.chat_ids})
                return
            if self.path != "/v1/completions":
                self.error(404, "Not Found")
                return
            try:
                self.reply(200, self.complete(request))
            except ValueError as error:
                self.error(400, str(error))

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        behaviour, prompt = self.behaviour, request["prompt"]
        if isinstance(prompt, str):
            prompt = tiny_tokenizer()(prompt, add_special_tokens=False)["input_ids"]
        k = request.get("prompt_logprobs")
        if k is not None and k > behaviour.max_logprobs:
            limit = behaviour.max_logprobs
            raise ValueError(f"Requested prompt logprobs of {k}, which is greater than max allowed: {limit}")
        if len(prompt) + request["max_tokens"] > 250:
            raise ValueError(f"This model's maximum context length is 250 tokens, you asked for {len(prompt)}")
        ids, log_probs, finished = generate(prompt, request, behaviour.processed)
        ended = finished and not behaviour.keeps_end_token
        said = [token + behaviour.shift for token in (ids[:-1] if ended else ids)]
        as_ids = request.get("return_tokens_as_token_ids") and behaviour.token_names
        names = [f"token_id:{i}" if as_ids else tiny_tokenizer().decode([i]) for i in said]
        tops = [
            {f"token_id:{i}" if as_ids else tiny_tokenizer().decode([i]): x for i, x in top}
            for top in top_logprobs(prompt, ids, request, behaviour)
        ]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if finished else "length",
            "text": tiny_tokenizer().decode(said),
            "stop_reason": ids[-1] if ended else None,
            "logprobs": {"tokens": names, "token_logprobs": log_probs, "top_logprobs": tops},
        }
        if request.get("return_token_ids") and behaviour.token_ids:
            choice |= {"token_ids": said, "prompt_token_ids": prompt}
        if k is not None and behaviour.prompt_logprobs:
            choice["prompt_logprobs"] = places(prompt, k, behaviour)
        return {"id": "x", "object": "text_completion", "model": "tiny", "created": 0, "choices": [choice]}


def generate(prompt: list[int], request: dict[str, Any], processed: bool) -> tuple[list[int], list[float], bool]:
    """One token at a time, no cache: what a server would say, and the log-probabilities it would give."""
    sampling = SamplingSettings(
        request["temperature"], max(request.get("top_k", 0), 0), request.get("top_p", 1.0), request.get("min_p", 0.0)
    )
    generator = torch.Generator().manual_seed(request.get("seed", 0))
    ids, log_probs = list(prompt), []
    for _ in range(request["max_tokens"]):
        logits = logits_after(ids)[-1:]
        probs = logits_to_probs(logits, sampling)[0]
        token = int(torch.multinomial(probs, 1, generator=generator))
        log_probs.append(float((probs if processed else logits[0].softmax(-1))[token].log()))
        ids.append(token)
        if token in request.get("stop_token_ids", ()):
            return ids[len(prompt) :], log_probs, True
    return ids[len(prompt) :], log_probs, False


def top_logprobs(
    prompt: list[int], ids: list[int], request: dict[str, Any], behaviour: Behaviour
) -> list[list[tuple[int, float]]]:
    """(id, log-probability) of the most probable tokens at each place of a response and of its own, as vLLM lists them."""
    logs = logits_after([*prompt, *ids], behaviour.model)[len(prompt) - 1 : -1].log_softmax(-1)
    top = logs.topk(request.get("logprobs") or 0)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    listed = [dict(zip(*pair, strict=True)) for pair in pairs]
    return [[*({token: float(row[token])} | most).items()] for token, row, most in zip(ids, logs, listed, strict=True)]


def places(prompt: list[int], k: int, behaviour: Behaviour) -> list[dict[str, Any] | None]:
    """Per prompt token: the k best and the token itself, with ranks, as vLLM gives them; none for the first."""
    logs = logits_after(prompt).log_softmax(-1)
    found: list[dict[str, Any] | None] = [None]
    for place in range(1, len(prompt)):
        row = logs[place - 1]
        kept = {*row.topk(k).indices.tolist(), prompt[place]}
        ranks = {token: 1 + int((row > row[token]).sum()) for token in kept}
        found.append(
            {
                str(token + behaviour.shift): {"logprob": float(row[token]) * behaviour.scale, "rank": ranks[token]}
                for token in kept
            }
        )
    return [None if 1 <= place <= behaviour.lost_places else entry for place, entry in enumerate(found)]


@torch.no_grad()
def logits_after(ids: list[int], model: Any = MODEL) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].float()


@contextmanager
def running_server() -> Iterator[tuple[str, Behaviour]]:
    behaviour = Behaviour()
    handler = type("Bound", (Handler,), {"behaviour": behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}/v1", behaviour
        finally:  # An exception that passes leaves no thread polling.
            running.shutdown()
