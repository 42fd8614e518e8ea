"""The judge is checked before it measures: a target accepts itself, and speculation does not change its text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.drafter import Ask, ModelDrafter, Proposal
from speculative.engine.models import evaluating
from speculative.measure.token_scores import score_responses
from speculative.rules.sampling import GREEDY
from speculative.rules.verify import Rule

# How far alpha of a target against itself may be from 1. The two sides run the same weights in calls of different
# shape, whose matrix products round differently: an error e in a log probability costs |e| / 2 on average. Float32 has
# e about 1e-5; bfloat16 keeps 8 bits, so logits of size 10-20 move by up to 0.06 (seen on a real model: alpha .997).
ALPHA_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.005, torch.bfloat16: 0.015}
# Two greedy texts may part only where the target's two candidate logits are this close, relative to the largest
# logit: a few roundings of the dtype, accumulated over the layers.
NEAR_TIE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class SelfCheckError(RuntimeError):
    """The judge contradicts itself: no number it prints can be trusted. The message is one line."""


class SpoiledDrafter(ModelDrafter):
    """Proposes as its model does, but with a wrong id at every third position, so that every block length occurs.

    Only for rules that draft greedily: any proposal is lossless there.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model, name="spoiled draft")

    def propose(self, ask: Ask) -> Proposal:
        assert ask.sampling.greedy
        proposal = super().propose(ask)
        ids_RG = proposal.ids_RG
        positions_RG = torch.from_numpy(ask.lengths_R[:, None] + np.arange(ids_RG.shape[1])).to(ids_RG.device)
        wrong_RG = torch.where(ids_RG > 0, ids_RG - 1, ids_RG + 1)
        # The draft has read its own tokens and not the wrong ones: nothing behind the first of them is in its cache.
        self._read_R = ask.lengths_R - 1
        return proposal._replace(ids_RG=torch.where(positions_RG % 3 == 0, wrong_RG, ids_RG))


def self_checks(
    target: PreTrainedModel, prompts: Sequence[Prompt], settings: DecodeSettings, *, batch_size: int = 8
) -> dict[str, Any]:
    """Check the judge on this target and these prompts; returns what was found.

    1. The target as its own draft scores alpha 1.000, by replay of its text and by live decoding.
    2. Speculative greedy tokens equal plain greedy tokens, with proposals that are often wrong.
    Tolerances depend on the target's dtype and are stated beside the results.

    Raises SelfCheckError with one line when a check fails.
    """
    dtype = target.dtype
    rule: Rule = "greedy" if settings.sampling.greedy else "sample"
    gamma = max(1, settings.gamma)
    as_itself = replace(settings, rule=rule, gamma=gamma)
    plain, _ = decode(target, None, prompts, replace(as_itself, gamma=0), batch_size=batch_size)
    live, _ = decode(target, ModelDrafter(target), prompts, as_itself, batch_size=batch_size)
    alpha_replay = float(np.concatenate(score_responses(target, plain, settings.sampling, rule)).mean())
    tested = sum(response.tested for response in live)
    alpha_live = sum(response.accepted for response in live) / tested
    tolerance = ALPHA_TOLERANCE.get(dtype, ALPHA_TOLERANCE[torch.bfloat16])
    # Live decoding counts coins: with few tokens one honest rejection weighs more than the mean error, which is about a
    # fifth of the tolerance, so three standard deviations of such a count are granted on top.
    tolerance_live = tolerance + 3 * (tolerance / 5 / tested) ** 0.5
    for how, alpha, allowed in (("replay", alpha_replay, tolerance), ("live decoding", alpha_live, tolerance_live)):
        if not abs(alpha - 1.0) <= allowed:
            raise SelfCheckError(
                f"the target as its own draft scores alpha {alpha:.4f} by {how}, not 1.000 within {allowed:.3g} ({dtype})"
            )

    greedy = DecodeSettings(GREEDY, gamma, "greedy", settings.max_tokens, settings.eos_ids, settings.seed)
    plain_greedy, _ = decode(target, None, prompts, replace(greedy, gamma=0), batch_size=batch_size)
    speculative_greedy, _ = decode(target, SpoiledDrafter(target), prompts, greedy, batch_size=batch_size)
    near_ties = [
        near_tie(target, one, other)
        for one, other in zip(plain_greedy, speculative_greedy, strict=True)
        if one.response_ids != other.response_ids
    ]
    return {
        "prompts": len(prompts),
        "tokens": sum(len(response.response_ids) for response in plain),
        "dtype": str(dtype).removeprefix("torch."),
        "gamma": gamma,
        "alpha_replay": alpha_replay,
        "alpha_live": alpha_live,
        "alpha_tolerance": tolerance,
        "greedy_equal": len(prompts) - len(near_ties),
        "near_ties": near_ties,
        "near_tie_tolerance": NEAR_TIE.get(dtype, NEAR_TIE[torch.bfloat16]),
    }


def near_tie(target: PreTrainedModel, plain: Response, speculative: Response) -> dict[str, Any]:
    """Where two greedy texts part and by how little; raises SelfCheckError when it is more than rounding."""
    pairs = zip(plain.response_ids, speculative.response_ids, strict=False)
    position = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        raise SelfCheckError(
            f"speculative greedy text of prompt {plain.key!r} ends after {len(speculative.response_ids)} tokens, "
            f"plain greedy text after {len(plain.response_ids)}"
        )
    context = torch.tensor([[*plain.prompt_ids, *plain.response_ids[:position]]], device=target.device)
    with evaluating(target):
        logits_V = target(input_ids=context, use_cache=False).logits[0, -1].double()
    candidates = logits_V[[plain.response_ids[position], speculative.response_ids[position]]]
    gap = float((logits_V.max() - candidates.min()) / logits_V.abs().max())
    tolerance = NEAR_TIE.get(target.dtype, NEAR_TIE[torch.bfloat16])
    if not gap <= tolerance:
        raise SelfCheckError(
            f"speculative greedy differs from plain greedy at token {position} of prompt {plain.key!r}: logits "
            f"{gap:.1e} apart (relative), a near-tie is at most {tolerance:.0e} ({target.dtype})"
        )
    return {"prompt": plain.key, "position": position, "gap": gap}
