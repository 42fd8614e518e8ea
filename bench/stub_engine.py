"""Our own decoder as a server with vLLM's protocol: the stub engine of tests, and of `make loop` without an installed engine.

    python bench/stub_engine.py serve TARGET --port 8001 --speculative-config '{"model": "DRAFT", "num_speculative_tokens": 3}'

Requests with the same settings are decoded as one batch; requests that arrive meanwhile form the next one. As in vLLM, the first token
of a response is not drafted, token ids are returned on request, and a stream's counts are in its usage chunk.
"""

from distill.faults import exit_status

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import uvicorn
from transformers import PreTrainedModel

from distill.config.target import TargetConfig
from distill.models.draft import load_draft
from distill.models.target import Target
from speculative.decode import STOP, DecodeSettings, check_prompts, context_of, end_token_ids, generate
from speculative.decoder.responses import CommitGate, Response
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import Drafter
from speculative.drafters.gamma import FixedGamma
from speculative.errors import UserError
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings
from vllm_protocol import REASONS, Job, Pages, ServedEngine

MAX_TOKENS = 16  # vLLM's, of a completion that does not say
REFUSED = ("logprobs", "prompt_logprobs", "top_logprobs", "structured_outputs", "tools", "echo", "suffix")


class PrefillFirst(FixedGamma):
    """Take the first token of a response from the target, as a prefill does. All rows of a call begin together."""

    def start(self, rows: int) -> None:
        self._begun = False

    def choose(self, active_R: Any) -> int:
        begun, self._begun = self._begun, True
        return self.max_gamma if begun else 0


