"""OpenVINO GenAI as a server with vLLM's /v1/completions and its counts of drafts, at temperature 0. It runs in the engine's environment.

    python openvino_server.py TARGET --draft DRAFT --store DIR --gamma 3 --draft-weights int8 --port 8000

Models are converted into the store if they have changed. A request joins the running batch at its next step.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from conversion import convert_once

WEIGHTS = ("fp32", "fp16", "int8", "int4")
# With these, greedy text is that of a float32 run. By default the CPU may round more: products, cache, inputs of 8-bit layers.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
# Of prompts and blocks in a step. Where prompts have to wait for a later step (256 by default), the draft is ahead of the target: the first call
# of a response then verifies a block too, which no engine's counts tell.
STEP_TOKENS = 8192
VERSION = version("openvino-genai")
REFUSED = ("stop", "logprobs", "prompt_logprobs", "logit_bias", "echo", "suffix", "min_tokens")


def converted(model: str, to: Path, weights: str) -> str:
    """Return the directory of a model in OpenVINO's format. It is converted unless that was done from the same files."""
    words = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--weight-format", weights]
    words += ["--task", "text-generation-with-past", "--model", model, str(to)]

    def convert() -> None:
        (to / "model.safetensors").unlink(missing_ok=True)  # what openvino_weights.py made of the old files
        subprocess.run(words, check=True)

    convert_once(model, to / "openvino_model.xml", to / "source.json", convert)
    return str(to)


@dataclass
class Request:
    """A request and its response. kept_B: tokens of each call of the target; the first is the prefill."""

    prompt_ids: list[int]
    max_tokens: int
    end_ids: set[int]
    ids: list[int] = field(default_factory=list)
    kept_B: list[int] = field(default_factory=list)
    ended: bool = False
    steps: SimpleQueue[list[int] | None] = field(default_factory=SimpleQueue)  # tokens of each call; None: the end

    def take(self, ids: list[int]) -> None:
        """Add the tokens of a call, up to an end token."""
        end = next((place for place, token in enumerate(ids, 1) if token in self.end_ids), None)
        self.ended, self.ids = end is not None, self.ids + ids[:end]
        self.kept_B.append(len(ids))
        self.steps.put(ids[:end])

    def counts(self, gamma: int) -> dict[str, Any]:
        """Return vLLM's counts. Near max_tokens the engine drafts less: it leaves room for the target's own token."""
        left_B = [self.max_tokens - sum(self.kept_B[:place]) for place in range(1, len(self.kept_B))]
        drafted_B, accepted_B = [min(gamma, left - 1) for left in left_B], [kept - 1 for kept in self.kept_B[1:]]
        sums = {"num_accepted_draft_tokens": sum(accepted_B), "num_draft_tokens": sum(drafted_B)}
        sums |= {"num_spec_steps": len(left_B), "num_spec_tokens": gamma}
        return {**sums, "per_step_accepted": accepted_B, "per_step_drafted": drafted_B}


class Engine:
    """The pipeline, in a process of its own: its steps hold Python's lock, so requests would wait for them one by one. gamma: 0 without a draft."""

    def __init__(self, target: str, draft: str | None, gamma: int, options: dict[str, Any]) -> None:
        self.tokenizer, self.gamma = genai.Tokenizer(target), 0 if draft is None else gamma
        files = [Path(target, name) for name in ("config.json", "generation_config.json")]
        config = {key: value for one in files if one.is_file() for key, value in json.loads(one.read_text()).items()}
        self.rows, self.context = int(config["vocab_size"]), int(config["max_position_embeddings"])
        ends = config.get("eos_token_id")
        self.end_ids = {ends} if isinstance(ends, int) else set(ends or ())
        self.running: dict[int, Request] = {}
        self._pipe, theirs = multiprocessing.Pipe()
        self._numbers, self._sending = itertools.count(), threading.Lock()
        where = theirs, target, draft, self.gamma, options, self.rows
        multiprocessing.get_context("spawn").Process(target=decode, args=where, daemon=True).start()
        theirs.close()
        print(self._pipe.recv(), flush=True)

    def request_of(self, body: dict[str, Any]) -> Request:
        """Read a request. Raises ValueError for what is not supported."""
        asked = [name for name in REFUSED if body.get(name)] + ["n > 1"] * (body.get("n", 1) != 1)
        if asked or body.get("temperature", 1.0) != 0:
            raise ValueError(f"{', '.join(asked) or 'temperature other than 0'}: not supported by this server")
        ids, most = body.get("prompt"), int(body.get("max_tokens") or 16)
        if isinstance(ids, str):
            special = bool(body.get("add_special_tokens", True))
            ids = self.tokenizer.encode(ids, add_special_tokens=special).input_ids.data[0].tolist()
        if not isinstance(ids, list) or not ids or any(type(one) is not int or not 0 <= one < self.rows for one in ids):
            raise ValueError(f"prompt: give a text or a list of token ids below {self.rows}")
        if len(ids) + most > self.context:
            raise ValueError(f"{len(ids)} tokens and max_tokens {most}: the context has {self.context} tokens")
        return Request(ids, most, set() if body.get("ignore_eos") else {*self.end_ids, *body.get("stop_token_ids", ())})

    def start(self, request: Request) -> None:
        """Have a request decoded."""
        with self._sending:
            number = next(self._numbers)
            self.running[number] = request
            self._pipe.send((number, request.prompt_ids, request.max_tokens, request.end_ids))

    def run(self) -> None:
        """Pass on what is decoded, for ever. EOFError: the pipeline failed; why is in the log."""
        while True:
            number, ids = self._pipe.recv()
            if ids is None:
                self.running.pop(number).steps.put(None)
            else:
                self.running[number].take(ids)


