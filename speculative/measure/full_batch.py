"""Seconds of a block with every row taken, measured in the decoder itself: plain decoding and a drafter in turn.

Shapes: R rows, T turns, B timed blocks of a turn, K kinds of blocks.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
from transformers import PreTrainedModel

from speculative.decode import Event, context_of, generate
from speculative.decoder.responses import DecodeSettings, Prompt
from speculative.drafters.drafter import Ask, Drafter, Proposal
from speculative.errors import UserError

Stream = Generator[Event, None, None]
Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, ids of its response

TURNS = 6
WARM_UP = 2  # blocks of each contestant in a turn, before those that are timed
BURSTS, BURST = 4, 4  # of timed blocks: how often the contestants change places in a turn, and blocks between
TIMED_BLOCKS = WARM_UP + BURSTS * BURST


# What made a block dear, together: rows for which something was found without a model, and rows for which a model drafted.
PLAIN, FOUND, DRAFTED = 0, 1, 2


class FullBatch(NamedTuple):
    """Seconds (T, B) of plain steps and of blocks, and of what kind (T, B) each block was: PLAIN, FOUND, DRAFTED or both."""

    plain_TB: np.ndarray
    block_TB: np.ndarray
    kinds_TB: np.ndarray

    def ratios(self, shares: Mapping[int, float]) -> np.ndarray:
        """(T,) a block's time over a plain step's in each turn, the kinds in these shares.

        By kind the median of a turn, or of all turns where a turn has none; a kind that was never seen is left out of the shares,
        and where none of them was, all blocks are of one kind.
        """
        steps_TB = self.block_TB / np.median(self.plain_TB, axis=1, keepdims=True)
        seen = {kind: share for kind, share in shares.items() if share > 0.0 and (self.kinds_TB == kind).any()}
        if not seen:
            return np.median(steps_TB, axis=1)
        ratios_T = np.zeros(len(steps_TB))
        for kind, share in seen.items():
            of_kind_TB = self.kinds_TB == kind
            typical = float(np.median(steps_TB[of_kind_TB]))
            medians = [
                np.median(steps_B[own_B]) if own_B.any() else typical
                for steps_B, own_B in zip(steps_TB, of_kind_TB, strict=True)
            ]
            ratios_T += share / sum(seen.values()) * np.array(medians)
        return ratios_T


def kind_shares(found: float, load: int, drafts: bool) -> dict[int, float]:
    """Shares of the kinds of blocks at a load of one who finds something in this share of a row's blocks.

    drafts: a model drafts for the rows that have nothing, the others are decoded plainly. Rows are independent of each other.
    """
    all_found, none_found = found**load, (1.0 - found) ** load
    mixed = max(0.0, 1.0 - all_found - none_found)
    if not drafts:
        return {PLAIN: none_found, FOUND: all_found + mixed}
    return {FOUND: all_found, DRAFTED: none_found, FOUND | DRAFTED: mixed}


def full_batch_seconds(
    target: PreTrainedModel,
    drafter: Callable[[], Drafter],
    texts: Sequence[Text],
    settings: DecodeSettings,
    load: int,
    *,
    turns: int = TURNS,
) -> FullBatch:
    """Seconds of each timed plain step, and of each block at `settings.gamma`, with `load` rows taken throughout.

    A turn decodes from `load` places in the texts, drawn anew for it, as a full server finds its requests: each somewhere
    in its response, long ones more often. Nothing ends there but by `TIMED_BLOCKS` blocks, so no row is ever free. Both
    decode from the same places, a few blocks each in turn, so that a machine that is slow for a while slows both alike; so
    both hold their caches at once. The decoder's own work is included.

    Raises:
        UserError: so many rows need more memory than is free, or the context has no room for the blocks.
    """
    endless = replace(settings, eos_ids=(), stop=(), min_tokens=0, fit_context=False)
    plain = replace(endless, gamma=0, tree=None, max_tokens=TIMED_BLOCKS)
    drafted = replace(endless, max_tokens=TIMED_BLOCKS * (settings.gamma + 1))
    context, name = context_of(target, drafter())
    room = None if context is None else context - drafted.max_tokens
    if room is not None and room < 1:
        raise UserError(
            f"the context of {context} of the {name} has no room for {TIMED_BLOCKS} blocks of {settings.gamma + 1}"
        )
    rng = np.random.default_rng(0)
    turns_of: list[tuple[list[float], list[float], list[int]]] = []
    for _ in range(turns):
        prompts = places_in(texts, load, room, rng)
        proposer = drafter()
        kinds = _kinds_of(proposer)
        streams = (_stream(target, None, prompts, plain), _stream(target, proposer, prompts, drafted))
        with contextlib.closing(streams[0]), contextlib.closing(streams[1]):
            turns_of.append(_in_turn(streams, load, kinds))
    return FullBatch(*(np.array(part) for part in zip(*turns_of, strict=True)))


def _kinds_of(drafter: Drafter) -> list[int]:
    """The kind of each block that the drafter proposes for from now on; the list grows."""
    if len(drafter.source_names) == 1 and drafter.model is not None:
        return [DRAFTED]
    kinds, propose = [PLAIN], drafter.propose
    # Of a cascade the model is the last source.
    models = len(drafter.source_names) - 1 if drafter.model is not None else len(drafter.source_names)

    def noted(ask: Ask) -> Proposal:
        proposal = propose(ask)
        by_model_S = proposal.proposers_R[ask.active_R & (proposal.real_R > 0)] >= models
        kinds.append(FOUND * bool((~by_model_S).any()) | DRAFTED * bool(by_model_S.any()))
        return proposal

    drafter.propose = noted  # type: ignore[method-assign]
    return kinds


def _in_turn(
    streams: tuple[Stream, Stream], load: int, kinds: Sequence[int]
) -> tuple[list[float], list[float], list[int]]:
    """Seconds of each timed block of both streams, and the kinds of the second's; who begins alternates."""
    seconds, of_kind = (list[float](), list[float]()), list[int]()
    for stream in streams:
        for _ in range(WARM_UP):
            _next_block(stream, load)
    for burst in range(BURSTS):
        for who in (0, 1) if burst % 2 == 0 else (1, 0):
            for _ in range(BURST):
                seconds[who].append(_next_block(streams[who], load))
                if who == 1:
                    of_kind.append(kinds[-1])
    return *seconds, of_kind


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
