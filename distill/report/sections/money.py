"""Cost of tokens and responses, if prices were given."""

from distill.report.money import Prices, price_rows, run_hours, run_price
from distill.report.section import Content, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View
from distill.run.verdict_record import Verdict


@section("money", "What it costs", order=55)
def money(view: View) -> Content:
    """Cost by number of concurrent requests; the cheaper way is bold."""
    if view.prices is None:
        return None
    return [
        *money_lines(view.verdict, view.prices),
        *([table] if (table := money_table(view.verdict, view.prices)) else []),
    ]


def money_lines(verdict: Verdict, prices: Prices) -> list[str]:
    """The assumptions of the table, and the break-even speed-up."""
    rows = price_rows(verdict, prices)
    if not rows:
        return ["Nothing was timed here, so the cost of a token is not known."]
    same = prices.alone == prices.with_draft
    lines = [
        f"An hour costs {prices.alone:g}"
        + ("" if same else f", with the draft {prices.with_draft:g}")
        + ". The draft breaks even at "
        f"{prices.break_even:.2f}x. A response has {verdict.tokens / max(1, verdict.prompts):.0f} tokens "
        "on average. Idle time is not counted."
    ]
    spent, first = run_price(verdict, prices), rows[0]
    if spent:
        requests = "one request at a time" if first.concurrency == 1 else f"{first.concurrency} requests at once"
        repaid = (
            f"It is never repaid at {requests}, because a token costs no less with the draft"
            if first.repaid_tokens is None
            else f"It is repaid after {first.repaid_tokens:,.0f} tokens at {requests}"
        )
        lines.append(f"The run took {run_hours(verdict):.2f} hours and cost {spent:.2f} at that price. {repaid}.")
    return lines


def money_table(verdict: Verdict, prices: Prices) -> Table | None:
    """Cost by number of concurrent requests; None where nothing was timed."""
    rows = price_rows(verdict, prices)
    table = Table(
        [
            Column("concurrent requests", ","),
            Column("a million tokens, alone", ",.2f"),
            Column("with the draft", ",.2f"),
            Column("a response, alone", ".3g"),
            Column("with the draft", ".3g"),
            Column("repaid after, tokens", ",.0f"),
        ]
    )
    for row in rows:
        pairs = ((row.million_alone, row.million_with_draft), (row.response_alone, row.response_with_draft))
        cells = [Cell(own, strong=own < other) for pair in pairs for own, other in (pair, pair[::-1])]
        table.add(row.concurrency, *cells, row.repaid_tokens)
    return table if rows else None
