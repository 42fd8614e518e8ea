"""transformers 4 computes what 5 computes with an exported draft: weights, rotary positions, windows, ids of a text."""

import subprocess

import pytest
import torch
from engine_process import ROOT, built
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from distill.export.export import export_draft
from distill.export.facts import RunFacts

BUILT = ROOT / ".venv-transformers4" / "ready"
pytestmark = [pytest.mark.engine, *built(".venv-transformers4")]
PLAIN = {"rope_type": "default", "rope_theta": 50_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
HALF = PLAIN | {"partial_rotary_factor": 0.5}
LONG = HALF | {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.2, 2.4, 2.6]}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3_000.0},
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
PAIRS = {
    "llama": {"rope_parameters": PLAIN},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {"rope_parameters": PLAIN},
    "qwen3_moe": {"rope_parameters": PLAIN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma2": {"rope_parameters": PLAIN, **MIXED},
    "gemma3_text": {"rope_parameters": BY_LAYER, **MIXED},
    "mistral": {"rope_parameters": PLAIN, "sliding_window": 16},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 64},
    "phi": {"rope_parameters": HALF},
    "stablelm": {"rope_parameters": HALF},
    "gpt_neox": {"rope_parameters": HALF},
    "glm4": {"rope_parameters": HALF},
    "cohere": {"rope_parameters": PLAIN},
    "cohere2": {"rope_parameters": PLAIN, **MIXED},
    "olmo2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0}},
    "smollm3": {"rope_parameters": PLAIN},
    "granite": {"rope_parameters": PLAIN},
}


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """An export of each kind, with ids and, after one start of transformers 4, what it computes."""
    root, tokenizer, found = tmp_path_factory.mktemp("exports"), tiny_tokenizer(), {}
    shape = {"vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 16, "max_position_embeddings": 128}
    for kind, fields in PAIRS.items():
        target, student = (root / kind / name for name in ("target", "student"))
        for folder, seed in ((target, 0), (student, 1)):
            tiny_model(kind, seed=seed, **shape, **fields).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        found[kind] = export_draft(RunFacts(student, str(target)), root / kind / "draft", dtype="float32").path
        save_file({"ids": torch.arange(100)[None] % len(tokenizer)}, found[kind] / "ids.safetensors")
    script = ROOT / "tests" / "engines" / "load_export.py"
    done = subprocess.run(
        [BUILT.parent / "bin" / "python", script, *found.values()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("4."), done.stdout
    return found


@pytest.mark.parametrize("kind", PAIRS)
def test_an_export_computes_the_same_in_transformers_4(exports, kind):
    folder = exports[kind]
    theirs, ids_BT = load_file(folder / "loaded.safetensors"), load_file(folder / "ids.safetensors")["ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ours_BTV = model(input_ids=ids_BT, use_cache=False).logits
    assert (theirs["logits"].argmax(-1) == ours_BTV.argmax(-1)).float().mean() > 0.98, "a near-tie may round otherwise"
    # Both compute in float32, with operations in another order.
    torch.testing.assert_close(theirs["logits"], ours_BTV, atol=2e-3, rtol=1e-3)
    text = "def area(width, height):\n    return width * height\n"
    assert (
        theirs["text"].tolist()
        == Tokenizer.from_file(str(folder.parent / "target" / "tokenizer.json")).encode(text).ids
    )
