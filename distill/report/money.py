"""What a response costs with the draft and without: price of an hour over tokens of an hour. Pure: a result in, numbers out."""

import math
from dataclasses import dataclass

from distill.report.tables import NOTHING, Cell, Table, times
from distill.report.text_tables import Section
from distill.run.result import Result
from speculative.errors import UserError

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
    rates = [(row.concurrency, row.plain_tokens_per_second, row.tokens_per_second) for row in verdict.load]
    alone, drafted = verdict.target_tokens_per_second, verdict.best.tokens_per_second
    if alone and drafted:
        # Load 1 was timed again without prefill: what includes it stands for one request at a time.
        rates = [(1, alone, drafted), *(rate for rate in rates if rate[0] > 1)]
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


def money_lines(result: Result, prices: Prices) -> list[str]:
    """What the table takes for granted, and where it breaks even."""
    rows = price_rows(result, prices)
    if not rows:
        return ["Nothing was timed here, so there is no price of a token."]
    same = prices.alone == prices.with_draft
    lines = [
        f"An hour costs {prices.alone:g}" + ("" if same else f", with the draft {prices.with_draft:g}") + ". The draft breaks even at "
        f"{times(prices.break_even)} the speed; a response has {result.verdict.tokens / max(1, result.verdict.prompts):.0f} tokens "
        "on average. No request is counted as waiting: an hour is an hour of full work."
    ]  # fmt: skip
    spent = run_price(result, prices)
    if not spent:
        return lines
    first = rows[0]
    start = f"The run took {run_hours(result):.2f} hours, {spent:.2f} at that price"
    if first.repaid_tokens is None:
        return [
            *lines,
            f"{start}; it is never repaid at {_requests(first.concurrency)}: a token costs no less with the draft.",
        ]
    return [*lines, f"{start}; it is repaid after {first.repaid_tokens:,.0f} tokens at {_requests(first.concurrency)}."]


def money_section(result: Result, prices: Prices) -> Section:
    """The part of the report that prices were given for."""
    rows = price_rows(result, prices)
    return Section("money", "What it costs", money_lines(result, prices), [money_table(rows)] if rows else [])


def money_table(rows: list[PriceRow]) -> Table:
    """Money by number of concurrent requests."""
    columns = (
        "concurrent requests",
        "a million tokens, alone",
        "with the draft",
        "a response, alone",
        "with the draft",
        "repaid after",
    )
    cells = [
        [
            Cell(str(row.concurrency)),
            *_pair(row.million_alone, row.million_with_draft),
            *_pair(row.response_alone, row.response_with_draft),
            Cell(f"{row.repaid_tokens:,.0f} tokens" if row.repaid_tokens is not None else NOTHING),
        ]
        for row in rows
    ]  # fmt: skip
    return Table(columns, cells)


def _pair(alone: float, with_draft: float) -> list[Cell]:
    """The cheaper one is bold."""
    return [Cell(_amount(alone), strong=alone < with_draft), Cell(_amount(with_draft), strong=with_draft < alone)]


def _amount(money: float) -> str:
    return f"{money:.2f}" if money >= 1 else f"{money:.3g}"


def _requests(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency} requests at once"
