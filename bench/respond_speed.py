"""Tokens per second of `understudy respond` over running vLLM servers, against vLLM's own `LLM.generate` on the same prompts.

    python bench/respond_speed.py CONFIG --url http://127.0.0.1:8000/v1 --url http://127.0.0.1:8001/v1 [--offline PYTHON] [--out FILE]

CONFIG: a run whose prompts are answered, into a temporary folder. --offline: the Python of an environment with vLLM. It runs as many
processes as there are servers, each with its share of the prompts on a core of its own; the rate is that until the last one ends. The
servers should be stopped by then, so it waits for Enter first unless --no-wait is given. Without it only the servers are timed.
"""

from distill.faults import run_script

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from data.responses.respond import ResponsePlan
from data.responses.servers import Servers
from data.responses.store import Store
from distill.config.load import load_config
from distill.models.target import Target
from distill.run.responses import RunData
from distill.run.run import Run, new_accelerator
from result_file import write_result
from speculative.errors import UserError

# Reads {model, context, prompts, sampling} and writes {tokens, seconds}; runs in the environment with vLLM, and begins on a line of input.
OFFLINE = """
import json, sys, time
from vllm import LLM, SamplingParams
asked = json.load(open(sys.argv[1]))
model = LLM(asked["model"], max_model_len=asked["context"], **json.loads(sys.argv[3]))
settings = [SamplingParams(**asked["sampling"], seed=number, logprobs=1) for number in range(len(asked["prompts"]))]
prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
model.generate(prompts[:2], settings[:2], use_tqdm=False)
open(sys.argv[2] + ".ready", "w").close()
sys.stdin.readline()
start = time.perf_counter()
answers = model.generate(prompts, settings, use_tqdm=False)
seconds = time.perf_counter() - start
json.dump({"tokens": sum(len(one.outputs[0].token_ids) for one in answers), "seconds": seconds}, open(sys.argv[2], "w"))
"""


def served(data: RunData, urls: list[str], concurrency: int, folder: Path) -> dict[str, float]:
    """Tokens and seconds of the servers."""
    store, prompts, config = Store(folder / "store"), data.prompts.train, data.run.config
    endpoint = load_config(
        config.folder / "config.yaml", [f"target.endpoint={json.dumps({'urls': urls, 'concurrency': concurrency})}"]
    ).target.endpoint
    assert endpoint is not None
    store.open({"bench": 1})
    servers = Servers(endpoint, data.target.tokenizer, data.target.facts.vocab_rows)
    start = time.perf_counter()
    servers.respond(store, ResponsePlan(prompts, 1, config.serving.shard_size), data.settings)
    seconds = time.perf_counter() - start
    return {"tokens": float(store.rows().response_tokens_N.sum()), "seconds": seconds}


def offline(data: RunData, python: str, options: str, processes: int, folder: Path) -> dict[str, float]:
    """Tokens and seconds of `LLM.generate` in this many processes that begin together."""
    serving = data.run.config.serving
    sampling = {"temperature": serving.temperature, "top_p": serving.top_p, "top_k": serving.top_k or -1}
    asked = {
        "model": str(Path(data.run.config.target.path).resolve()),
        "context": data.context,
        "sampling": sampling | {"max_tokens": serving.max_tokens, "stop_token_ids": list(data.settings.eos_ids)},
    }
    prompts = [list(prompt.prompt_ids) for prompt in data.prompts.train]
    files, running = [folder / f"offline-{number}.json" for number in range(processes)], list[subprocess.Popen[str]]()
    for number, file in enumerate(files):
        file.write_text(json.dumps(asked | {"prompts": prompts[number::processes]}))
        command, bound = (
            [python, "-c", OFFLINE, file, f"{file}.out", options],
            {"VLLM_CPU_OMP_THREADS_BIND": str(number)},
        )
        environment = os.environ | (bound if processes > 1 else {})
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment))
    while not all(Path(f"{file}.out.ready").exists() for file in files):
        if any(process.poll() for process in running):
            raise UserError(f"{python}: vLLM ended before it answered; its output is above")
        time.sleep(0.1)
    for process in running:
        assert process.stdin is not None
        process.stdin.write("begin\n")
        process.stdin.flush()
    ended = [process.wait() for process in running]
    if any(ended):
        raise UserError(f"{python}: vLLM ended early; its output is above")
    told = [json.loads(Path(f"{file}.out").read_text()) for file in files]
    return {"tokens": sum(one["tokens"] for one in told), "seconds": max(one["seconds"] for one in told)}


def main(
    config: Annotated[str, typer.Argument(help="run whose prompts are answered")],
    url: Annotated[list[str], typer.Option(help="address of a server; repeatable")],
    concurrency: Annotated[int, typer.Option(help="requests at a time to each server", min=1)] = 256,
    python: Annotated[str, typer.Option("--offline", help="Python with vLLM")] = "",
    options: Annotated[str, typer.Option("--offline-options", help="JSON: more arguments of vLLM's LLM")] = "{}",
    no_wait: Annotated[bool, typer.Option("--no-wait", help="do not wait until the servers are stopped")] = False,
    out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/respond_speed.json"),
) -> None:
    """Time both and write the ratio of their rates."""
    with tempfile.TemporaryDirectory(prefix="understudy-speed-") as place:
        folder = Path(place)
        run = Run(load_config(config, [f"output={folder}"]), new_accelerator())
        run.claim()
        data = RunData(run, Target(run.config.target, run.device, run.folder))
        result = {"servers": len(url), "concurrency": concurrency, "prompts": len(data.prompts.train)}
        rows = {"respond": served(data, url, concurrency, folder)}
        if python:
            if not no_wait:
                input("stop the servers, then press Enter: ")
            rows["offline"] = offline(data, python, options, len(url), folder)
        rates = {name: row["tokens"] / row["seconds"] for name, row in rows.items()}
        ratio = rates["respond"] / rates["offline"] if python else None
        write_result(out, result | {"rows": rows, "tokens_per_second": rates, "ratio": ratio})
        print(rates, f"ratio {ratio}")


if __name__ == "__main__":
    run_script(main)
