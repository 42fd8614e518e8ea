"""Speed-ups of every way of decoding by domain and by how repetitive the response is.

Shapes: N responses, P prompts (the resampling unit), C ways to decode, S slices of a dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from speculative.explain.repetition import repeats
from speculative.explain.slices import SlicedText
from speculative.measure.effects import CONFIDENCE, fewest_prompts
from speculative.measure.intervals import Interval, intervals_of_sums, sum_by_prompt
from speculative.measure.measured import TARGET
from speculative.measure.record import Record, Text


class WhereRow(Record):
    """Pooled speed-ups of every way over the target alone, on a part of the text."""

    dimension: Text = Field(description="`domain`, or `repetition`: thirds of the responses by repeated share")
    name: Text = Field(description="name of the slice")
    tokens: int = Field(description="tokens in the slice")
    prompts: int = Field(description="prompts in the slice")
    repeated: float | None = Field(None, description="share of its tokens inside a sequence of 8 that occurred earlier")
    looping: float | None = Field(None, description="share of its tokens in a loop")
    speed_up: dict[str, float] = Field(description="speed-up by way")
    speed_up_ci: dict[str, Interval | None] = Field({}, description="95 % interval by way, not corrected for rows")
    best: str | None = Field(None, description="the fastest way; `target alone`: no way is faster")
    certain: bool | None = Field(None, description="whether it is certainly faster than all others, over all rows")


def where_each_helps(texts: Sequence[SlicedText], steps: Mapping[str, Sequence[float] | np.ndarray]) -> list[WhereRow]:
    """Speed-ups over the target alone of several ways to decode, by domain and by how much a response repeats (`repetition.repeats`); each
    dimension's rows partition the responses that have a token.

    steps: by way, the seconds that each response takes, over the seconds of one plain step of the target (`race.Standings.steps_N`); of
    the target alone one a token where they are not given. Intervals are None for a single prompt. The fastest way is certain where it
    leads every other one in paired resamples of the prompts, in all rows of the dimension together (Bonferroni). Raises ValueError for a
    way that was not given one number a response.
    """
    found = repeats(texts)
    columns = {name: np.asarray(own, dtype=np.float64) for name, own in steps.items() if name != TARGET}
    columns[TARGET] = np.asarray(steps.get(TARGET, found.tokens_N), dtype=np.float64)
    for name, own in columns.items():
        if own.shape != found.tokens_N.shape:
            raise ValueError(f"{name!r} has {own.size} numbers for {len(texts)} responses")
    said: list[int] = np.flatnonzero(found.tokens_N > 0).tolist()
    if not said:
        return []
    domains = sorted({texts[row].domain for row in said})
    slices: dict[str, list[tuple[str, list[int]]]] = {
        "domain": [(name, [row for row in said if texts[row].domain == name]) for name in domains],
        "repetition": _thirds(said, (found.repeated_N[said] / found.tokens_N[said])),
    }
    told = []
    for dimension, parts in slices.items():
        for part, rows in parts:
            keys, inside = [texts[row].prompt for row in rows], {name: column[rows] for name, column in columns.items()}
            tokens = int(found.tokens_N[rows].sum())
            speeds, intervals, best, certain = _compared(keys, inside, len(parts))
            told.append(
                WhereRow(
                    dimension=dimension, name=part, tokens=tokens, prompts=len(set(keys)),
                    repeated=float(found.repeated_N[rows].sum() / tokens), looping=float(found.looping_N[rows].sum() / tokens),
                    speed_up=speeds, speed_up_ci=intervals, best=best, certain=certain,
                )
            )  # fmt: skip
    return told


def _thirds(rows: list[int], shares_R: np.ndarray) -> list[tuple[str, list[int]]]:
    """Responses by their repeated share: lowest, middle and highest third, fewer where many are equal."""
    low, high = np.quantile(shares_R, [1 / 3, 2 / 3], method="inverted_cdf")
    thirds_R = (shares_R > low).astype(int) + (shares_R > high)
    edges = (f"up to {100 * low:.0f}", f"up to {100 * high:.0f}", f"more than {100 * high:.0f}")
    places = (np.flatnonzero(thirds_R == at).tolist() for at in range(len(edges)))
    parts = [(f"{edge} % repeated", [rows[place] for place in own]) for edge, own in zip(edges, places, strict=True)]
    return [(name, inside) for name, inside in parts if inside]


def _compared(
    prompt_keys: Sequence[Any], columns: Mapping[str, np.ndarray], parts: int
) -> tuple[dict[str, float], dict[str, Interval | None], str, bool]:
    """Speed-ups of one slice, their intervals, which way is fastest and whether for certain; columns: steps (N,), the target's last."""
    names = list(columns)
    sums_PC = np.stack([sum_by_prompt(prompt_keys, columns[name]) for name in names], 1)
    prompts, others = len(sums_PC), len(names) - 1

    def speeds_of(sums_C: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return sums_C[..., -1:] / sums_C[..., :-1]

    speeds = dict(zip(names, [*speeds_of(sums_PC.sum(0)).tolist(), 1.0], strict=True))
    best = max(reversed(names), key=speeds.__getitem__)  # of equals the target alone
    place = names.index(best)

    def leads_of(sums_C: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            all_speeds = sums_C[..., -1:] / sums_C
        return all_speeds[..., place : place + 1] - np.delete(all_speeds, place, axis=-1)

    corrected = 1.0 - (1.0 - CONFIDENCE) / max(1, parts * others)
    enough = others > 0 and prompts >= fewest_prompts(corrected)
    certain = enough and all(low > 0.0 for low, _ in intervals_of_sums(sums_PC, leads_of, corrected))
    intervals = [*intervals_of_sums(sums_PC, speeds_of, CONFIDENCE)] if prompts > 1 else [None] * others
    by_way = {name: speeds[name] for name in names[:-1]}
    return by_way, dict(zip(names[:-1], intervals, strict=True)), best, bool(certain)
