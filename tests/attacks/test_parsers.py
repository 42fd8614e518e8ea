"""Fuzz every parser of untrusted bytes with mutants of real files: it gives a value of the right type, or the documented error on one line.

No other exception, no slow case, no unbounded memory. A failure prints its parser and seed:

    ATTACK="metrics page:1234" pytest tests/attacks -k one_case
"""

import asyncio
import contextlib
import dataclasses
import functools
import gzip
import json
import os
import random
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mutation import memory_grown, mutant
from result_example import example_result
from simulation import trials
from test_gateway_wire import CASES as WIRE_CASES
from traffic_log import record_of

from data.files import read_manifest, write_manifest
from data.prompts.prompt import PromptRow, PromptSource, Template
from data.prompts.sources import load_source
from data.prompts.template import render_prompt
from data.responses.prompt_logprobs import read_topk
from distill.commands.drift.sources import AcceptanceLog, read_answers
from distill.commands.serve import read_export
from distill.config.layout import SERVING_FORMAT
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.protocol.counters import parse_page
from distill.engines.protocol.counts import CountsError, DraftCounts
from distill.engines.protocol.engine import counts_of
from distill.engines.protocol.facts import EngineFacts
from distill.live.arms import Arm, Arms, read_arms, write_arms
from distill.live.gateway.exchange import Exchange
from distill.live.gateway.request import PATHS, LoggedRequest, read_request
from distill.live.gateway.tap import Tap
from distill.live.options import GatewayOptions
from distill.live.traffic.record import RecordError, TrafficRecord, from_line, to_line
from distill.live.versions import Version, read_version
from distill.models.load import AdapterBase, base_of_adapter, load_model, load_tokenizer
from distill.run.result import Result
from distill.run.verdict_record import Verdict
from speculative.errors import LONGEST, UserError

SECONDS = 10.0  # of one case; most take a millisecond
GROWTH = 1 << 30  # bytes of memory over all cases of a parser
PARTS, STEP = trials(1, 50), trials(4, 1)  # of 20,000 cases each; one in four of the first on every push

Made = dict[str, bytes]  # seed files by name


@dataclass(frozen=True)
class Parser:
    """cases: of 20,000. seeds: real files by name. read: reads a mutant of the file of that name in its own folder."""

    cases: int
    seeds: Callable[[Path], Made]
    read: Callable[[str, bytes, Path], Any]
    gives: Any
    refusals: tuple[type[Exception], ...] = (UserError,)


def _lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _written(content: bytes, path: Path) -> Path:
    path.write_bytes(content)
    return path


# The gateway


MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
]
LAW = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "max_tokens": 16}
COUNTS = {
    "num_draft_tokens": 9,
    "num_accepted_draft_tokens": 4,
    "num_spec_steps": 3,
    "acceptance_histogram": {"0": 1, "2": 2},
}


