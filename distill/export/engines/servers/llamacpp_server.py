"""llama.cpp's server on GGUF files of target and draft, which are converted if the models have changed. It runs in our environment.

    python llamacpp_server.py TARGET --draft DRAFT --store DIR --program LLAMA_SERVER --draft-weights q4_k_m --port 8000

All other flags are llama-server's. $LLAMA_CPP is a checkout of llama.cpp, by default the one of `make engines`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from distill.export.engine import TEMPLATES
from distill.export.engines.servers.conversion import convert_once
from distill.models.files.gguf import pre_tokenizer_name
from distill.models.load import load_pretrained, load_tokenizer
from speculative.errors import UserError

FLOATS = ("auto", "f32", "f16", "bf16")  # what the converter writes; llama-quantize makes the others of `auto`
BUILT = Path(__file__).resolve().parents[4] / ".venv-llamacpp"


def gguf_of(model: str, to: Path, weights: str, program: Path) -> Path:
    """Return a model's GGUF file TO-WEIGHTS.gguf, converted if needed. ``program``: llama-server, with llama-quantize beside it.

    Raises UserError: llama.cpp is not there or refuses the model.
    """
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
        convert_once(model, path, path.with_suffix(".json"), convert)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _source() -> Path:
    source = Path(os.environ.get("LLAMA_CPP") or BUILT / "source/vendor/llama.cpp")
    if not (source / "convert_hf_to_gguf.py").is_file():
        raise UserError(f"{source}: no convert_hf_to_gguf.py; set LLAMA_CPP to a checkout, or run `make engines`")
    return source


def _converter(model: str, weights: str, to: Path) -> list[str]:
    """The converter, with llama.cpp's name for a tokenizer that it may not know."""
    name = pre_tokenizer_name(load_tokenizer(model))
    told = ["-c", (TEMPLATES / "to_gguf.j2").read_text(encoding="utf-8"), name] if name else []
    program = told or [str(_source() / "convert_hf_to_gguf.py")]
    local = load_pretrained("model", model, lambda place: place if Path(place).is_dir() else snapshot_download(place))
    return [sys.executable, *program, local, "--outtype", weights, "--outfile", str(to)]


def _quantizer(program: Path, base: Path, to: Path, weights: str) -> list[str]:
    return [str(program.with_name("llama-quantize")), str(base), str(to), weights.upper()]


def main() -> None:
    """Convert what has changed, and become llama-server."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("target")
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--program", required=True, type=Path)
    parser.add_argument("--draft")
    parser.add_argument("--weights", type=str.lower, default=FLOATS[0])
    parser.add_argument("--draft-weights", type=str.lower, default=FLOATS[0])
    parser.add_argument("--port", type=int, default=0, help="0: convert only")
    given, words = parser.parse_known_args()
    try:
        files = ["-m", str(gguf_of(given.target, given.store / "target", given.weights, given.program))]
        if given.draft:
            files += ["-md", str(gguf_of(given.draft, given.store / "draft", given.draft_weights, given.program))]
    except UserError as error:
        sys.exit(str(error))
    if given.port:
        own = ["--alias", given.target, "--metrics", "--no-webui", "--port", str(given.port)]
        os.execv(given.program, [str(given.program), *files, *own, *words])


if __name__ == "__main__":
    main()
