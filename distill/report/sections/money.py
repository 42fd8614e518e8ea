"""Cost of tokens and responses, if prices were given."""

from distill.report.money import Prices, price_rows, run_hours
from distill.report.section import Content, say, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View
from distill.run.verdict_record import Verdict


@section("money", "What it costs", order=55)
def money(view: View) -> Content:
    """Cost by number of concurrent requests; the cheaper way is bold."""
    if view.prices is None:
        return None
    table = money_table(view.verdict, view.prices)
    return [*money_lines(view.verdict, view.prices), *([table] if table else [])]


def money_lines(verdict: Verdict, prices: Prices) -> list[str]:
    """The assumptions of the table, and when the run is repaid."""
    return say("money", verdict, prices, price_rows(verdict, prices), run_hours(verdict))


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
