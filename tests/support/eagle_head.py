"""An EAGLE-3 draft head with random weights, in the format that engines load."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from distill.models.load import EMBEDDED_FOLDER

AUXILIARY = 3  # hidden states of the target that the head reads


def write_eagle_head(folder: Path, proposes: Sequence[int], seed: int = 0) -> Path:
    """A head of one layer for the embedded target. ``proposes``: its whole draft vocabulary, ascending token ids of the target."""
    config = json.loads((EMBEDDED_FOLDER / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    rows, kv_rows = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    shapes = {
        "fc": (width, AUXILIARY * width),
        "midlayer.self_attn.q_proj": (rows, 2 * width),
        "midlayer.self_attn.k_proj": (kv_rows, 2 * width),
        "midlayer.self_attn.v_proj": (kv_rows, 2 * width),
        "midlayer.self_attn.o_proj": (width, rows),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (len(proposes), width),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    norms = [f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    tensors |= {f"{name}.weight": torch.ones(width) for name in (*norms, "norm")}
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[list(proposes)] = True
    tensors |= {"d2t": torch.tensor(proposes) - torch.arange(len(proposes)), "t2d": known}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(proposes),
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | own))
    return folder
