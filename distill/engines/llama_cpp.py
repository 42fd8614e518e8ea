"""llama.cpp: sizes may differ by up to 128. It compares token strings from id 5 on, and bos and eos.

As a program it is llama-server on GGUF files of target and draft, which are converted if the models have changed:

    python -m distill.engines.llama_cpp TARGET --draft DRAFT --store DIR --program LLAMA_SERVER --draft-weights q4_k_m --port 8000

All other flags are llama-server's. $LLAMA_CPP is a checkout of llama.cpp, by default the one of `make engines`.
Counts as read in tools/server, main of 2026-08 (`timings`); counters of pull request 26389; log lines of v0.5.0.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distill.engines.protocol.counters import named_counters, names_like_vllm
from distill.engines.protocol.counts import CountsFormat
from distill.engines.protocol.engine import BUILT, STREAM, Dialect, Engine, Service, register
from distill.models.files.gguf import GGUF
from speculative.errors import UserError

if TYPE_CHECKING:
    from distill.engines.protocol.facts import EngineFacts

ROW_SLACK, FIRST_COMPARED_ID = 128, 5
FLOATS = ("auto", "f32", "f16", "bf16")  # what the converter writes; llama-quantize makes the others of `auto`
ENVIRONMENT = ".venv-llamacpp"
TO_GGUF = Path(__file__).with_name("templates") / "to_gguf.j2"
# Model types whose own head it never loads (src/models), so an untied one is lost.
ALWAYS_TIED = ("cohere", "cohere2", "gemma", "gemma2")


def _refusals(facts: "EngineFacts") -> list[str]:
    fix = "it refuses such a pair (common/speculative.cpp); use the target's tokenizer files and bos_token_id in the draft"
    differing = [facts.differences[name] for name in ("ends", "bos", "kind") if name in facts.differences]
    return [f"{one}; {fix}" for one in differing] + facts.lost_heads(ALWAYS_TIED)


def _progress(part: Mapping[str, Any]) -> tuple[int, int] | None:
    timings = part.get("timings")
    return (timings["predicted_n"], timings.get("draft_n", 0)) if timings else None


def _inputs(weights: str) -> str:
    """The precision to which ggml's CPU code converts the inputs of a product with these weights (`vec_dot_type`)."""
    name, floats = weights.split(" ")[-1 if weights.startswith("all") else 0], {"F16": "float16", "BF16": "bfloat16"}
    by_256 = "_K" in name or (name[:2] in ("IQ", "TQ") and "_NL" not in name)
    return floats.get(name, "8 bits by 256" if by_256 else "8 bits by 32") if name not in ("", "F32") else ""


def gguf_of(model: str, to: Path, weights: str, program: Path) -> Path:
    """Return a model's GGUF file TO-WEIGHTS.gguf, converted if needed; one that is a GGUF file is served as it is.

    ``program``: llama-server, with llama-quantize beside it. Raises UserError: llama.cpp is not there or refuses the model.
    """
    if model.endswith(GGUF) and weights == FLOATS[0]:
        return Path(model)
    path = to.with_name(f"{to.name}-{weights}.gguf")
    partial = path.with_suffix(f".{os.getpid()}.partial")  # A running server may read the old file, another may write.
    base = gguf_of(model, to, FLOATS[0], program) if weights not in FLOATS else None

    def convert() -> None:
        words = _converter(model, weights, partial) if base is None else _quantizer(program, base, partial, weights)
        places = os.pathsep.join([str(_source()), os.environ.get("PYTHONPATH", "")])
        try:
            done = subprocess.run(words, check=False, env=os.environ | {"PYTHONPATH": places})
        except OSError as error:
            raise UserError(f"{words[0]}: {error.strerror}; build it, or run `make engines`") from error
        if done.returncode:
            raise UserError(f"{model}: llama.cpp does not convert it to {weights}; why is said above")
        partial.replace(path)

    try:
        _convert_once(model, path, convert)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _convert_once(model: str, made: Path, convert: Callable[[], object]) -> None:
    """Call ``convert`` unless ``made`` is there and the record beside it says that it was made from the same files."""
    record = made.with_suffix(".json")
    files = [one.stat() for one in sorted(Path(model).glob("*")) if one.suffix in (".json", ".safetensors")]
    source = json.dumps([model, *([one.st_size, one.st_mtime_ns] for one in files)])
    if not made.is_file() or not record.is_file() or record.read_text(encoding="utf-8") != source:
        print(f"converting {model}: {record.parent}", flush=True)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        convert()
        record.write_text(source, encoding="utf-8")


