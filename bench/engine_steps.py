"""Where llama.cpp's time goes: milliseconds of a call of n tokens, of a generated token by sampler, of a block with a draft.

    python bench/engine_steps.py TARGET --weights f16,bf16,q8_0 --draft DIR --out bench/results/engine_steps_cpu.json

A call of n tokens is what verifies n - 1 drafted tokens. It is timed as a request whose prompt is cached but for its last n tokens,
by the engine's own `timings`. A block is timed at temperature 0, with the first kind of --weights; that it verifies what the draft
proposed, whether it is accepted or not, makes its time that of any draft of the size. TARGET: a Hugging Face directory, or a GGUF file
with --weights auto.
"""

from distill.faults import run_script

import contextlib
import itertools
import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from distill.commands.output import numbers_of
from distill.engines.llama_cpp import ENVIRONMENT
from distill.engines.protocol.engine import BUILT
from distill.engines.protocol.process import Program, running, wait_until_answering
from distill.run.provenance import describe_run
from result_file import write_result
from speculative.errors import UserError

CONTEXT, ROUNDS, GENERATED = 64, 15, 64  # tokens of the cached prompt; timed calls of each size; tokens of a text
SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "top-p 0.9 of all tokens": {"temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.0},
    "top-p 0.9 of 40": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.0},
}


def ask(url: str, **body: Any) -> dict[str, Any]:
    """The timings of a completion."""
    options = {"id_slot": 0, "cache_prompt": True, "samplers": ["top_k", "top_p", "temperature"], **body}
    request = urllib.request.Request(f"{url}/completion", json.dumps(options).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["timings"]


def times_of(url: str, sizes: list[int]) -> dict[str, dict[str, float]]:
    """Milliseconds of a call by its tokens, and of a generated token by sampler: medians."""
    draw = random.Random(0)
    opening = [draw.randrange(300, 3000) for _ in range(CONTEXT)]
    calls: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(ROUNDS + 1):
        for size in sizes:
            ask(url, prompt=opening, n_predict=1)  # takes the last call's tokens out of the cache
            found = ask(url, prompt=[*opening, *(draw.randrange(300, 3000) for _ in range(size))], n_predict=1)
            if found["prompt_n"] != size:
                raise UserError(f"{url}: it read {found['prompt_n']} tokens where {size} were new")
            calls[size].append(found["prompt_ms"])
    tokens = {
        name: median(
            ask(url, prompt=opening, n_predict=GENERATED, ignore_eos=True, seed=turn, **options)[
                "predicted_per_token_ms"
            ]
            for turn in range(5)
        )
        for name, options in SAMPLERS.items()
    }
    return {"call": {str(size): median(times[1:]) for size, times in calls.items()}, "token": tokens}


def block_ms(url: str) -> float:
    """Milliseconds of a block: each emits its accepted tokens and one more."""
    blocks = []
    for turn in range(5):
        opening = [random.Random(turn).randrange(300, 3000) for _ in range(CONTEXT)]
        found = ask(url, prompt=opening, n_predict=GENERATED, ignore_eos=True, **SAMPLERS["greedy"])
        blocks.append(found["predicted_ms"] / (found["predicted_n"] - 1 - found.get("draft_n_accepted", 0)))
    return median(blocks[1:])


def main(
    target: Annotated[str, typer.Argument(help="Hugging Face directory or GGUF file")],
    weights: Annotated[str, typer.Option(help="types, separated by commas")] = "f16,bf16,q8_0",
    draft: Annotated[str, typer.Option(help="Hugging Face directory; empty: no blocks")] = "",
    draft_weights: Annotated[str, typer.Option(help="types, separated by commas")] = "f16,q8_0,q4_0",
    gammas: Annotated[str, typer.Option(help="drafted tokens of a block")] = "1,2,3",
    tokens: Annotated[str, typer.Option(help="tokens of a call, separated by commas")] = "1,2,3,4,6",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    port: Annotated[int, typer.Option(min=1024, max=65535)] = 8091,
    store: Annotated[Path, typer.Option(help="folder for converted files")] = Path("runs/gguf"),
    out: Path | None = None,
) -> None:
    """Time each kind of weights in a server of its own."""
    program, url = BUILT / ENVIRONMENT / "bin/llama-server", f"http://127.0.0.1:{port}"
    if not program.is_file():
        raise UserError(f"{program}: not there; `make engines` builds it")
    sizes, count = sorted(numbers_of("--tokens", tokens, int, 1, 512)), str(threads)
    shared = ["-m", "distill.engines.llama_cpp", target, "--store", str(store), "--program", str(program)]
    shared += ["--port", str(port), "-c", "512", "--parallel", "1", "--no-warmup", "-t", count, "-tb", count]
    measured: dict[str, Any] = {}
    blocks: dict[str, dict[str, float]] = {}
    kinds = weights.split(",")
    for kind in kinds:
        with served([*shared, "--weights", kind], url):
            measured[kind] = times_of(url, sizes)
        print(kind, json.dumps(measured[kind]), flush=True)
    for kind, gamma in itertools.product(draft_weights.split(",") if draft else [], gammas.split(",")):
        words = ["--draft", draft, "--draft-weights", kind, "--spec-type", "draft-simple", "--spec-draft-n-max", gamma]
        with served([*shared, "--weights", kinds[0], *words, "-td", count, "-tbd", count], url):
            blocks.setdefault(kind, {})[gamma] = block_ms(url)
        print(kind, gamma, json.dumps(blocks[kind][gamma]), flush=True)
    if out is not None:
        found = {
            "machine": describe_run(0),
            "threads": threads,
            "target": Path(target).name,
            "ms": measured,
            "blocks": blocks,
        }
        write_result(out, found)


@contextlib.contextmanager
def served(words: list[str], url: str) -> Iterator[None]:
    """A server with these flags while the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "llama-server.log"
        with running([Program([sys.executable, *words], log)]) as (process,):
            wait_until_answering(process, "llama-server", url, log)
            yield


if __name__ == "__main__":
    run_script(main)
