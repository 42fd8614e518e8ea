"""What a response costs with the draft and without: price of an hour over tokens of an hour. Pure: a result in, numbers out."""

import math
from dataclasses import dataclass

from distill.run.result import Result
from speculative.errors import UserError
from speculative.measure.measured import TARGET

SECONDS_AN_HOUR = 3600.0
MILLION = 1e6


@dataclass(frozen=True)
class Prices:
    """Of an hour of the device (or devices), in any currency: while the target is served alone, and with the draft."""

    alone: float
    with_draft: float

    @property
    def break_even(self) -> float:
        """The speed-up at which a token costs the same with the draft as without."""
        return self.with_draft / self.alone


@dataclass(frozen=True)
class PriceRow:
    """At one number of concurrent requests: money per million tokens and per response, without the draft and with it.

    repaid_tokens: after how many tokens served with the draft the run is paid for by what they cost less; None where they
    cost no less, or the run's time is not known.
    """

    concurrency: int
    million_alone: float
    million_with_draft: float
    response_alone: float
    response_with_draft: float
    repaid_tokens: float | None


def parse_prices(text: str) -> Prices | None:
    """The prices of `--price-per-hour 2.49` or `2.49,4.98`; None for "".

    Raises:
        UserError: not one or two numbers above 0.
    """
    if not text:
        return None
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if not 1 <= len(prices) <= 2 or not all(price > 0 and math.isfinite(price) for price in prices):
        raise UserError(
            f"--price-per-hour {text}: give the price of an hour such as 2.49, or two such as 2.49,4.98 "
            "(without and with the draft), above 0"
        )
    return Prices(prices[0], prices[-1])


def price_rows(result: Result, prices: Prices) -> list[PriceRow]:
    """One request at a time, then every measured load; nothing where nothing was timed."""
    verdict = result.verdict
    pairs = [
        (load, verdict.row(TARGET, load), verdict.row(verdict.drafts[-1].way, load)) for load in verdict.concurrencies
    ]
    rates = [
        (load, alone.tokens_per_second, drafted.tokens_per_second)
        for load, alone, drafted in pairs
        if alone and drafted and alone.tokens_per_second and drafted.tokens_per_second
    ]
    spent, tokens = run_price(result, prices), verdict.tokens / max(1, verdict.prompts)
    rows = []
    for concurrency, plain, faster in rates:
        token_alone = prices.alone / SECONDS_AN_HOUR / plain
        token_with_draft = prices.with_draft / SECONDS_AN_HOUR / faster
        saved = token_alone - token_with_draft
        rows.append(
            PriceRow(
                concurrency=concurrency,
                million_alone=MILLION * token_alone,
                million_with_draft=MILLION * token_with_draft,
                response_alone=tokens * token_alone,
                response_with_draft=tokens * token_with_draft,
                repaid_tokens=spent / saved if spent and saved > 0 else None,
            )
        )
    return rows


def run_price(result: Result, prices: Prices) -> float:
    """What the run's own time cost at the price without a draft; 0 where it is not known."""
    return run_hours(result) * prices.alone


def run_hours(result: Result) -> float:
    """Of all stages; `train/...` are parts of one."""
    return sum(seconds for stage, seconds in result.verdict.seconds.items() if "/" not in stage) / SECONDS_AN_HOUR
