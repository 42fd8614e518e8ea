"""GGUF files: their metadata, and llama.cpp's name for a pre-tokenizer that its converter does not know (`tokenizer.ggml.pre`).

The converter recognises a tokenizer by a hash of some ids and refuses all others. If the rules in tokenizer.json equal those of a
name in llama.cpp (v0.5.0, src/llama-vocab.cpp), that name gives the same ids.
"""

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from tokenizers import pre_tokenizers

from speculative.errors import UserError

GGUF = ".gguf"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2, LLAMA3 = rf"{_CONTRACTIONS}\p{{N}}{_REST}", rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}"
# Names by which llama.cpp splits off each digit, and the rest as GPT-2. transformers (5.17) splits texts of these as GPT-2 alone.
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def pre_tokenizer_name(tokenizer: Any) -> str | None:
    """Return llama.cpp's name for the rules of a tokenizer; None if no known name has the same rules."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or type(core.model).__name__ != "BPE" or core.model.byte_fallback or core.pre_tokenizer is None:
        return None
    steps = json.loads(core.pre_tokenizer.__getstate__())
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    last, before = steps[-1], steps[:-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(before) > 1:
        return None
    if last["use_regex"]:
        name = (
            "gpt-2" if not before else "smollm" if before[0] == {"type": "Digits", "individual_digits": True} else None
        )
    else:
        split = before[0] if before and before[0]["type"] == "Split" else {}
        whole = split.get("behavior") == "Isolated" and not split.get("invert")
        name = {QWEN2: "qwen2", LLAMA3: "llama-bpe"}.get(split.get("pattern", {}).get("Regex", "")) if whole else None
    # Only llama-bpe keeps a word that is itself a token, without merges.
    same_merges = bool(core.model.ignore_merges) == (name == "llama-bpe")
    return name if same_merges and core.normalizer is None else None


def split_as_named(tokenizer: Any, name: str | None) -> None:
    """Give a tokenizer that transformers made from a GGUF file the rules of the file's `tokenizer.ggml.pre`, in place."""
    if name in SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


_NUMBERS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")  # struct codes by value type
_UINT32, _TEXT, _LIST, _UINT64 = 4, 8, 9, 10
_MOST = 1 << 24  # bytes of a text and entries of a list: far more than any template or vocabulary has


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return a GGUF file's metadata and the dimensions of its tensors, by name. Raises UserError if it is not whole."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _value(file, _UINT32) not in (2, 3):
                raise ValueError("it begins with something else")
            tensors, entries = _value(file, _UINT64), _value(file, _UINT64)
            metadata = {_value(file, _TEXT): _value(file, _value(file, _UINT32)) for _ in range(entries)}
            shapes = {}
            for _ in range(tensors):
                name = _value(file, _TEXT)
                shapes[name] = [_value(file, _UINT64) for _ in range(_value(file, _UINT32))]
                file.seek(12, 1)  # type and offset
            return metadata, shapes
    except (OSError, ValueError, IndexError, struct.error, RecursionError) as error:
        why = "it ends early" if isinstance(error, struct.error) else getattr(error, "strerror", None) or error
        raise UserError(f"{path}: not a complete GGUF file of version 2 or 3 ({why}); convert again") from error


def tokens_of(path: Path, metadata: dict[str, Any]) -> dict[int, str]:
    """Return a GGUF file's token strings by id, padding included. Raises UserError if it has none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise UserError(f"{path}: it has no tokenizer.ggml.tokens; give a language model's file")
    return dict(enumerate(tokens))


def _value(file: BinaryIO, kind: int) -> Any:
    if kind not in (_TEXT, _LIST):
        code = f"<{_NUMBERS[kind]}"
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]
    inner = _value(file, _UINT32) if kind == _LIST else 0
    count = _value(file, _UINT64)
    if count > _MOST:
        raise ValueError(f"{count:,} entries in a list or text")
    return [_value(file, inner) for _ in range(count)] if kind == _LIST else file.read(count).decode("utf-8", "replace")
