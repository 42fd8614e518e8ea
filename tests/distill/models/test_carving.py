"""Which layers and which MLP channels a carved draft keeps: fast measurements against slow ones, and trimming exactly."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused
from tiny_models import logits, prompts_of, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from distill.models.carving.channels import channel_scores, sample_sequences, trim_mlps
from distill.models.carving.layers import carve, layer_list, layers_only
from distill.models.load import load_model
from speculative.errors import UserError

TEXTS = [ids for _, ids in prompts_of([9, 3, 14, 6, 11], seed=3)]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 4}),
    "gpt2": ("gpt2", {"n_layer": 4}),
    "gpt_neox": ("gpt_neox", {"num_hidden_layers": 4}),
    "gemma3_text": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
# What only the MLP's shape matters for.
MLPS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_inner": 64},
    "gpt_neox": {},
    "gemma3_text": {},
    "falcon": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "qwen3": {},
    "starcoder2": {"use_bias": True},
}


def made(kind: str) -> PreTrainedModel:
    name, options = KINDS[kind]
    return tiny_model(name, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [(0, 3), (1,), (0, 2, 3), (0, 1, 2, 3)])
def test_the_target_with_some_layers_is_the_carved_draft(kind: str, kept: tuple[int, ...]) -> None:
    target = made(kind)
    before, state = logits(target), json.dumps(target.config.to_dict(), default=str)
    with layers_only(target, kept):
        inside = logits(target)
    torch.testing.assert_close(inside, logits(carve(target, kept)), rtol=0, atol=0)
    assert json.dumps(target.config.to_dict(), default=str) == state
    torch.testing.assert_close(logits(target), before, rtol=0, atol=0)


def test_recurrent_layers_alone_are_not_carved() -> None:
    target = tiny_model("lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
    text = refused(carve, target, (0, -1))
    assert "needs an attention layer to decode" in text
    torch.testing.assert_close(logits(carve(target, (0, 1, 2))), logits(target), rtol=0, atol=0)


def test_a_config_that_counts_other_layers_is_refused() -> None:
    target = tiny_model(num_hidden_layers=3)
    target.config.num_hidden_layers = 7
    assert "no list of 7 layers" in refused(layer_list, target)


def test_text_is_taken_from_everywhere() -> None:
    texts = [[index] * (5 + index % 3) for index in range(100)]
    chosen = sample_sequences(texts, 60, 6)
    assert 50 <= sum(map(len, chosen)) <= 70
    assert max(map(len, sample_sequences(texts, 600, 6))) == 6
    assert chosen[0][0] < 20
    assert chosen[-1][0] > 80
    assert len({sequence[0] for sequence in chosen}) == len(chosen)
    assert sample_sequences(texts[:2], 1000, 100) == texts[:2]


def down_projection(layer: Any) -> Any:
    names = ("down_proj", "dense_4h_to_h", "fc2")
    return next(
        module
        for name, module in layer.named_modules()
        if name.endswith(names) or (name == "mlp.c_proj" and isinstance(module, Conv1D | torch.nn.Linear))
    )


@pytest.mark.parametrize("kind", MLPS)
def test_a_trimmed_model_is_the_model_with_the_other_channels_at_zero(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind, **MLPS[kind])
    scores = channel_scores(model, TEXTS)
    torch.testing.assert_close(logits(trim_mlps(model, 64, scores)), logits(model), rtol=0, atol=0)  # all of them
    trimmed = trim_mlps(model, 20, scores)
    hooks = []
    for layer, scores_F in zip(layer_list(model)[1], scores, strict=True):
        mask_F = torch.zeros(64)
        mask_F[scores_F.argsort(descending=True)[:20]] = 1.0
        hooks.append(
            down_projection(layer).register_forward_pre_hook(lambda module, inputs, mask_F=mask_F: inputs[0] * mask_F)
        )
    masked = logits(model)
    for hook in hooks:
        hook.remove()
    assert (masked - logits(model)).abs().max() > 1e-3, "the channels did something"
    # Sums over 64 and over 20 channels round differently; the weights are ten times the usual.
    torch.testing.assert_close(logits(trimmed), masked, rtol=1e-4, atol=1e-4)
    trimmed.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(trimmed), rtol=0, atol=0)
    assert sum(weight.numel() for weight in loaded.parameters()) < sum(weight.numel() for weight in model.parameters())


def test_scores_are_what_a_channel_writes() -> None:
    model = tiny_model()
    found = channel_scores(model, TEXTS)
    for index, layer in enumerate(model.model.layers):
        activity: list[Tensor] = []
        hook = layer.mlp.register_forward_hook(
            lambda mlp, inputs, output, activity=activity: activity.append(
                (mlp.act_fn(mlp.gate_proj(inputs[0])) * mlp.up_proj(inputs[0])).abs().flatten(0, 1)
            )
        )
        for ids in TEXTS:
            logits(model, ids)
        hook.remove()
        expected = torch.cat(activity).double().mean(0) * layer.mlp.down_proj.weight.double().norm(dim=0)
        torch.testing.assert_close(found[index], expected, rtol=1e-5, atol=0)  # float32 activations of another batch


def normed_mlp() -> PreTrainedModel:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.inner_norm = torch.nn.LayerNorm(64)
    return model


@pytest.mark.parametrize(
    ("make", "size", "said"),
    [
        (lambda: tiny_model("mixtral", num_local_experts=2), 20, "Mixtral"),
        (lambda: tiny_model("phi3", pad_token_id=0), 20, "Phi3"),
        (lambda: tiny_model("bloom", n_layer=2, n_head=4), 20, "Bloom"),
        (normed_mlp, 20, "not have a plain or gated MLP"),  # a norm over the channels would see the others vanish
        (tiny_model, 65, "= 65: the target's MLPs have 64 channels"),
    ],
)
def test_an_mlp_that_cannot_be_trimmed_is_refused(make: Any, size: int, said: str) -> None:
    model = make()
    text = refused(lambda: trim_mlps(model, size, channel_scores(model, TEXTS)))
    assert "student.intermediate_size" in text
    assert said in text


# Kind -> (options, layers that a config can describe, layers that none can).
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING, FULL = "sliding_attention", "full_attention"
RULES: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "gemma4_text": (
        {
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "sliding_window": 4,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
        },
        [(0, 3), (1, 2, 3), (3,)],
        [(0, 1)],
    ),
    "gemma3n_text": (
        {
            "layer_types": [SLIDING, FULL] * 2,
            "sliding_window": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 50,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [64, 32, 64, 32],
        },
        [(1, 3), (0, 2)],
        [(0, 3)],
    ),
    "qwen3_moe": (EXPERTS | {"num_experts": 4, "mlp_only_layers": [0, 3]}, [(1, 3), (0, 3)], []),
    "qwen2_moe": (
        EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
        [(0, 1)],
        [(1, 3), (0, 2)],
    ),
    "jamba": (
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        [(0, 1)],
        [(1, 3), (1, 2)],
    ),
    "glm4_moe": (
        EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
        [(2, 3), (0, 3)],
        [(3, 0)],
    ),
    "bamba": (
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
        [(1, 2)],
        [],
    ),
    "diffllama": ({}, [(0, 1)], [(1, 3)]),  # each layer computes with a constant of its number
}


def ruled(kind: str) -> PreTrainedModel:
    return tiny_model(kind, num_hidden_layers=4, **RULES[kind][0])


@pytest.mark.parametrize(("kind", "kept"), [(kind, kept) for kind, (_, fits, _) in RULES.items() for kept in fits])
def test_layers_that_differ_by_rule_are_carved_as_they_are(kind: str, kept: tuple[int, ...], tmp_path: Path) -> None:
    target = ruled(kind)
    draft = carve(target, kept)
    with layers_only(target, kept):
        torch.testing.assert_close(logits(draft), logits(target), rtol=0, atol=0)
    draft.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_model("draft", str(tmp_path))), logits(draft), rtol=0, atol=0)


@pytest.mark.parametrize("kind", RULES)
def test_no_layers_are_carved_into_another_model(kind: str) -> None:
    target = ruled(kind)
    for kept in (kept for count in (1, 2, 3) for kept in itertools.combinations(range(4), count)):
        try:
            draft = carve(target, kept)
        except UserError:
            refused(carve, target, kept)
            continue
        with layers_only(target, kept):
            torch.testing.assert_close(logits(draft), logits(target), rtol=0, atol=0, msg=str(kept))


@pytest.mark.parametrize(("kind", "kept"), [(kind, kept) for kind, (*_, unfit) in RULES.items() for kept in unfit])
def test_layers_that_no_config_describes_are_refused(kind: str, kept: tuple[int, ...]) -> None:
    text = refused(carve, ruled(kind), kept)
    assert f"student.layers = {list(kept)}: " in text
    assert "cannot keep these layers as they are (" in text


def test_a_layer_that_counts_its_number_is_distinguished() -> None:
    target = tiny_model("gpt2", n_layer=4, scale_attn_by_inverse_layer_idx=True)
    assert "attn.scaling of layer 1 would be" in refused(carve, target, (1, 3))
    assert carve(target, (0, 1)).config.n_layer == 2


def test_a_weight_that_another_overwrites_is_refused() -> None:
    target = tiny_model(num_hidden_layers=3, tie_word_embeddings=False)
    target.config.tie_word_embeddings = True
    assert "is tied to another weight that differs" in refused(carve, target, (0, 2))
