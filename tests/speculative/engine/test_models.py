"""Which models can be decoded: the architecture matrix against transformers' own `generate`, and who is refused."""

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from refusals import refused
from tiny_models import VOCAB, generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import first_layers
from speculative.engine.memory import cache_bytes, check_memory, free_bytes
from speculative.engine.models import (
    check_decodable,
    evaluating,
    max_positions,
    without_autograd,
)
from speculative.engine.windows import attention_windows
from speculative.errors import UserError
from speculative.measure.replay import agreement_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

# The last layers read keys and values of earlier ones of their kind.
SHARED = {
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 50,
    "hidden_size_per_layer_input": 8,
}
MATRIX = {
    "llama": {},
    "qwen2": {},
    "qwen2 sliding": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "mistral": {},
    "mistral sliding": {"sliding_window": 6},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3n_text sliding": SHARED
    | {
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "gemma4_text sliding": SHARED | {"global_head_dim": 16, "use_double_wide_mlp": True},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "phi3 sliding": {"sliding_window": 6},
    "olmo2": {},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
}


@pytest.mark.parametrize("name", list(MATRIX))
def test_architectures_equal_transformers_generate(name):
    """Prompts and responses longer than the windows, ragged, more prompts than rows: recycled rows too."""
    target = tiny_model(name.split()[0], **MATRIX[name])
    prompts = prompts_of([12, 1, 5, 30, 8])
    expected = generated(target, prompts, 16)
    settings = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=16)
    draft = perturbed(target)
    for batch_size, count in ((1, 2), (3, 5)):
        responses, _ = decode(target, ModelDrafter(draft), prompts[:count], settings, batch_size=batch_size)
        assert texts(responses) == expected[:count]
        # The draft saw what it should have: positions or windows off by one would only lower its acceptance.
        check = agreement_of(
            score_tokens(draft, responses, GREEDY), Rule.named("greedy"), [text.blocks for text in responses], 3
        )
        assert check.live_blocks == pytest.approx(check.predicted_blocks)
    assert "sliding" not in name or set(attention_windows(target)) - {None} == {6}


def told(model, **config):
    """The model, whose config now says so."""
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tiny_model("bloom", n_head=4, n_layer=1), "target (BloomForCausalLM) takes no position ids"),
        (lambda: told(tiny_model(), _attn_implementation="flash_attention_2"), "attn_implementation='sdpa'"),
        (
            lambda: tiny_model("rwkv", attention_hidden_size=32),
            "RwkvForCausalLM does not accept its own state",
        ),
        (
            lambda: tiny_model("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
            "GPTNeoForCausalLM has local layers",
        ),
        (lambda: told(tiny_model(), layer_types=["full_attention", "chunked_attention"]), "chunked_attention layers"),
        *(
            (
                lambda kind=kind: get_peft_model(tiny_model(), kind(task_type="CAUSAL_LM", num_virtual_tokens=4)),
                "virtual tokens",
            )
            for kind in (PromptTuningConfig, PrefixTuningConfig)
        ),
    ],
)
def test_models_that_cannot_be_decoded_are_refused_by_name(make, said):
    assert said in refused(lambda: check_decodable(make(), "target"))


