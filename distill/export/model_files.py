"""The config and tokenizer files of an export, in the spellings of transformers 4 and 5: engines are built on either."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from distill.models.files.gguf import GGUF
from distill.models.target import TargetSide

TOKENIZER_CONFIG, TEMPLATES = "tokenizer_config.json", "additional_chat_templates"
TOKENIZER_FILES = (
    "tokenizer*",
    "tokenization*.py",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    TEMPLATES,
)
# Where transformers 4 read the rotary base, the base of windowed layers (empty: it knew no such model) and the rotated part of a head.
USUAL = ("rope_theta", "", "partial_rotary_factor")
UNUSUAL = {
    **dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "", "rotary_pct")),
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), ("rope_theta", "rope_local_base_freq", "")),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta", ""),
    "olmo3": ("rope_theta", "rope_theta", ""),
}


def add_older_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json, and the configs in it, with the keys of transformers 4 beside those of 5, which reads both alike."""
    parts = {key: add_older_keys(one) for key, one in config.items() if isinstance(one, dict) and "model_type" in one}
    older = {"torch_dtype": config["dtype"]} if config.get("dtype") else {}
    if config.get("model_type") == "qwen3_moe":
        older["num_experts"] = config["num_local_experts"]
    return config | parts | older | _older_rope(config.get("rope_parameters") or {}, str(config.get("model_type")))


def _older_rope(rope: dict[str, Any], kind: str) -> dict[str, Any]:
    (base, local, rotated), older = UNUSUAL.get(kind, USUAL), {}
    if local and "full_attention" in rope:  # parameters by kind of layer
        older[local], rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
    if "rope_theta" not in rope:
        return {}
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    # These take exactly `type` and `factor`, or (Phi-3) `type` and two lists of factors.
    if kind in ("olmo", "olmo2", "fuyu") or kind.startswith(("phi3", "phi4", "hunyuan")):
        scaling = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    if kind.startswith(("phi3", "phi4")):
        scaling.pop("original_max_position_embeddings", None)  # it is beside them
    older |= {base: rope["rope_theta"], "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}
    return older | ({rotated: rope["partial_rotary_factor"]} if "partial_rotary_factor" in rope else {})


def copy_tokenizer(target: TargetSide, folder: Path, revision: str | None = None) -> None:
    """Copy the target's tokenizer files. One that has none (a GGUF file) gets the tokenizer as transformers writes it."""
    how: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    names = () if target.name.endswith(GGUF) else (TOKENIZER_CONFIG, "tokenizer.json")
    known_file = next((place for name in names if (place := cached_file(target.name, name, **how))), None)
    if known_file is None:
        target.tokenizer.save_pretrained(folder)
    for pattern in TOKENIZER_FILES if known_file else ():
        for file in Path(known_file or "").parent.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
            elif file.name == TEMPLATES:
                shutil.copytree(file, folder / TEMPLATES)
    if (folder / TOKENIZER_CONFIG).is_file():
        rewrite(folder / TOKENIZER_CONFIG, _older_tokenizer)


def _older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """Replace what transformers 4 does not load by its older name, which 5 reads too."""
    older = (
        {"tokenizer_class": "PreTrainedTokenizerFast"} if config.get("tokenizer_class") == "TokenizersBackend" else {}
    )
    if isinstance(config.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config | older


def rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file. One without a change keeps its bytes."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    if (changed := change(dict(tree))) != tree:
        file.write_text(json.dumps(changed, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