def _requests(_: Path) -> Made:
    chat = {"model": "m", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": False}, "tools": []}
    return {
        "chat": _lines(
            {**chat, **LAW, "response_format": {"type": "text"}, "logit_bias": {"5": 1}, "tool_choice": "auto"}
        )[:-1],
        "text": _lines({"prompt": "Hello", "n": 1, **LAW})[:-1],
        "ids": _lines({"prompt": [1, 2, 3], "logprobs": 0, **LAW})[:-1],
    }


def _ask(name: str, content: bytes, _: Path) -> TrafficRecord:
    """Read, answer and record a request as the gateway does."""
    options = GatewayOptions(
        engine=[],
        log=Path(),
        text=name != "text",
        usage=name != "ids",
        sampling="temperature=1,top_p=1,top_k=0,min_p=0",
    )
    asked = read_request(PATHS[name != "chat"], {}, content, options, b"salt")
    return _recorded(asked, "stop", None)


def _recorded(asked: LoggedRequest, finish: str, tap: Tap | None) -> TrafficRecord:
    exchange = Exchange(
        request=asked,
        arm=Arm("a", "http://a", 1.0),
        slice="all",
        scope=None,
        receive=None,
        send=None,
        arrived=1.0,
        began=time.perf_counter(),
        task=cast(asyncio.Task[None], None),
        tap=tap,
    )
    try:
        record = exchange.record(finish, b"salt")
    except (ValueError, RecursionError):  # documented: the record is invalid, and the gateway counts it
        return record_of(1)
    assert from_line(to_line(record)) == record
    return record


def _answers(_: Path) -> Made:
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    whole = {
        "choices": [{"text": "ab", "finish_reason": "stop", "token_ids": [7, 8], "prompt_token_ids": [1, 2, 3]}],
        **usage,
    }
    events = [{"choices": [{"text": "a", "finish_reason": None, "token_ids": [7]}], "prompt_token_ids": [1, 2, 3]}]
    events += [{"choices": [{"text": "b", "finish_reason": "stop", "token_ids": [8]}]}, {"choices": [], **usage}]
    engines = {
        "vllm": {"metrics": {"speculative_decoding": {**COUNTS, "per_step_accepted": [2, 0, 2], "per_step_drafted": [3, 3, 3]}}},
        "sglang": {"meta_info": {"spec_verify_ct": 3, "spec_accept_token_num": 4,
            "spec_draft_token_num": 9, "spec_accept_histogram": [1, 0, 2]}},
        "llama": {"timings": {"draft_n": 9, "draft_n_accepted": 4}},
        "tensorrt": {"request_perf_metrics": {"speculative_decoding": {"total_accepted_draft_tokens": 4, "total_draft_tokens": 9}}},
    }  # fmt: skip
    streams = {
        f"stream {name}": b"".join(
            b"data: %s\n\n" % json.dumps(one).encode() for one in [*events[:-1], events[-1] | said]
        )
        + b"data: [DONE]\n\n"
        for name, said in engines.items()
    }
    return {name: json.dumps(whole | said).encode() for name, said in engines.items()} | streams


ASKED = read_request(PATHS[1], {}, b'{"prompt": "a", "temperature": 0}', GatewayOptions(engine=[], log=Path()), b"salt")


def _answer(name: str, content: bytes, _: Path) -> TrafficRecord:
    tap = Tap(name.startswith("stream"), keep_ids=True)
    cuts = sorted(random.Random(len(content)).choices(range(len(content) + 1), k=3))
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        tap.feed(content[start:end])
    tap.end()
    assert tap.counts is None or isinstance(tap.counts, DraftCounts)
    return _recorded(ASKED, tap.finish, tap)


def _records(_: Path) -> Made:
    records = {
        "counts": record_of(5, accepted_B=(2, 0, 1), drafted_B=(3, 3, 3), accepted=3),
        "bare": record_of(2, sampling=None, prompt_ids=None),
    }
    return {name: to_line(record).rpartition(b',"crc32"')[0] + b"}" for name, record in records.items()}


def _sealed(name: str, content: bytes, _: Path) -> TrafficRecord:
    body = content.removesuffix(b"}")
    return from_line(b'%s,"crc32":"%08x"}\n' % (body, zlib.crc32(body)))


# Logs and metrics


def _logs(_: Path) -> Made:
    engines = {"metrics": {"speculative_decoding": COUNTS}}, {"timings": {"draft_n": 9, "draft_n_accepted": 4}}
    return {"log.jsonl": _lines(*({"domain": "a", "response": {"choices": [], **of}} for of in engines))}


LOG = b'{"domain": "a", "response": {"timings": {"draft_n": %s, "draft_n_accepted": 1}}}\n'
PAGE = b"""# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 131.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 51.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.76e+09
process_start_time_seconds 1.76e+09
"""
SGLANG = b'sglang:spec_verify_calls_total{tp="0"} 9\nsglang:generation_tokens_total 40\nsglang:num_requests_total 2\n'
TENSORRT = (
    b'trtllm_spec_decode_drafted_tokens_total{token_position="0"} '
    b'9\ntrtllm_spec_decode_accepted_tokens_total{token_position="0"} 4\n'
)


def _metrics(_: str, content: bytes, __: Path) -> DraftCounts | None:
    return counts_of(parse_page(content.decode(errors="replace")))


# Prompts


def _prompts(folder: Path) -> Made:
    rows = [{"prompt": "def f():", "answer": "a", "domain": "x"}, {"prompt": "é", "answer": None, "domain": ["a", "b"]}]
    talks = [
        {
            "messages": [MESSAGES[0], {"role": "user", "content": "q"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        {"messages": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ]
    table = pa.table({"prompt": ["a", "b"], "n": [1, 2]})
    rendered = pa.table(
        {
            "prompt_id": ["p"],
            "prompt_ids": [[1, 2]],
            "text": ["a"],
            "turns": [json.dumps({"messages": MESSAGES})],
            "domain": ["d"],
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, rendered.schema) as writer:
        writer.write_table(rendered)
    return {
        "rows.jsonl": _lines(*rows),
        "talks.jsonl": _lines(*talks),
        "rows.json": json.dumps(rows, indent=1).encode(),
        "talks.json": json.dumps(talks[0], indent=1).encode(),
        "rows.csv": b'prompt,answer\n"def f():\n  pass",a\nb,c\n',
        "rows.txt": b"one\ntwo\n\nthree\n",
        "rows.txt.gz": gzip.compress(b"one\ntwo\n", mtime=0),
        "rows.parquet": (folder / "rows.parquet").read_bytes(),
        "rows.arrow": (folder / "rows.arrow").read_bytes(),
        "rendered.jsonl": _lines(
            {
                "prompt_id": "p",
                "prompt_ids": [1, 2],
                "text": "",
                "turns": json.dumps({"messages": MESSAGES, "tools": [{"a": 1}]}),
                "domain": "d",
            }
        ),
    }


def _load_prompts(name: str, content: bytes, folder: Path) -> list[PromptRow]:
    rows = load_source(PromptSource(path=str(_written(content, folder / name))))
    for row in rows:
        assert isinstance(row.text, str) or (row.messages and all(isinstance(turn, dict) for turn in row.messages))
        assert isinstance(row.domain, str)
        assert all(type(token) is int for token in row.prompt_ids or ())
    return rows


# Runs, exports, checkpoints


CONFIG = b"""name: mine
target: {path: some/target, trust_remote_code: false}
student: {init: carved, layers: [0, -1]}
data:
  train: [{path: x.jsonl, domain: a}]
  heldout: [{path: y.jsonl}]
optim: {lr: 3.0e-4}
judge: {gamma: 3, every: 100}
"""
ALIASES = b"name: m\na: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"


def _exports(_: Path) -> Made:
    facts = EngineFacts(
        "some/target", "export", 5, 8, 8, None, None, True, True, draft_context=64, taus={"sample": 2.5}
    )
    return {
        "serving.json": json.dumps(
            {"format": SERVING_FORMAT, "facts": dataclasses.asdict(facts), "files": ["a"]}
        ).encode()
    }


def _run_files(folder: Path) -> Made:
    write_arms(
        folder / "arms.json", Arms("flags", (Arm("a", "http://127.0.0.1:1", 0.9), Arm("b", "http://127.0.0.1:2", 0.1)))
    )
    write_manifest(folder, {"format": 3, "rows": 5, "made": {"path": "x"}})
    (folder / "provenance.json").write_text(json.dumps({"version": "v0001", "parent": None, "commit": "c"}))
    return {name: (folder / name).read_bytes() for name in ("arms.json", "manifest.json", "provenance.json")} | {
        "adapter_config.json": json.dumps({"base_model_name_or_path": "some/base", "target_modules": ["q"]}).encode()
    }


def _run_file(name: str, content: bytes, folder: Path) -> Any:
    folder = folder / "v0001"
    folder.mkdir(exist_ok=True)
    path = _written(content, folder / name)
    return {
        "arms.json": lambda: read_arms(path),
        "manifest.json": lambda: read_manifest(folder),
        "provenance.json": lambda: read_version(folder),
        "adapter_config.json": lambda: base_of_adapter(folder),
    }[name]()


@functools.cache
def _tiny(folder: Path) -> Path:
    """Files of a model of a few kilobytes and a tokenizer of a few words."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16)).save_pretrained(folder)
    core = Tokenizer(BPE({letter: place for place, letter in enumerate("abcdefgĠ")} | {"ab": 8}, [("a", "b")]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE.decode()
    fast.save_pretrained(folder)
    return folder


TEMPLATE = (
    b"{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim "
    b"}};{% endfor %}{% if add_generation_prompt %}ab{{ 1 + 2 }}{% endif %}"
)


def _checkpoint(folder: Path) -> Made:
    weights = (_tiny(folder) / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", weights[:8])[0]
    return {
        "header": weights[8 : 8 + size].rstrip(),
        "model.safetensors": weights,
        "config.json": (folder / "config.json").read_bytes(),
    }


def _load_checkpoint(name: str, content: bytes, folder: Path) -> Any:
    weights = (_tiny(folder) / "model.safetensors").read_bytes()
    if name == "header":
        name, content = (
            "model.safetensors",
            struct.pack("<Q", len(content)) + content + weights[8 + struct.unpack("<Q", weights[:8])[0] :],
        )
    with _instead(folder / name, content):
        return load_model("draft", str(folder))


def _tokenizer_files(folder: Path) -> Made:
    return {
        name: (_tiny(folder) / name).read_bytes()
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    }


def _load_tokenizer(name: str, content: bytes, folder: Path) -> Any:
    with _instead(_tiny(folder) / name, content):
        tokenizer = load_tokenizer(str(folder))
    ids = render_prompt(PromptRow("ab", None, None, "d", "here"), tokenizer, Template(mode="auto"))
    assert all(type(token) is int for token in ids)
    return tokenizer


class _instead:  # noqa: N801 - a context manager
    """Replace a file's content temporarily."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content, self.before = path, content, path.read_bytes()

    def __enter__(self) -> None:
        self.path.write_bytes(self.content)

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.before)


def _topk(_: Path) -> Made:
    places = [None, {"5": {"logprob": -0.5, "rank": 1}, "6": {"logprob": -1.5, "rank": 2}}, {"7": {"logprob": -0.1}}]
    return {"vllm": json.dumps({"choices": [{"text": "", "prompt_logprobs": places}]}).encode()}


RESULT = example_result(1)
PARSERS = {
    "gateway request": Parser(3000, _requests, _ask, TrafficRecord),
    "gateway answer": Parser(3500, _answers, _answer, TrafficRecord),
    "traffic log": Parser(1700, _records, _sealed, TrafficRecord, (RecordError,)),
    "acceptance log": Parser(2500, _logs, lambda name, content, folder: read_answers(_written(content, folder / name)), AcceptanceLog),
    "metrics page": Parser(
        1500, lambda _: {"vllm": PAGE, "sglang": SGLANG, "tensorrt": TENSORRT},
        _metrics, DraftCounts | None, (UserError, CountsError),
    ),
    "prompts file": Parser(2500, _prompts, _load_prompts, list),
    "top-k answer": Parser(700, _topk, lambda _, content, __: read_topk(content, 1, 3, 2, 10), tuple, (ValueError,)),
    "run config": Parser(600, lambda _: {"run.yaml": CONFIG, "aliases.yaml": ALIASES},
        lambda name, content, folder: load_config(_written(content, folder / name)), RunConfig),
    "result.json": Parser(300, lambda _: {"result.json": json.dumps(RESULT).encode()},
        lambda name, content, folder: Result.read(_written(content, folder / name)), Result),
    "verdict.json": Parser(
        500, lambda _: {"verdict.json": json.dumps({"format": 2, **RESULT["verdict"]}).encode()},
        lambda name, content, folder: Verdict.read(_written(content, folder / name), "make it again"), Verdict,
    ),
    "serving.json": Parser(400, _exports, lambda name, content, folder: read_export(_written(content, folder / name).parent), tuple),
    "files of a run": Parser(600, _run_files, _run_file, AdapterBase | Arms | dict | Version | list | str | None),
    "checkpoint": Parser(200, _checkpoint, _load_checkpoint, object),
    "tokenizer": Parser(500, _tokenizer_files, _load_tokenizer, object),
}  # fmt: skip


def attack(name: str, number: int, seeds: Made, folder: Path) -> float:
    """Run one case and return its seconds. Raises AssertionError if the parser misbehaves."""
    draw = random.Random(f"{name}:{number}")
    file = draw.choice(sorted(seeds))
    content, began = mutant(seeds[file], draw), time.monotonic()
    with contextlib.suppress(PARSERS[name].refusals):
        read(name, file, content, folder, f"ATTACK={name}:{number}")
    return time.monotonic() - began


def read(name: str, file: str, content: bytes, folder: Path, case: str) -> None:
    """Let a parser read a file.

    Raises:
        AssertionError: it breaks the law.
        UserError: it refuses the file, or another of its documented errors.
    """
    parser, what = PARSERS[name], f"{case} ({file}, {len(content)} bytes: {content[:4000]!r})"
    try:
        found = parser.read(file, content, folder)
        assert isinstance(found, parser.gives), f"{what}: gave a {type(found).__name__}"
    except parser.refusals as error:
        said = str(error)
        # These errors become part of a UserError before a user sees them.
        shown = isinstance(error, UserError)
        fine = said.isprintable() and 0 < len(said) <= LONGEST if shown else 0 < len(said) < 1 << 20
        assert fine, f"{what}: not one line: {said[:300]!r}"
        raise
    except (AssertionError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:300]}") from error


def _arrow() -> bytes:
    sink, table = pa.BufferOutputStream(), pa.table({"prompt": ["ab", "c"]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _torn_arrow() -> bytes:
    """An Arrow file with text offsets far outside it."""
    whole, offsets = _arrow(), struct.pack("<iii", 0, 2, 3)
    assert whole.count(offsets) == 1
    return whole.replace(offsets, struct.pack("<iii", 0, 1 << 20, 1 << 30))


TALK = b'{"messages": [{"role": "user", "content": "q"}], "tools": [%s]}\n'
DEEP, DIGITS, HUGE = b"[" * 100_000, b"9" * 5000, b"9" * 400
ONE_NAME = b'{"model.norm.weight":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}'
ONE_WEIGHT = struct.pack("<Q", len(ONE_NAME)) + ONE_NAME + bytes(32)
# name: parser, file, content. Each was a bug: a traceback, a crash, unbounded memory, or a value of the wrong type.
FOUND = {
    "a log of lists in lists": ("acceptance log", "log.jsonl", b'{"domain": "a", "response": ' + DEEP + b"\n"),
    "a log of too many digits": ("acceptance log", "log.jsonl", LOG % DIGITS),
    "a log of more tokens than anybody drafts": ("acceptance log", "log.jsonl", LOG % HUGE),
    "a template that speaks to the terminal": ("tokenizer", "chat_template.jinja", b'{{ raise_exception("\x1b]0;a\x07") }}'),
    "a place of too many digits": ("metrics page", "vllm", PAGE.replace(b'position="1"', b'position="%s"' % DIGITS)),
    "rendered ids that are words": ("prompts file", "rows.jsonl", (b'{"prompt_id": "p", "prompt_ids": ["a"], '
b'"text": "a", "turns": "", "domain": "d"}\n')),
    "rendered turns that are numbers": (
        "prompts file", "rows.jsonl", (b'{"prompt_id": "p", "prompt_ids": [1], "text": "", '
b'"turns": "{\\"messages\\": [5]}", "domain": "d"}\n'),
    ),
    "tools of objects in objects": ("prompts file", "rows.jsonl", TALK % (b'{"a":' * 800 + b"1" + b"}" * 800)),
    "an Arrow file of bytes that are no text": ("prompts file", "rows.arrow", _arrow().replace(b"prompt", b"promp\xdf")),
    "an Arrow file that points out of itself": ("prompts file", "rows.arrow", _torn_arrow()),
    "top-k places that are numbers": ("top-k answer", "vllm", b'{"choices": [{"prompt_logprobs": [null, {"5": 3}, {"6": 3}]}]}'),
    "a config of more aliases than memory": (
        "run config", "run.yaml", b"a0: &a0 [x, x, x]\n"
        + b"".join(b"a%d: &a%d [*a%d, *a%d, *a%d]\n" % (n, n, n - 1, n - 1, n - 1) for n in range(1, 30)),
    ),
    "a config with an alias within itself": ("run config", "run.yaml", b"name: m\na: &a [x, x]\nb: &b [*a, *b]\n"),
    "a config of too many digits": ("run config", "run.yaml", b"name: " + DIGITS),
    "a config of lists in lists": ("run config", "run.yaml", b"name: " + DEEP),
    "a verdict of lists in lists": ("verdict.json", "verdict.json", DEEP),
    "a manifest of lists in lists": ("files of a run", "manifest.json", DEEP),
    "a version of lists in lists": ("files of a run", "provenance.json", DEEP),
    "a version whose parent is a list": ("files of a run", "provenance.json", b'{"version": "v0001", "parent": ["v0000"]}'),
    "an adapter that is a list": ("files of a run", "adapter_config.json", b"[]"),
    "an adapter of a base that is a number": ("files of a run", "adapter_config.json", b'{"base_model_name_or_path": 5}'),
    "a model of two thousand million layers": ("checkpoint", "config.json", b'{"model_type": "llama", "num_hidden_layers": 2147483648}'),
    "a model of more words than memory": (
        "checkpoint", "config.json", (b'{"model_type": "llama", "vocab_size": 999999999, "hidden_size": '
b'8, "num_hidden_layers": 1, "num_attention_heads": 1}'),
    ),
    "a model without a weight that its config has": ("checkpoint", "model.safetensors", ONE_WEIGHT),
    "a tokenizer that is a list": ("tokenizer", "tokenizer.json", b"[]"),
    "a tokenizer whose prefix is longer than its merges": (
        "tokenizer", "tokenizer.json", (b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", '
b'"continuing_subword_prefix": "abcd", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}'),
    ),
    "a template of too many digits": ("tokenizer", "chat_template.jinja", b"{{ %s }}" % DIGITS),
    "a template with a filter that is none": ("tokenizer", "chat_template.jinja", b"{{ 1 | nothing }}"),
    "a template that divides by 0": ("tokenizer", "chat_template.jinja", b"{{ 1 / 0 }}"),
    "a template of lists in lists": ("tokenizer", "chat_template.jinja", b"{{ " + DEEP),
}  # fmt: skip


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_that_was_found_stays_mended(fault: str, tmp_path: Path) -> None:
    name, file, content = FOUND[fault]
    PARSERS[name].seeds(tmp_path)
    with pytest.raises(PARSERS[name].refusals) if name != "metrics page" else contextlib.suppress(CountsError):
        read(name, file, content, tmp_path, fault)
        assert name == "metrics page"


def test_the_cases_are_shared_out() -> None:
    assert sum(parser.cases for parser in PARSERS.values()) + sum(WIRE_CASES.values()) == 20_000


@pytest.mark.simulation
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_mutant_is_read_or_refused(name: str, part: int, tmp_path: Path) -> None:
    seeds, cases = PARSERS[name].seeds(tmp_path), PARSERS[name].cases
    with memory_grown() as grown:
        slowest = max(attack(name, number, seeds, tmp_path) for number in range(part * cases, (part + 1) * cases, STEP))
    assert slowest < SECONDS
    assert grown() < GROWTH, f"{grown() >> 20} MB"


if "ATTACK" in os.environ:

    def test_one_case(tmp_path: Path) -> None:
        name, _, number = os.environ["ATTACK"].partition(":")
        attack(name, int(number), PARSERS[name].seeds(tmp_path), tmp_path)