class StubEngine(ServedEngine):
    """A pair of models and the thread that decodes with them.

    withheld: ids that no response may contain. A response ends before them (a commit gate), so it has fewer tokens than were accepted.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Any,
        drafter: Drafter | None,
        gamma: int,
        rule: str,
        *,
        name: str,
        batch_size: int = 16,
        withheld: Sequence[int] = (),
    ) -> None:
        super().__init__(name, gamma if drafter is not None else 0)
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.rule, self.batch_size = rule, batch_size
        self.eos_ids, self.withheld = end_token_ids(self.target), frozenset(withheld)
        self._jobs: list[Job] = []
        self._arrived = threading.Condition()
        threading.Thread(target=self._decode_for_ever, daemon=True).start()

    def submit(self, job: Job) -> None:
        with self._arrived:
            self._jobs.append(job)
            self._arrived.notify()

    def stats(self, job: Job, response: Response) -> dict[str, Any]:
        return super().stats(job, response) if self.gamma else {}

    def _decode_for_ever(self) -> None:
        while True:
            batch = self._next_batch()
            try:
                self._decode(batch)
            except Exception as error:  # one failed batch does not stop the next
                for job in batch.values():
                    job.say(error)

    def _next_batch(self) -> dict[str, Job]:
        """The first waiting job and those with the same settings; at most one job per key, because a key gives one text."""
        with self._arrived:
            self.counts.running.set(0)
            self._arrived.wait_for(lambda: bool(self._jobs))
            self._jobs = [job for job in self._jobs if not job.cancelled]
            batch: dict[str, Job] = {}
            for job in self._jobs:
                if len(batch) < self.batch_size and job.settings == self._jobs[0].settings:
                    batch.setdefault(job.key, job)
            self._jobs = [job for job in self._jobs if batch.get(job.key) is not job]
            self.counts.waiting.set(len(self._jobs))
            self.counts.running.set(len(batch))
            return batch

    def _decode(self, batch: dict[str, Job]) -> None:
        if not batch:
            return
        jobs = list(batch.values())
        settings = jobs[0].settings
        assert settings is not None
        events = generate(
            self.target,
            self.drafter,
            [(job.key, job.prompt_ids) for job in jobs],
            settings,
            batch_size=len(jobs),
            tokenizer=self.tokenizer,
            policy=PrefillFirst(settings.gamma),
            gate=self._gate(batch),
        )
        for event in events:
            response = event.response
            if response.blocks > 1:
                self.counts.add_block(response.drafted_counts[-1], response.accepted_counts[-1])
            self.counts.tokens.inc(len(event.token_ids))
            if event.finish_reason is not None:
                cancelled = jobs[event.index].cancelled
                self.counts.requests.labels("abort" if cancelled else REASONS[event.finish_reason]).inc()
            jobs[event.index].say(event)

    def _gate(self, batch: dict[str, Job]) -> CommitGate:
        """End cancelled responses, and responses before a withheld token."""
        return lambda key, _, token, __: STOP if batch[key].cancelled or token in self.withheld else None

    def job_of(self, body: dict[str, Any], chat: bool) -> Job:
        asked = [name for name in REFUSED if body.get(name)]
        if (body.get("response_format") or {}).get("type", "text") != "text":
            asked.append("response_format")
        if body.get("n", 1) != 1 or asked:
            raise UserError(f"{', '.join(asked) or 'n > 1'}: not supported by this engine")
        if body.get("model") not in (None, self.name):
            raise UserError(f"The model `{body['model']}` does not exist; this engine serves `{self.name}`")
        ids = (
            self._chat_ids(body.get("messages"))
            if chat
            else self._prompt_ids(body.get("prompt"), body.get("add_special_tokens", True))
        )
        try:
            settings = self._settings(body, len(ids), chat)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise UserError(f"the request cannot be read: {error}") from error
        seed = body.get("seed")
        key = uuid.uuid4().hex if seed is None else f"{seed} {zlib.crc32(json.dumps(ids).encode())}"
        check_prompts(self.target, self.drafter, [(key, ids)], settings)
        return Job(key, ids, settings, body, chat, asyncio.get_running_loop())

    def _settings(self, body: dict[str, Any], prompt_tokens: int, chat: bool) -> DecodeSettings:
        def value(name: str, kind: Callable[[Any], Any], default: Any) -> Any:
            return default if body.get(name) is None else kind(body[name])

        sampling = SamplingSettings(
            value("temperature", float, 1.0),
            max(0, value("top_k", int, 0)),
            value("top_p", float, 1.0),
            value("min_p", float, 0.0),
        )
        context = context_of(self.target, self.drafter)[0] or prompt_tokens + MAX_TOKENS
        most = value(
            "max_completion_tokens", int, value("max_tokens", int, context - prompt_tokens if chat else MAX_TOKENS)
        )
        stop = value("stop", lambda given: (given,) if isinstance(given, str) else tuple(given), ())
        bias = tuple(sorted((int(token), float(number)) for token, number in value("logit_bias", dict, {}).items()))
        rules = LogitsRules(
            repetition_penalty=value("repetition_penalty", float, 1.0),
            bias=bias,
            allowed_ids=tuple(value("allowed_token_ids", tuple, ())),
        )
        rules.check(len(self.tokenizer))
        ends = () if body.get("ignore_eos") else self.eos_ids
        return DecodeSettings(
            sampling,
            self.gamma,
            Rule.named("greedy" if sampling.greedy else self.rule if self.gamma else "sample"),
            most,
            (*ends, *value("stop_token_ids", tuple, ())),
            rules=rules if rules.active else None,
            stop=stop,
            min_tokens=value("min_tokens", int, 0),
        )

    def _prompt_ids(self, prompt: Any, special: bool) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt, add_special_tokens=special)["input_ids"])
        if not isinstance(prompt, list) or not prompt or any(type(token) is not int for token in prompt):
            raise UserError("prompt: give a text or a list of token ids")
        return prompt

    def _chat_ids(self, messages: Any) -> list[int]:
        """Apply the tokenizer's chat template; without one, join the contents with newlines."""
        if not isinstance(messages, list) or any(
            not isinstance(turn, dict) or not isinstance(turn.get("content"), str) for turn in messages
        ):
            raise UserError("messages: give a list of turns with text content")
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer("\n".join(turn["content"] for turn in messages))["input_ids"])
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Read those flags of `vllm serve` that decide how the pair decodes; the others have no meaning here."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("target", help="directory, hub id or `embedded`")
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    return parser.parse_known_args(words)[0]


@contextlib.contextmanager
def open_engine(options: argparse.Namespace) -> Iterator[StubEngine]:
    """The engine with target and draft.

    Raises:
        UserError: a missing or incompatible model.
    """
    torch.set_num_threads(1)
    target = Target(TargetConfig(path=options.target), torch.device("cpu"), what="target")
    drafting, drafter = options.speculative_config, None
    if drafting:
        way: Any = "parallel" if drafting.get("parallel_drafting") else "autoregressive"
        drafter = Draft(load_draft(drafting["model"], target), way).drafter()
    rule = "sample" if drafting.get("draft_sample_method") == "probabilistic" else "greedy-draft"
    gamma = drafting.get("num_speculative_tokens", 0)
    with target.loaded() as model:
        yield StubEngine(
            model, target.tokenizer, drafter, gamma, rule, name=options.target, batch_size=options.max_num_seqs
        )


def run(words: Sequence[str]) -> int:
    """Serve a pair of models until interrupted."""
    options = options_of(words)
    try:
        with open_engine(options) as engine:
            app = Pages(engine).app()
            uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=2)
    except (Exception, KeyboardInterrupt) as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