def test_position_codes_that_follow_the_longest_text_are_kept_where_they_do_not_change():
    """LongRoPE picks its factors by the longest position of a call: a row would depend on its neighbours."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0, "rope_type": "longrope"}
    target = tiny_model(
        "phi3", original_max_position_embeddings=40, rope_parameters=factors | {"original_max_position_embeddings": 40}
    )
    assert max_positions(target.config) == 40
    assert max_positions(tiny_model().config) == 256
    prompts, settings = prompts_of([5, 1, 16]), DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=24)
    responses, _ = decode(target, ModelDrafter(perturbed(target)), prompts, settings)
    assert texts(responses) == generated(target, prompts, 24)
    with pytest.raises(UserError, match="exceeds the context of 40 of the target"):
        decode(target, None, prompts_of([17]), DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=24))
    dynamic = tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    assert max_positions(dynamic.config) == 256


def test_evaluating_restores_the_mode_of_every_module_and_keeps_gradients_off():
    model = tiny_model("gpt2", n_layer=4).train()
    shorter = first_layers(model, 2)  # made of modules in training mode
    model.transformer.h[1].eval()  # a frozen part
    before = [module.training for module in model.modules()]
    seen = []

    def fail():
        seen.append((any(module.training for module in model.modules()), torch.is_grad_enabled()))
        raise KeyError

    with pytest.raises(KeyError), evaluating(model, None, shorter):
        fail()
    assert seen == [(False, False)]
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_inference_mode_is_left_to_plain_calls_of_plain_weights():
    class Packed(torch.Tensor):
        """A weight of another class, as quantisation makes."""

    model = tiny_model()
    assert without_autograd("eager", model, None) is torch.inference_mode
    assert without_autograd("graph", model) is torch.no_grad
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().as_subclass(Packed), requires_grad=False)
    assert without_autograd("eager", tiny_model(), model) is torch.no_grad


def test_steps_run_in_inference_mode_and_what_a_model_refreshes_there_can_be_trained_with():
    target, draft = tiny_model(), perturbed(tiny_model())
    inference = []

    def refresh(model, _):
        # As position codes that follow the text do: a buffer made in the forward and left in the model.
        inference.append(torch.is_inference_mode_enabled())
        model.register_buffer("scale", torch.ones(32), persistent=False)

    for model in (target, draft):
        model.register_forward_pre_hook(refresh)
    prompts = prompts_of([5, 9, 2])
    settings = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=12)
    responses, _ = decode(target, ModelDrafter(draft), prompts, settings)
    assert all(inference[-8:])  # outside decoding a model may be used in any mode
    assert texts(responses) == generated(target, prompts, 12)
    for model in (target, draft):
        model.get_input_embeddings().register_forward_hook(lambda _, __, embedded, scale=model.scale: embedded * scale)
        model._forward_pre_hooks.clear()
        assert not any(buffer.is_inference() for buffer in model.buffers())
        model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()  # an inference tensor is refused here
        assert model.get_input_embeddings().weight.grad is not None


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_taken(monkeypatch):
    model = tiny_model()
    free = free_bytes(model.device)
    assert free is None or free > 0
    monkeypatch.setattr("speculative.engine.memory.free_bytes", lambda device: 10 * 1024**2)
    check_memory(model, model, rows=2, capacity=100, query_length=4)
    own = cache_bytes(model, 100, 100)
    monkeypatch.setattr("speculative.engine.memory.free_bytes", lambda device: 2 * own)
    check_memory(model, model, rows=100, capacity=100, query_length=4, shared_cache=True)
    with pytest.raises(UserError, match="lower the batch"):
        check_memory(model, model, rows=100, capacity=100, query_length=4)
    with pytest.raises(UserError, match="lower the batch"):  # a tree's nodes are fed, not its depth
        check_memory(model, model, rows=100, capacity=100, query_length=585, shared_cache=True)
    monkeypatch.setattr("speculative.engine.memory.free_bytes", lambda device: 10 * 1024**2)
    with pytest.raises(
        UserError, match=r"4096 rows of 100 positions needs 0\.\d GiB, 0\.0 GiB free on cpu: lower the batch"
    ):
        check_memory(model, None, rows=4096, capacity=100, query_length=4)
    monkeypatch.setattr("speculative.engine.memory.free_bytes", lambda device: 1)
    monkeypatch.setattr("speculative.decoder.block_loop.BlockLoop", None)  # never reached
    with pytest.raises(UserError, match="lower the batch size or max_tokens"):
        decode(model, None, prompts_of([3]), DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=4))


def test_a_model_whose_first_layers_do_not_run_alone_has_no_early_exit():
    """Its embeddings of each layer are cut by the number of layers."""
    layers = ["sliding_attention", "full_attention"] * 2
    sizes = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    model = tiny_model("gemma4_text", num_hidden_layers=4, layer_types=layers, **sizes)
    said = refused(lambda: first_layers(model, 2))
    assert said.startswith("Gemma4ForCausalLM does not run with its first 2 layers alone")
