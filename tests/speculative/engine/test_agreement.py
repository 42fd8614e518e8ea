"""Calls of ours give a model's own logits or are not made: windows and positions are the model's, in every dtype,
whatever its config says.
"""

import pytest
import torch
from refusals import refused
from tiny_models import prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.engine.agreement import ordinary_text, speed_warning
from speculative.engine.cached_model import CachedModel
from speculative.engine.windows import attention_windows
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

SETTINGS = DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=12)
PROMPTS = prompts_of([24, 3, 11])
SLIDING, FULL = "sliding_attention", "full_attention"
FROM_PADDING = ("roberta", "xlm-roberta-xl", "xmod")
pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")


def own_texts(model):
    """Greedy text from calls of the whole text, without cache, mask and positions."""
    found = []
    for _, prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(SETTINGS.max_tokens):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def decoded(model, runner="auto"):
    return texts(decode(model, None, PROMPTS, SETTINGS, runner=runner)[0])


@pytest.mark.parametrize(
    ("kind", "config", "windows"),
    [
        ("mistral", {"sliding_window": 8, "layer_types": [FULL, FULL]}, [8, 8]),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING, FULL]}, [8, 8]),
        ("llama", {"sliding_window": 8}, [None, None]),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, [None, None]),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8]),
        ("modernbert-decoder", {"local_attention": 8, "global_attn_every_n_layers": 2}, [None, 4]),
    ],
)
@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_a_window_is_that_of_the_models_own_mask(kind, config, windows, runner):
    model = tiny_model(kind, **config)
    assert attention_windows(model) == windows
    assert decoded(model, runner) == own_texts(model)


@pytest.mark.parametrize("kind", FROM_PADDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_that_are_counted_from_padding_are_refused(kind, dtype):
    told = {"languages": ["en"], "default_language": "en"} if kind == "xmod" else {}
    model = tiny_model(kind, dtype=dtype, is_decoder=True, **told | {"pad_token_id": 1})
    said = refused(lambda: decoded(model))
    assert "gives other logits for rows of different length than in its own call" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_of_another_scale_is_noticed_in_every_dtype(dtype):
    model = tiny_model(dtype=dtype, num_hidden_layers=4)
    fast = CachedModel(model, "target", 1, 8, "compile").how
    assert (speed_warning(model), fast) == (None, "eager calls" if dtype == torch.float16 else "compiled code")
    for layer in model.model.layers[1:]:
        layer.self_attn.scaling *= 1.25
    assert CachedModel(model, "target", 1, 8, "compile").how == "eager calls"
    assert dtype == torch.float16 or "because compiled code gives other logits than the model itself" in speed_warning(
        model
    )


def test_a_model_that_itself_rounds_much_is_no_fault_of_ours():
    """As real models do on some texts: attention that chooses between nearly equal tokens."""
    model, exact = tiny_model(num_hidden_layers=8), tiny_model(num_hidden_layers=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 3
    model.bfloat16()
    exact.load_state_dict(model.state_dict())
    ids = ordinary_text(model, 2, 11)
    with torch.no_grad():
        own, right = model(input_ids=ids).logits.float(), exact(input_ids=ids).logits
    assert (own - right).abs().max() > 0.3 * right.abs().max()
    assert CachedModel(model, "target", 1, 8, "compile").how == "compiled code"
