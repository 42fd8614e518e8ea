"""Fused kernels give the logits of the model's own layers, and packed weights stay the model's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils.other import clean_state_dict_for_safetensors
from tiny_models import perturbed, prompts_of, texts, tiny_model
from transformers import AutoModelForCausalLM

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.cache import RaggedCache
from speculative.engine.fused import model as fused
from speculative.engine.fused.weights import Weights, packed
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

# Each pair of a dtype and an architecture costs a quarter of a minute of Triton's compiler.
KINDS = [
    ("qwen3", torch.float32, {}),
    ("qwen2", torch.float32, {"head_dim": 12}),
    ("mistral", torch.bfloat16, {"sliding_window": 7}),
]


def test_fused_kernels_in_tritons_interpreter_equal_the_models_layers():
    """In a process of its own, because Triton reads the variable when kernels are defined."""
    tests = Path(__file__).parents[2]
    program, path = tests / "support/interpreted_kernels.py", f"{tests.parent}{os.pathsep}{tests / 'support'}"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=220)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("equal\n")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype", "sizes"), KINDS)
def test_fused_kernels_give_the_models_own_logits(kind, dtype, sizes, monkeypatch):
    monkeypatch.setattr(fused, "LONG", 16)  # Programs share the longer texts.
    model = tiny_model(kind, dtype=dtype, **sizes).cuda()
    ids = torch.randint(1, 50, (3, 200), generator=torch.Generator().manual_seed(0)).cuda()
    own = model(input_ids=ids, use_cache=False).logits.float()
    weights = Weights(model)
    call = fused.FusedModel(weights, RaggedCache(2, 3, 2048), fused.Scratch(model, weights, 2048))
    with torch.no_grad():
        for start, stop, kept in ((0, 195, 195), (195, 199, 1), (199, 200, 1)):  # many tokens, few, one
            positions = torch.arange(start, stop, device="cuda").repeat(3, 1)
            found = call(ids[:, start:stop].contiguous(), positions, kept).float()
            # bfloat16: each rounds at other places.
            tolerance = 1e-4 if dtype == torch.float32 else 0.1 * float(own.abs().max())
            torch.testing.assert_close(found, own[:, stop - kept : stop], rtol=1e-4, atol=tolerance)
    assert int(call.product.work.counters.sum()) == 0


@pytest.mark.gpu
def test_decoding_with_fused_kernels_gives_the_texts_of_eager_calls():
    target = tiny_model("qwen3", num_hidden_layers=3).cuda()
    draft = perturbed(tiny_model("qwen3", num_hidden_layers=3)).cuda()
    settings = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=24)
    found = {}
    for runner in ("eager", "graph", "graph"):
        found[runner], _ = decode(
            target, ModelDrafter(draft), prompts_of([9, 1, 23, 70]), settings, batch_size=4, runner=runner
        )
    assert fused.fused_weights(target) is not None
    assert texts(found["graph"]) == texts(found["eager"])
    # A wrong draft shows in no greedy text.
    assert [one.blocks for one in found["graph"]] == [one.blocks for one in found["eager"]]


def test_packed_weights_are_parts_of_one_matrix_and_stay_the_models(tmp_path):
    model = tiny_model("qwen2")
    ids = torch.arange(1, 9)[None]
    before = model(input_ids=ids).logits
    attention = model.model.layers[0].self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    with torch.inference_mode():
        matrix = packed(*projections)
    torch.testing.assert_close(matrix.weight, torch.cat([one.weight for one in projections]), rtol=0, atol=0)
    assert packed(*projections).weight.data_ptr() == matrix.weight.data_ptr()
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=0, atol=0)
    model(input_ids=ids).logits.sum().backward()
    with torch.no_grad():
        attention.k_proj.weight.fill_(2.0)
    assert bool((matrix.weight[32:48] == 2.0).all())
    assert matrix.bias is not None
    # Saved whole, also by those who drop weights that share a storage.
    names = set(model.state_dict())
    assert set(clean_state_dict_for_safetensors(model.state_dict())) == names
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=0)


def test_weights_are_packed_again_when_they_have_moved():
    attention = tiny_model("llama").model.layers[0].self_attn
    matrix = packed(attention.q_proj, attention.k_proj)
    expected = matrix.weight.clone()
    attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight.detach().clone())
    moved = packed(attention.q_proj, attention.k_proj)
    assert moved.weight.data_ptr() != matrix.weight.data_ptr()
    assert attention.k_proj.weight.data_ptr() == moved.weight[32:].data_ptr()
    torch.testing.assert_close(moved.weight, expected, rtol=0, atol=0)
    assert packed(attention.q_proj, attention.k_proj).weight is moved.weight
    place = moved.weight.data_ptr()
    del matrix, moved
    assert packed(attention.q_proj, attention.k_proj).weight.data_ptr() == place  # Recordings hold the address.
