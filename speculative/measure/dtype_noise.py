"""How far a model's numbers move when the same text is computed in calls of another shape: the rounding of its dtype.

Shapes: T response tokens, V vocabulary. No decoder of ours takes part, so no fault of one can pass for rounding.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from speculative.engine.models import evaluating, forward_parameters, state_name, takes_logits_to_keep
from speculative.measure.token_scores import StoredText
from speculative.rules.sampling import SamplingSettings, logits_to_probs

WIDE = 8  # rows
NOISE_TEXTS, NOISE_TOKENS = 2, 32


@dataclass(frozen=True)
class Noise:
    """overlap: what alpha of the model against itself lacks to 1. gap: between two logits that are equal but for rounding,
    relative to the largest.
    """

    overlap: float
    gap: float


# What is taken for rounding in any case: few tokens say little of rare roundings. A bfloat16 has 8 bits, so logits of size
# 10-20 move by up to 0.06, and an error e in a log probability costs |e| / 2 of alpha on average.
LEAST_NOISE = {
    torch.float64: Noise(3e-7, 3e-11),
    torch.float32: Noise(3e-4, 3e-5),
    torch.float16: Noise(1.7e-3, 1.7e-3),
    torch.bfloat16: Noise(5e-3, 7e-3),
}

# Ten times that of bfloat16: calls that differ by more are wrong somewhere, and no measure for others.
MOST_NOISE = Noise(5e-2, 7e-2)


def least_noise(dtype: torch.dtype) -> Noise:
    """Of a dtype; of one that is not listed, that of bfloat16."""
    return LEAST_NOISE.get(dtype, LEAST_NOISE[torch.bfloat16])


def measure_noise(
    model: PreTrainedModel, texts: Sequence[StoredText], sampling: SamplingSettings, rows: int = WIDE
) -> Noise:
    """Of the first tokens of the shortest texts, computed at once, then one by one in a batch of 1 and of `rows`."""
    said = (text for text in texts if text.response_ids)
    chosen = sorted(said, key=lambda text: len(text.prompt_ids))[:NOISE_TEXTS]
    least = least_noise(model.dtype)
    overlap, gap, tokens = 0.0, least.gap, 0
    for text in chosen:
        prompt, response = list(text.prompt_ids), list(text.response_ids)[:NOISE_TOKENS]
        with evaluating(model):
            ways = [_at_once(model, prompt, response)]
            ways += [_one_by_one(model, prompt, response, size) for size in dict.fromkeys((1, rows))]
        probs = [logits_to_probs(logits_TV, sampling) for logits_TV in ways]
        lacks = [(1.0 - torch.minimum(one, two).sum(-1)).sum() for one, two in itertools.combinations(probs, 2)]
        moved = [(one - two).abs().amax(-1) / one.abs().amax(-1) for one, two in itertools.combinations(ways, 2)]
        overlap, tokens = overlap + float(torch.stack(lacks).max()), tokens + len(response)
        gap = max(gap, 2.0 * float(torch.stack(moved).max()))  # both logits move
    return Noise(max(least.overlap, overlap / max(tokens, 1)), gap)


def _at_once(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Float32 logits (T, V) that predict the response, from one call on the whole text."""
    ids_1T = torch.tensor([prompt + response[:-1]], device=model.device)
    keep = {"logits_to_keep": len(response)} if takes_logits_to_keep(model) else {}
    return model(input_ids=ids_1T, use_cache=False, **keep).logits[0, -len(response) :].float()


def _one_by_one(model: PreTrainedModel, prompt: list[int], response: list[int], rows: int) -> torch.Tensor:
    """The same from calls of one token, with the model's own cache or state and the text in every row."""
    ids_RT = torch.tensor([prompt + response[:-1]], device=model.device).expand(rows, -1)
    positions_1T = torch.arange(ids_RT.shape[1], device=model.device).unsqueeze(0)
    takes, name = forward_parameters(model), state_name(model)
    state, logits, start = None, [], 0
    for stop in range(max(1, len(prompt) - 1), ids_RT.shape[1] + 1):
        options: dict[str, Any] = {} if state is None else {name: state}
        if "position_ids" in takes:
            options["position_ids"] = positions_1T[:, start:stop]
        if "logits_to_keep" in takes:
            options["logits_to_keep"] = 1
        output = model(input_ids=ids_RT[:, start:stop], use_cache=True, **options)
        state, start = getattr(output, name), stop
        logits.append(output.logits[0, -1])
    return torch.stack(logits[-len(response) :]).float()
