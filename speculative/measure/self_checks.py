"""Self-checks before measuring: the target as its own draft is always accepted, and speculation does not change its text."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.drafter import Ask, ModelDrafter, Proposal
from speculative.engine.cached_model import speed_warnings
from speculative.engine.models import evaluating, forward_parameters, state_name, takes_logits_to_keep
from speculative.errors import TooLittleMemory
from speculative.measure.token_scores import StoredText, score_responses
from speculative.progress import each, phase
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

# A deviation above this multiple of the dtype's noise is a fault; between one and this multiple it gives a warning.
STOP_AT = 3.0
T = TypeVar("T")


# Noise: how much a model's numbers change when the same text is computed in calls of another shape, by rounding. Our decoder
# is not used for it, so a fault in the decoder cannot count as rounding.
WIDE = 8  # rows
NOISE_TEXTS, NOISE_TOKENS = 2, 32


@dataclass(frozen=True)
class Noise:
    """overlap: 1 minus alpha of the model against itself. gap: between two logits that are equal up to rounding, relative to
    the largest.
    """

    overlap: float
    gap: float


# Least noise assumed, because few tokens miss rare rounding errors. A bfloat16 has 8 bits, so logits of size
# 10-20 move by up to 0.06, and an error e in a log probability costs |e| / 2 of alpha on average.
LEAST_NOISE = {
    torch.float64: Noise(3e-7, 3e-11),
    torch.float32: Noise(3e-4, 3e-5),
    torch.float16: Noise(1.7e-3, 1.7e-3),
    torch.bfloat16: Noise(5e-3, 7e-3),
}

MOST_NOISE = 10  # times the least of the dtype: larger differences are a fault, not noise


def least_noise(dtype: torch.dtype) -> Noise:
    """Least noise of a dtype; for an unlisted dtype, that of bfloat16."""
    return LEAST_NOISE.get(dtype, LEAST_NOISE[torch.bfloat16])


def measure_noise(
    model: PreTrainedModel, texts: Sequence[StoredText], sampling: SamplingSettings, rows: int = WIDE
) -> Noise:
    """Noise on the first tokens of the shortest texts: computed at once, then one by one in a batch of 1 and of `rows`."""
    said = (text for text in texts if text.response_ids)
    chosen = sorted(said, key=lambda text: len(text.prompt_ids))[:NOISE_TEXTS]
    least = least_noise(model.dtype)
    overlap, gap, tokens = 0.0, least.gap, 0
    for text in each(chosen, "self-checks: rounding"):
        prompt, response = list(text.prompt_ids), list(text.response_ids)[:NOISE_TOKENS]
        with evaluating(model):
            ways = [_at_once(model, prompt, response)]
            ways += [_one_by_one(model, prompt, response, size) for size in dict.fromkeys((1, rows))]
        probs = [logits_to_probs(logits_TV, sampling) for logits_TV in ways]
        lacks = [(1.0 - torch.minimum(one, two).sum(-1)).sum() for one, two in itertools.combinations(probs, 2)]
        moved = [(one - two).abs().amax(-1) / one.abs().amax(-1) for one, two in itertools.combinations(ways, 2)]
        overlap, tokens = overlap + float(torch.stack(lacks).max()), tokens + len(response)
        gap = max(gap, 2.0 * float(torch.stack(moved).max()))  # both logits change
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


class SelfCheckError(RuntimeError):
    """A self-check failed, so no measurement can be trusted. The message is one line."""


class SpoiledDrafter(ModelDrafter):
    """Proposes as its model does, but with a wrong id at every third position, so that every block length occurs. Only for rules that
    draft greedily: any proposal is lossless there.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model, name="spoiled draft")

    def propose(self, ask: Ask) -> Proposal:
        assert ask.sampling.greedy
        proposal = super().propose(ask)
        ids_RG = proposal.ids_RG
        positions_RG = torch.from_numpy(ask.lengths_R[:, None] + np.arange(ids_RG.shape[1])).to(ids_RG.device)
        wrong_RG = torch.where(ids_RG > 0, ids_RG - 1, ids_RG + 1)
        # The draft has read its own tokens, not the wrong ones, so its cache is valid only up to the first of them.
        self.read_R = ask.lengths_R - 1
        return proposal._replace(ids_RG=torch.where(positions_RG % 3 == 0, wrong_RG, ids_RG))


