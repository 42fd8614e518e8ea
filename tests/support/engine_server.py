"""A server that decodes speculatively with our own decoder and counts as vLLM does, and lies in the ways that are asked of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, Drafting
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings


@dataclass
class Engine:
    """What is served, and where it is not what it should be.

    level: of --per-request-spec-decode-metrics. sampling: instead of what a request asks for. garbage: random text at
    temperature > 0. dies_after: requests. pause: seconds between the events of a stream. resets_at: the request before
    which the counters begin again. unlisted: one in so many prompts, in whose answers a token id is missing. draft
    None: none.
    """

    target: Any
    draft: Any
    gamma: int
    rule: str = "greedy-draft"
    drafting: Drafting = "autoregressive"
    level: str = "detailed"
    metrics: bool = True
    sampling: SamplingSettings | None = None
    garbage: bool = False
    greedy_shift: int = 0
    dies_after: int | None = None
    resets_at: int | None = None
    slow: float = 0.0
    pause: float = 0.0
    total: str = "_total"
    ids: bool = True
    unlisted: int = 0
    tokenizer: Any = None
    prompts: list[Any] = field(default_factory=list)
    made: dict[Any, dict[tuple[int, ...], tuple[list[int], list[int], list[int]]]] = field(default_factory=dict)
    requests: int = 0
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "tokens", "requests"), 0)
    )
    places: list[int] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def decoded(self, request: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
        """(ids, accepted and drafted tokens of each block): all prompts at once, since a batch takes as long as one."""
        asked = SamplingSettings(request["temperature"], max(request["top_k"], 0), request["top_p"], request["min_p"])
        sampling = asked if asked.greedy or self.sampling is None else self.sampling
        eos, most = tuple(request["stop_token_ids"]), request["max_tokens"]
        with self.lock:
            known = self.made.setdefault((asked, most), {})
            if tuple(request["prompt"]) not in known:
                prompts = [list(prompt) for prompt in self.prompts] or [request["prompt"]]
                rule = Rule.usual(sampling.temperature).name
                plain = DecodeSettings(sampling, 0, Rule.named(rule), 1, eos, seed=17)
                # Each prompt has coins of its own: with the same ones for all, their texts would not be independent.
                keys = [str(index) if self.prompts else str(prompt) for index, prompt in enumerate(prompts)]
                keyed = list(zip(keys, prompts, strict=True))
                heads = [found.response_ids for found in decode(self.target, None, keyed, plain)[0]]
                known.update({tuple(prompt): (head, [], []) for prompt, head in zip(prompts, heads, strict=True)})
                longer = [number for number, head in enumerate(heads) if most > 1 and head[-1] not in eos]
                gamma = self.gamma if self.draft is not None else 0
                settings = replace(
                    plain, gamma=gamma, rule=Rule.named("greedy" if sampling.greedy else self.rule if gamma else rule)
                )
                keyed = [(f"{keys[number]} on", [*prompts[number], *heads[number]]) for number in longer]
                drafter = Draft(self.draft, self.drafting).drafter() if gamma else None
                rests = decode(self.target, drafter, keyed, replace(settings, max_tokens=max(1, most - 1)))[0]
                for number, rest in zip(longer, rests, strict=True):
                    ids = [*heads[number], *rest.response_ids]
                    known[tuple(prompts[number])] = ids, list(rest.accepted_counts), list(rest.drafted_counts)
            return known[tuple(request["prompt"])]

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first token as from a prefill, the rest in blocks."""
        time.sleep(self.slow)
        prompt, eos = request["prompt"], request["stop_token_ids"]
        ids, accepted, drafted = self.decoded(request)
        if self.garbage and request["temperature"]:
            rng = np.random.default_rng(request["seed"])
            ids = [*ids[:1], *rng.integers(3, self.target.config.vocab_size, len(ids) - 1).tolist()]
        if not request["temperature"] and self.greedy_shift:
            ids = [*ids[:-1], (ids[-1] + self.greedy_shift) % self.target.config.vocab_size]
        self.count(accepted, drafted, len(ids))
        finished = ids[-1] in eos
        choice = {"index": 0, "finish_reason": "stop" if finished else "length", "text": "", "stop_reason": None}
        if self.tokenizer is not None:
            choice["text"] = self.tokenizer.decode(ids, skip_special_tokens=False)
        if self.ids:
            listed = ids[:1] + ids[2:] if self.unlisted and sum(prompt) % self.unlisted == 0 else ids
            choice |= {"token_ids": listed, "prompt_token_ids": prompt}
        body = {"id": "x", "object": "text_completion", "model": "tiny", "created": 0, "choices": [choice]}
        body["usage"] = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
        }
        if self.level != "none" and self.draft is not None:
            body["metrics"] = {"speculative_decoding": self.stats(accepted, drafted)}
        return body

    def made_blocks(self, greedy: bool) -> int:
        """Blocks of all its responses to whole requests of a mode."""
        most = max(tokens for asked, tokens in self.made if asked.greedy == greedy)
        return sum(
            len(blocks)
            for asked, tokens in self.made
            if asked.greedy == greedy and tokens == most
            for _, blocks, _ in self.made[asked, tokens].values()
        )

    def stats(self, accepted: list[int], drafted: list[int]) -> dict[str, Any]:
        found = {
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": sum(drafted),
            "num_spec_tokens": self.gamma,
            "acceptance_histogram": [accepted.count(j) for j in range(self.gamma + 1)],
        }
        return found | (
            {"per_step_accepted": accepted, "per_step_drafted": drafted} if self.level == "detailed" else {}
        )

    def count(self, accepted: list[int], drafted: list[int], tokens: int) -> None:
        with self.lock:
            if self.resets_at is not None and self.requests == self.resets_at:
                self.counters = dict.fromkeys(self.counters, 0)
                self.places = []
            self.requests += 1
            own = {
                "drafts": len(accepted),
                "draft_tokens": sum(drafted),
                "accepted_tokens": sum(accepted),
                "tokens": tokens,
                "requests": 1,
            }
            self.counters = {name: count + own[name] for name, count in self.counters.items()}
            self.places = [
                (self.places[j] if j < len(self.places) else 0) + sum(kept > j for kept in accepted)
                for j in range(self.gamma)
            ]

    def page(self) -> str:
        labels, total = 'engine="0",model_name="a \\"b\\" {c}"', self.total
        lines = [
            "# HELP vllm:spec_decode_num_drafts Number of spec decoding drafts.",
            "# TYPE vllm:spec_decode_num_drafts counter",
        ]
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            lines.append(f"vllm:spec_decode_num_{name}{total}{{{labels}}} {float(self.counters[name])}")
        for place, count in enumerate(self.places):
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos{total}{{{labels},position="{place}"}} {float(count)}'
            )
        lines.append(f"vllm:generation_tokens{total}{{{labels}}} {float(self.counters['tokens'])}")
        lines.append(
            f'vllm:request_success{total}{{{labels},finished_reason="length"}} {float(self.counters["requests"])}'
        )
        return "\n".join(lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: Any) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        pages = {
            "/v1/models": {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]},
            "/version": {"version": "0.32.0"},
        }
        if self.engine.metrics and self.engine.draft is not None:
            pages["/metrics"] = self.engine.page()
        self.reply(200 if self.path in pages else 404, pages.get(self.path, {"error": {"message": "Not Found"}}))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.engine
        if engine.dies_after is not None and engine.requests >= engine.dies_after:
            self.close_connection = True
            self.connection.close()
        elif "seed" not in request:  # The question which tokenizer is here.
            choice = {"index": 0, "finish_reason": "length", "text": ""}
            if engine.tokenizer is not None:
                choice["prompt_token_ids"] = engine.tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]
            self.reply(200, {"choices": [choice]})
        else:
            with torch.no_grad():
                body = engine.complete(request)
            if request.get("stream"):
                self.stream(body, request)
            else:
                self.reply(200, body)

    def stream(self, body: dict[str, Any], request: dict[str, Any]) -> None:
        """As vLLM streams: a token an event, then the usage and the counts if the client asked for usage."""
        (choice,) = body.pop("choices")
        ids, last = choice.pop("token_ids", None), {"usage": body.pop("usage"), "metrics": body.pop("metrics", None)}
        events = [
            body
            | {"choices": [{"index": 0, "text": choice["text"], "finish_reason": None, "token_ids": ids and ids[:1]}]}
        ]
        rest = {"text": "", "token_ids": ids and ids[1:], "stop_reason": choice["stop_reason"]}
        events.append(body | {"choices": [{"index": 0, "finish_reason": choice["finish_reason"], **rest}]})
        events += [body | {"choices": [], **last}] if (request.get("stream_options") or {}).get("include_usage") else []
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(self.engine.pause)
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def running_engine(engine: Engine) -> Iterator[str]:
    """The url of a server of this engine."""
    handler = type("Bound", (Handler,), {"engine": engine})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}/v1"
        finally:  # An exception that passes leaves no thread polling.
            running.shutdown()
