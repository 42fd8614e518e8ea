"""llama.cpp's name for a pre-tokenizer (`tokenizer.ggml.pre`), for tokenizers that its converter does not know.

The converter recognises a tokenizer by a hash of some ids and refuses all others. If the rules in tokenizer.json equal those of a
name in llama.cpp (v0.5.0, src/llama-vocab.cpp), that name gives the same ids.
"""

import json
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2, LLAMA3 = rf"{_CONTRACTIONS}\p{{N}}{_REST}", rf"{_CONTRACTIONS}\p{{N}}{{1,3}}{_REST}"


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