def _source() -> Path:
    source = Path(os.environ.get("LLAMA_CPP") or BUILT / ENVIRONMENT / "source/vendor/llama.cpp")
    if not (source / "convert_hf_to_gguf.py").is_file():
        raise UserError(f"{source}: no convert_hf_to_gguf.py; set LLAMA_CPP to a checkout, or run `make engines`")
    return source


def _converter(model: str, weights: str, to: Path) -> list[str]:
    """The converter, with llama.cpp's name for a tokenizer that it may not know."""
    from huggingface_hub import snapshot_download

    from distill.models.files.gguf import pre_tokenizer_name
    from distill.models.load import load_pretrained, load_tokenizer

    name = pre_tokenizer_name(load_tokenizer(model))
    named = ["-c", TO_GGUF.read_text(encoding="utf-8"), name] if name else []
    program = named or [str(_source() / "convert_hf_to_gguf.py")]
    local = load_pretrained("model", model, lambda place: place if Path(place).is_dir() else snapshot_download(place))
    return [sys.executable, *program, local, "--outtype", weights, "--outfile", str(to)]


def _quantizer(program: Path, base: Path, to: Path, weights: str) -> list[str]:
    return [str(program.with_name("llama-quantize")), str(base), str(to), weights.upper()]


def main() -> None:
    """Convert what has changed, and become llama-server."""
    parser = argparse.ArgumentParser(description="llama-server on GGUF files of a pair", allow_abbrev=False)
    parser.add_argument("target")
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--program", required=True, type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--weights", type=str.lower, default=FLOATS[0])
    parser.add_argument("--draft-weights", type=str.lower, default=FLOATS[0])
    options, words = parser.parse_known_args()
    try:
        files = ["-m", str(gguf_of(options.target, options.store / "target", options.weights, options.program))]
        if options.draft:
            files += [
                "-md",
                str(gguf_of(options.draft, options.store / "draft", options.draft_weights, options.program)),
            ]
    except UserError as error:
        sys.exit(str(error))
    own = ["--alias", options.target, "--metrics", "--no-webui"]
    os.execv(options.program, [str(options.program), *files, *own, *words])


register(
    Engine(
        "llama.cpp",
        "llama.cpp",
        "v0.5.0",
        3,
        ("greedy-draft",),
        refusals=_refusals,
        row_slack=ROW_SLACK,
        first_compared_id=FIRST_COMPARED_ID,
        equal_strings=True,
        reads_gguf=True,
        service=Service(
            "llama-server",
            ENVIRONMENT,
            ("--draft", "--spec-type", "--spec-draft-n-max"),
            room="--parallel {requests} -c {tokens}",  # by default it decodes four, and more wait
        ),
        dialect=Dialect(
            owners=("llamacpp", "llama.cpp"),
            reports="--metrics",
            version_pages=(("/props", "build_info"),),
            asks={"return_tokens": True, "logprobs": 1},
            # Ids need probabilities, computed only for tokens that were not drafted: they would slow plain decoding alone.
            timed=lambda seed: STREAM | {"cache_prompt": False, "timings_per_token": True},
            closes_streams=True,
            progress=_progress,
            counts=CountsFormat("draft_n", ("timings",), ("draft_n_accepted",), ("draft_n",)),
            counters=named_counters(names_like_vllm("llama.cpp", "llamacpp:", "tokens_predicted")),
            silent=True,
            leaves_room=True,
            weights_page=("/props", "model_ftype"),
            inputs_of=_inputs,
            log_lines={
                r"n_slots = (?P<most>\d+)": "it decodes {most} requests at a time and the others wait (--parallel)",
                r"kv_unified = 'true'": (
                    "attention reads the cache of all requests (give --parallel N, which turns --kv-unified off)"
                ),
                r"init, n_threads = ([2-9]|\d\d)": (
                    "its threads wait in a loop, so other work on the machine stops them (-t, -tb, -td, -tbd)"
                ),
            },
        ),
    )
)
if __name__ == "__main__":
    main()
