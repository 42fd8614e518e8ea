"""Seconds of a block with every row taken, measured in the decoder itself: plain decoding and a drafter in turn.

Shapes: T turns, B timed blocks of a turn.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from transformers import PreTrainedModel

from speculative.decode import Event, context_of, generate
from speculative.decoder.responses import DecodeSettings, Prompt
from speculative.drafters.drafter import Drafter
from speculative.errors import UserError

Stream = Generator[Event, None, None]
Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, ids of its response

TURNS = 6
WARM_UP = 2  # blocks of each contestant in a turn, before those that are timed
BURSTS, BURST = 4, 4  # of timed blocks: how often the contestants change places in a turn, and blocks between
TIMED_BLOCKS = WARM_UP + BURSTS * BURST


def full_batch_seconds(
    target: PreTrainedModel,
    drafter: Callable[[], Drafter],
    texts: Sequence[Text],
    settings: DecodeSettings,
    load: int,
    *,
    turns: int = TURNS,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds (T, B) of each timed plain step, and of each block at `settings.gamma`, with `load` rows taken throughout.

    A turn decodes from `load` places in the texts, drawn anew for it, as a full server finds its requests: each somewhere
    in its response, long ones more often. Nothing ends there but by `TIMED_BLOCKS` blocks, so no row is ever free. Both
    decode from the same places, a few blocks each in turn, so that a machine that is slow for a while slows both alike; so
    both hold their caches at once. The decoder's own work is included.

    Raises:
        UserError: so many rows need more memory than is free, or the context has no room for the blocks.
    """
    endless = replace(settings, eos_ids=(), stop=(), min_tokens=0, fit_context=False)
    plain = replace(endless, gamma=0, max_tokens=TIMED_BLOCKS)
    drafted = replace(endless, max_tokens=TIMED_BLOCKS * (settings.gamma + 1))
    context, name = context_of(target, drafter())
    room = None if context is None else context - drafted.max_tokens
    if room is not None and room < 1:
        raise UserError(
            f"the context of {context} of the {name} has no room for {TIMED_BLOCKS} blocks of {settings.gamma + 1}"
        )
    rng = np.random.default_rng(seed)
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])
    for _ in range(turns):
        prompts = places_in(texts, load, room, rng)
        streams = (_stream(target, None, prompts, plain), _stream(target, drafter(), prompts, drafted))
        with contextlib.closing(streams[0]), contextlib.closing(streams[1]):
            for own, blocks in zip(seconds, _in_turn(streams, load), strict=True):
                own.append(blocks)
    return np.array(seconds[0]), np.array(seconds[1])


def _in_turn(streams: tuple[Stream, Stream], load: int) -> tuple[list[float], list[float]]:
    """Seconds of each timed block of both streams; who begins alternates."""
    seconds = (list[float](), list[float]())
    for stream in streams:
        for _ in range(WARM_UP):
            _next_block(stream, load)
    for burst in range(BURSTS):
        for who in (0, 1) if burst % 2 == 0 else (1, 0):
            seconds[who].extend(_next_block(streams[who], load) for _ in range(BURST))
    return seconds


def _next_block(stream: Stream, load: int) -> float:
    """Seconds until every row has said something: a block, where no row is free."""
    began = time.perf_counter()
    for _ in range(load):
        next(stream)
    return time.perf_counter() - began


def places_in(texts: Sequence[Text], count: int, room: int | None, rng: np.random.Generator) -> list[Prompt]:
    """Texts up to a place in their responses, every token of every response as likely; at most `room` tokens each."""
    ends = np.cumsum([len(response) for _, response in texts])
    prompts: list[Prompt] = []
    for number, place in enumerate(rng.integers(0, ends[-1], count)):
        index = int(np.searchsorted(ends, place, side="right"))
        prompt, response = texts[index]
        ids = [*prompt, *response[: int(place) - (int(ends[index]) - len(response))]]
        prompts.append((f"{number}", ids[:room]))
    return prompts


def _stream(
    target: PreTrainedModel, drafter: Drafter | None, prompts: Sequence[Prompt], settings: DecodeSettings
) -> Stream:
    return cast(Stream, generate(target, drafter, prompts, settings, batch_size=len(prompts)))
