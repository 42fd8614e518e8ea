"""Pairs at real sizes with random weights, made so that acceptance is known; nothing is downloaded.

Every attention and MLP block adds zero to the residual stream (its last matrix is zero, its arithmetic is done all the same), and
the output head holds the input embeddings in permuted order: the likeliest next token is a permutation of the last one, by a wide
margin. The draft's permutation differs for a share 1 - alpha of the tokens. So any decoder accepts alpha of the drafted tokens,
greedily and at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    vocab: int
    tied: bool = False  # in training; to decode, head and embedding hold other numbers here

    def config(self, context: int, tied: bool | None = None) -> Any:
        """As transformers wants it."""
        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_width,
            max_position_embeddings=context,
            tie_word_embeddings=self.tied if tied is None else tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )

    @property
    def layer_weights(self) -> int:
        """Weights of the layers' matrices."""
        attention = 2 * self.width * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.mlp)

    @property
    def read_weights(self) -> int:
        """Weights that one forward reads: the matrices and the head."""
        return self.layer_weights + self.vocab * self.width

    @property
    def cached_numbers(self) -> int:
        """Numbers in the cache for each position."""
        return 2 * self.layers * self.kv_heads * self.head_width


QWEN3_8B = Shape(4096, 36, 32, 8, 128, 12288, 151_936)
QWEN3_600M = Shape(1024, 28, 16, 8, 128, 3072, 151_936, True)
# name: (target, draft); the second draft is the target's own first layers.
PAIRS = {
    "Qwen3 8B, 0.6B": (QWEN3_8B, QWEN3_600M),
    "Qwen3 8B, its first 4 layers": (QWEN3_8B, replace(QWEN3_8B, layers=4)),
}


def tiny(shape: Shape, layers: int | None = None, vocab: int = 512) -> Shape:
    """The same layers, fewer and narrower."""
    layers = min(shape.layers, 2) if layers is None else layers
    return replace(shape, width=32, layers=layers, heads=4, kv_heads=2, head_width=8, mlp=64, vocab=vocab)


def least_bytes(target: Shape, draft: Shape, gamma: int, rows: int, positions: int, itemsize: int = 2) -> int:
    """What one block has to read: gamma times the draft and once the target, each with its cache."""

    def of(shape: Shape) -> int:
        return itemsize * (shape.read_weights + rows * positions * shape.cached_numbers)

    return of(target) + gamma * of(draft)


def permutation_model(
    shape: Shape, follows_V: torch.Tensor, dtype: torch.dtype, device: torch.device, context: int
) -> PreTrainedModel:
    """A model of this shape whose likeliest token after token t is follows_V[t], by a wide margin."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(context, tied=False), dtype=dtype).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding_VD = model.model.embed_tokens.weight
        embedding_VD.normal_()
        # A row of the head times the normed embedding of its token is width / 4; of any other about sqrt(width) / 4.
        model.lm_head.weight[follows_V.to(device)] = embedding_VD / 4
    model.generation_config.eos_token_id = None
    return model


def pair(
    target: Shape, draft: Shape, alpha: float, dtype: torch.dtype, device: torch.device, context: int
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and draft whose likeliest tokens agree after a share alpha of all tokens."""
    random = torch.Generator().manual_seed(0)
    follows_V = torch.randperm(target.vocab, generator=random)
    other_V = follows_V.clone()
    wrong_V = torch.rand(target.vocab, generator=random) > alpha
    other_V[wrong_V] = follows_V[wrong_V].roll(1)
    return (
        permutation_model(target, follows_V, dtype, device, context),
        permutation_model(draft, other_V, dtype, device, context),
    )