class NearTie(TypedDict):
    """The position where two greedy texts differ; gap: between the logits of the two tokens, relative to the largest."""

    prompt: str
    position: int
    gap: float


class Checked(TypedDict):
    """Results: alpha of the target as its own draft by replay and live, and the number of equal greedy texts."""

    prompts: int
    tokens: int
    dtype: str
    gamma: int
    batch_size: int
    alpha_replay: float
    alpha_live: float
    alpha_noise: float
    alpha_tolerance: float
    greedy_equal: int
    near_ties: list[NearTie]
    near_tie_tolerance: float
    warnings: list[str]


def self_checks(
    target: PreTrainedModel, prompts: Sequence[Prompt], settings: DecodeSettings, *, batch_size: int = 8
) -> Checked:
    """Run the self-checks on this target and these prompts, against the noise of its dtype on this text; `warnings` lists larger
    deviations, and slower code.

    1. The target as its own draft has alpha 1.000, by replay of its text and by live decoding.
    2. Speculative greedy tokens equal plain greedy tokens, with proposals that are often wrong.
    The number of rows is halved until two full caches fit in memory. Raises SelfCheckError with one line if a deviation exceeds STOP_AT
    times the noise, UserError if one row does not fit.
    """
    rule = Rule.usual(settings.sampling.temperature)
    gamma = max(1, settings.gamma)
    as_itself = replace(settings, rule=rule, gamma=gamma)
    greedy = DecodeSettings(GREEDY, gamma, Rule.usual(0), settings.max_tokens, settings.eos_ids, settings.seed)

    def decoded(rows: int) -> tuple[list[Response], ...]:
        decodings = (
            (None, replace(as_itself, gamma=0)),
            (ModelDrafter(target), as_itself),
            (None, replace(greedy, gamma=0)),
            (SpoiledDrafter(target), greedy),
        )
        with phase("self-checks", len(decodings) * len(prompts)) as shown:
            return tuple(
                decode(target, drafter, prompts, own, batch_size=rows, shown=shown)[0] for drafter, own in decodings
            )

    (plain, live, plain_greedy, speculative_greedy), rows = _with_fewer_rows(decoded, min(batch_size, len(prompts)))
    measured = measure_noise(target, plain, settings.sampling, rows)
    least = least_noise(target.dtype)
    noise = Noise(min(measured.overlap, MOST_NOISE * least.overlap), min(measured.gap, MOST_NOISE * least.gap))
    alpha_replay = float(np.concatenate(score_responses(target, plain, settings.sampling, rule)).mean())
    tested = sum(response.tested for response in live)
    alpha_live = sum(response.accepted for response in live) / tested
    counted = sum(len(response.response_ids) for response in plain) if settings.sampling.greedy else None
    warnings = [
        *speed_warnings(target),
        *_beside_noise("replay", alpha_replay, noise, target.dtype, counted),
        *_beside_noise("live decoding", alpha_live, noise, target.dtype, tested),
    ]
    near_ties = [
        near_tie(target, one, other, noise)
        for one, other in zip(plain_greedy, speculative_greedy, strict=True)
        if one.response_ids != other.response_ids
    ]
    warnings += [
        f"greedy texts of prompt {tie['prompt']!r} differ where two logits are {tie['gap']:.1e} apart (relative), "
        f"{tie['gap'] / noise.gap:.1f} times the noise of {target.dtype} on this text"
        for tie in near_ties
        if tie["gap"] > noise.gap
    ]
    return {
        "prompts": len(prompts),
        "tokens": sum(len(response.response_ids) for response in plain),
        "dtype": str(target.dtype).removeprefix("torch."),
        "gamma": gamma,
        "batch_size": rows,
        "alpha_replay": alpha_replay,
        "alpha_live": alpha_live,
        "alpha_noise": noise.overlap,
        "alpha_tolerance": STOP_AT * noise.overlap,
        "greedy_equal": len(prompts) - len(near_ties),
        "near_ties": near_ties,
        "near_tie_tolerance": STOP_AT * noise.gap,
        "warnings": warnings,
    }