def decode(pipe: Connection, target: str, draft: str | None, gamma: int, options: dict[str, Any], rows: int) -> None:
    """Decode all requests that arrive in the pipe together, and send what each call adds; None is the end of a request."""
    models = {} if draft is None else {"draft_model": genai.draft_model(draft, "CPU", **options)}
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = STEP_TOKENS
    pipeline = genai.ContinuousBatchingPipeline(target, scheduler, "CPU", options | models)
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // (gamma + 1))
    pipe.send(f"OpenVINO GenAI {VERSION}: gamma {gamma}, decodes up to {most} requests at a time, {options}")
    running: dict[int, tuple[Request, Any]] = {}
    while True:
        while not running or pipe.poll():
            try:
                number, *asked = pipe.recv()
            except EOFError:  # The server has ended.
                return
            request = Request(*asked)
            config = genai.GenerationConfig(max_new_tokens=request.max_tokens, ignore_eos=True)
            # A drafted end token would end the block, and gamma would vary. `Request.take` ends the response instead.
            config.eos_token_id, config.stop_token_ids = rows, {rows}
            if gamma:
                config.num_assistant_tokens = gamma
            prompt = ov.Tensor(np.array([request.prompt_ids], dtype=np.int64))
            running[number] = request, pipeline.add_request(number, prompt, config)
        pipeline.step()
        for key, (request, handle) in list(running.items()):
            while handle.can_read() and not request.ended:
                for output in handle.read().values():
                    request.take(list(output.generated_ids))
                    pipe.send((key, list(output.generated_ids)))
            if request.ended:
                handle.stop()
            if request.ended or len(request.ids) >= request.max_tokens:
                del running[key]
                pipe.send((key, None))


class Handler(BaseHTTPRequestHandler):
    """The pages of a server."""

    engine: Engine
    name: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        models = [{"id": self.name, "object": "model", "owned_by": "openvino", "created": 0}]
        pages: dict[str, Any] = {"/health": {}, "/v1/models": {"data": models}}
        pages["/version"] = {"version": VERSION}
        self._reply(200 if self.path in pages else 404, pages.get(self.path, {"error": {"message": "no such page"}}))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            if self.path != "/v1/completions":
                raise ValueError(f"{self.path}: this server has /v1/completions only")
            body = json.loads(content)
            request = self.engine.request_of(body)
        except (ValueError, TypeError, AttributeError) as error:
            return self._reply(400, {"error": {"message": str(error), "code": 400}})
        self.engine.start(request)
        calls = iter(request.steps.get, None)
        if body.get("stream"):
            with contextlib.suppress(OSError):  # The client may leave; the response ends all the same.
                self._stream(request, calls, body)
            return None
        list(calls)
        return self._reply(200, self._part(body, request.ids, self._text(body, request.ids), request))

    def _text(self, body: dict[str, Any], ids: list[int]) -> str:
        return self.engine.tokenizer.decode(ids, skip_special_tokens=body.get("skip_special_tokens", True))

    def _part(self, body: dict[str, Any], ids: list[int], text: str, ended: Request | None) -> dict[str, Any]:
        """Return an answer or a part of a streamed one; ``ended``: the request, in the last part."""
        reason = None if ended is None else "stop" if ended.ended else "length"
        choice = {"index": 0, "text": text, "finish_reason": reason}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids} | ({"prompt_token_ids": ended.prompt_ids} if ended else {})
        part = {"object": "text_completion", "model": self.name, "choices": [choice]}
        if ended is None:
            return part
        counts = {"speculative_decoding": ended.counts(self.engine.gamma)} if self.engine.gamma else {}
        usage = {"prompt_tokens": len(ended.prompt_ids), "completion_tokens": len(ended.ids)}
        return part | {"usage": usage, "metrics": counts}

    def _stream(self, request: Request, calls: Iterator[list[int]], body: dict[str, Any]) -> None:
        """Send what each call adds. Part of a character is sent with the call that completes it."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        ids, sent = list[int](), ""
        for new in calls:
            ids += new
            text = self._text(body, ids).rstrip("\N{REPLACEMENT CHARACTER}")
            self._event(self._part(body, new, text[len(sent) :], None))
            sent = text
        self._event(self._part(body, [], self._text(body, ids)[len(sent) :], request))
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, part: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())


class Server(ThreadingHTTPServer):
    """Accepts many requests at once: beyond its queue, connections are reset."""

    request_queue_size = 1024


def main() -> None:
    """Convert what has changed, load it, and answer until a signal arrives or the engine fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--weights", choices=WEIGHTS, default="fp32")
    parser.add_argument("--draft-weights", choices=WEIGHTS, default="fp32")
    parser.add_argument(
        "--hint", action="append", default=[], help="NAME=VALUE of an engine property, such as INFERENCE_NUM_THREADS=2"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: convert only")
    given = parser.parse_args()
    target = converted(given.target, given.store / f"target-{given.weights}", given.weights)
    draft = given.draft and converted(given.draft, given.store / f"draft-{given.draft_weights}", given.draft_weights)
    if given.port:
        try:
            engine = Engine(target, draft, given.gamma, EXACT | dict(one.split("=", 1) for one in given.hint))
            Handler.engine, Handler.name = engine, given.target
            server = Server((given.host, given.port), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            engine.run()
        except EOFError:
            sys.exit("OpenVINO's pipeline failed; why is said above")


if __name__ == "__main__":
    main()
