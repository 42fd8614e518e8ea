"""Cost of tokens and responses with the draft and without: price of an hour / tokens of an hour. Pure: a verdict in, numbers out."""

import math
from dataclasses import dataclass

from distill.run.verdict_record import Verdict
from speculative.errors import UserError
from speculative.measure.measured import TARGET

SECONDS_AN_HOUR = 3600.0
MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Price of an hour of the devices, in any currency: with the target served alone, and with the draft."""

    alone: float
    with_draft: float

    @property
    def break_even(self) -> float:
        """The speed-up at which a token costs the same with the draft as without."""
        return self.with_draft / self.alone


@dataclass(frozen=True)
class PriceRow:
    """Cost per million tokens and per response at one number of concurrent requests, without the draft and with it. repaid_tokens: tokens
    served with the draft until the savings equal the cost of the run; None if nothing is saved or the run's time is not known.
    """

    concurrency: int
    million_alone: float
    million_with_draft: float
    response_alone: float
    response_with_draft: float
    repaid_tokens: float | None


def parse_prices(text: str) -> Prices | None:
    """The prices of `--price-per-hour 2.49` or `2.49,4.98`; None for "". Raises UserError: not one or two numbers above 0."""
    if not text:
        return None
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if not 1 <= len(prices) <= 2 or not all(price > 0 and math.isfinite(price) for price in prices):
        raise UserError(
            f"--price-per-hour {text}: give the price of an hour above 0, such as 2.49, or two prices, "
            "such as 2.49,4.98 (without and with the draft)"
        )
    return Prices(prices[0], prices[-1])


def price_rows(verdict: Verdict, prices: Prices) -> list[PriceRow]:
    """One row per measured load, one request first; empty where nothing was timed."""
    rows = list[PriceRow]()
    spent, tokens = run_hours(verdict) * prices.alone, verdict.tokens / max(1, verdict.prompts)
    for load in verdict.concurrencies:
        pair = verdict.row(TARGET, load), verdict.row(verdict.drafts[-1].way, load)
        plain, faster = (row.tokens_per_second if row else None for row in pair)
        if plain and faster:
            alone, drafted = prices.alone / SECONDS_AN_HOUR / plain, prices.with_draft / SECONDS_AN_HOUR / faster
            repaid = spent / (alone - drafted) if spent and alone > drafted else None
            rows.append(PriceRow(load, MILLION * alone, MILLION * drafted, tokens * alone, tokens * drafted, repaid))
    return rows


def run_hours(verdict: Verdict) -> float:
    """Hours of all stages, 0 where the time is not known; `train/...` are parts of one stage and are not added again."""
    return sum(seconds for stage, seconds in verdict.seconds.items() if "/" not in stage) / SECONDS_AN_HOUR