def _with_fewer_rows(run: Callable[[int], T], rows: int) -> tuple[T, int]:
    """Result of `run` for this many rows, halved while memory is too small, and the number of rows used."""
    while True:
        try:
            return run(rows), rows
        except (TooLittleMemory, torch.OutOfMemoryError):
            if rows == 1:
                raise
        rows //= 2


def _beside_noise(how: str, alpha: float, noise: Noise, dtype: torch.dtype, coins: int | None = None) -> list[str]:
    """A warning if alpha differs from 1 by more than the noise; raises SelfCheckError if it is more than rounding. coins: tested tokens;
    with few, one chance rejection weighs more than the mean error, so three standard deviations of such a count are added.
    """
    allowed = STOP_AT * noise.overlap + (3 * (noise.overlap / coins) ** 0.5 if coins else 0.0)
    if not abs(alpha - 1.0) <= allowed:
        raise SelfCheckError(
            f"the target as its own draft has alpha {alpha:.4f} by {how}; it must be within {allowed:.3g} of 1.000, "
            f"{STOP_AT:g} times the noise of {dtype} on this text"
        )
    least = allowed / STOP_AT
    if abs(alpha - 1.0) <= least:
        return []
    return [
        f"the target as its own draft has alpha {alpha:.4f} by {how}, {abs(alpha - 1.0) / least:.1f} times as far from 1 "
        f"as the noise of {dtype} on this text"
    ]


def first_difference(plain: Response, speculative: Response) -> int:
    """The first place where two greedy texts differ; SelfCheckError if one is the beginning of the other."""
    pairs = zip(plain.response_ids, speculative.response_ids, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        raise SelfCheckError(
            f"speculative greedy text of prompt {plain.key!r} ends after {len(speculative.response_ids)} tokens, "
            f"plain greedy text after {len(plain.response_ids)}"
        )
    return place


def next_logits(target: PreTrainedModel, text: Response, place: int) -> torch.Tensor:
    """Float64 logits (V,) for the token at a place of a response, by a plain forward."""
    context = torch.tensor([[*text.prompt_ids, *text.response_ids[:place]]], device=target.device)
    keep = {"logits_to_keep": 1} if takes_logits_to_keep(target) else {}
    with evaluating(target):
        return target(input_ids=context, use_cache=False, **keep).logits[0, -1].double()


def near_tie(target: PreTrainedModel, plain: Response, speculative: Response, noise: Noise | None = None) -> NearTie:
    """The position where two greedy texts differ, and the gap; raises SelfCheckError if it is more than rounding. noise: by default the
    least of the dtype.
    """
    position = first_difference(plain, speculative)
    logits_V = next_logits(target, plain, position)
    candidates = logits_V[[plain.response_ids[position], speculative.response_ids[position]]]
    gap = float((logits_V.max() - candidates.min()) / logits_V.abs().max())
    tolerance = STOP_AT * (noise or least_noise(target.dtype)).gap
    if not gap <= tolerance:
        raise SelfCheckError(
            f"speculative greedy differs from plain greedy at token {position} of prompt {plain.key!r}: the "
            f"logits are {gap:.1e} apart (relative), a near-tie at most {tolerance:.0e} ({target.dtype})"
        )
    return {"prompt": plain.key, "position": position, "gap": gap}
