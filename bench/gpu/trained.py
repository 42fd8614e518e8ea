"""The shipped target and a draft carved from it, trained there; and the tests of losslessness on the device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from data.batches.collate import Example, collate
from data.prompts.stdlib import function_head_rows
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.models.heads import SplitModel
from distill.models.load import load_model, load_tokenizer
from distill.training.teacher import Teacher
from gpu.decoding import ours, tokens_per_second
from gpu.place import Place, best_of, tried
from gpu.training import loss_of
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import end_token_ids
from speculative.explain.losslessness import losslessness
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

SERVING = SamplingSettings(0.7, top_p=0.95)
LONGEST = 96


def embedded_pair(place: Place) -> tuple[Any, Any]:
    """The shipped target and its first and last layer."""
    target = load_model("target", "embedded", dtype=torch.float32)
    return target.to(place.device).eval(), carve(target, (0, -1)).to(place.device).eval()


@functools.cache
def head_prompts(heldout: bool, count: int) -> list[Prompt]:
    """Heads of the standard library's functions."""
    rows = [head for _, head in function_head_rows(heldout)]
    tokenizer = load_tokenizer("embedded")
    step = max(1, len(rows) // (2 * count))
    found = [tokenizer(head, add_special_tokens=False).input_ids for head in rows[::step]]
    return [(str(number), ids) for number, ids in enumerate(found) if 4 <= len(ids) <= LONGEST][:count]


def train(place: Place, target: Any, draft: Any, prompts: list[Prompt], seconds: float) -> int:
    """Distils the draft on the target's answers for so many seconds; the steps made."""
    settings = DecodeSettings(SERVING, 0, Rule.named("sample"), 16 if place.tiny else LONGEST, end_token_ids(target))
    answers, _ = decode(target, None, prompts, settings, batch_size=256)
    examples = [
        Example(
            np.array([*text.prompt_ids, *text.response_ids], np.int32),
            np.arange(len(text.prompt_ids) + len(text.response_ids)) >= len(text.prompt_ids),
        )
        for text in answers
        if text.response_ids
    ]
    draft.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3, betas=(0.9, 0.95))
    split, teacher, objective = SplitModel(draft), Teacher(target), Objective({"lk_hybrid": 1.0})
    order, until, steps = np.random.default_rng(0), max(0.0, place.left - seconds), 0
    while steps < 2 or (place.left > until and not place.tiny):
        chosen = [examples[number] for number in order.integers(0, len(examples), 32)]
        loss_of(split, teacher, objective, collate(chosen, 0).to(place.device)).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
    draft.eval().requires_grad_(False)
    return steps


def trained_cells(place: Place) -> Iterator[dict[str, Any]]:
    """The draft as carved and as trained: alpha, tau, speed over the target alone, at the serving settings."""
    target, draft = embedded_pair(place)
    few, gamma = (2, 2) if place.tiny else (32, 3)
    heldout = head_prompts(True, few)
    speculative, alone = (
        DecodeSettings(SERVING, g, Rule.named("sample"), 16 if place.tiny else 64) for g in (gamma, 0)
    )

    def measure() -> dict[str, Any]:
        responses, _ = decode(target, ModelDrafter(draft), heldout, speculative)
        alpha = sum(text.overlap_sum for text in responses) / max(1, sum(text.tested for text in responses))
        rates = [
            best_of(1, lambda s=settings: ours(target, draft, heldout[:1], s, "auto"), tokens_per_second)
            for settings in (speculative, alone)
        ]
        tau = sum(len(text.response_ids) for text in responses) / sum(text.blocks for text in responses)
        speed = tokens_per_second(rates[0]) / tokens_per_second(rates[1])
        return {
            "alpha": alpha,
            "tau": tau,
            "gamma": gamma,
            "tokens_per_second": tokens_per_second(rates[0]),
            "vs_plain": speed,
        }

    yield tried({"draft": "carved"}, measure)
    steps = train(place, target, draft, head_prompts(False, 2048) if not place.tiny else heldout, 0.6 * place.left)
    yield tried({"draft": "trained", "steps": steps}, measure)


def losslessness_cells(place: Place) -> Iterator[dict[str, Any]]:
    """Greedy texts, samples and probabilities of the target and of the pair, by rule; the draft is the target with noise."""
    target, _ = embedded_pair(place)
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.3 * weight.std() * torch.randn_like(weight)
    prompts = head_prompts(True, 2 if place.tiny else 12)
    for rule in ("sample", "block", "greedy-draft"):
        settings = DecodeSettings(SERVING, 3, Rule.named(rule), 8 if place.tiny else 24, end_token_ids(target))

        def check(settings: DecodeSettings = settings) -> dict[str, Any]:
            samples = 2 if place.tiny else 16
            found = losslessness(
                target,
                ModelDrafter(draft),
                prompts,
                settings,
                samples=samples,
                control=False,
            )
            return {"passed": float(not found.failed), "sentence": found.sentence}

        yield tried({"rule": rule, "marks": {"passed": 1.0}}, check)
