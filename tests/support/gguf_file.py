"""Write small GGUF files, as `llama.cpp` reads them: header, metadata and tensor shapes from the format's description, or a whole model
with llama.cpp's own writer.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_of(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


def write_gguf(path: Path, metadata: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    entries = b"".join(text(key) + value_of(value) for key, value in metadata.items())
    tensors = b"".join(
        text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, 0) for name, sizes in shapes.items()
    )
    path.write_bytes(head + entries + tensors)
    return path


def tokenizer_metadata(tokenizer: Any, pre: str = "smollm") -> dict[str, Any]:
    """What a file says of a byte-level tokenizer."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])]
    special = set(tokenizer.all_special_tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in core["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.add_bos_token": tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id,
    }


def write_model(
    path: Path,
    model: Any,
    tokens: Mapping[str, Any],
    kind: str = "F32",
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A whole Llama with a tied head. tokens: metadata of its tokenizer. kind: of its matrices, e.g. F16 or Q4_1. extra: more tensors."""
    config, type_of = model.config, gguf.GGMLQuantizationType[kind]
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_key_length(config.head_dim)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    file.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    for key, value in tokens.items():
        add = {bool: file.add_bool, int: file.add_uint32, str: file.add_string}.get(type(value), file.add_array)
        add(key, value)
    for name, array in (extra or {}).items():
        file.add_tensor(name, array)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # The format has the two halves of a head in turns.
            weight = weight.view(-1, 2, config.head_dim // 2, config.hidden_size).transpose(1, 2).reshape(weight.shape)
        if name != "lm_head.weight":
            array, of = weight.float().contiguous().numpy(), type_of if weight.dim() > 1 else type_of.F32
            file.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(array, of), raw_dtype=of)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path
