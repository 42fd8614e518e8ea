"""Sections on speed: every way to decode, one request at a time and under load, and latency."""

from distill.report.measured import engine_parts, load_table, stages_table, waits_table, ways_tables
from distill.report.section import Content, Piece, say, section
from distill.report.view import View


@section("numbers", "The numbers", order=10)
def numbers(view: View) -> Content:
    """The tables of ways, and how certain the gain is."""
    effects = (Piece("fine", line) for line in say("effects", view.verdict))
    return [*ways_tables(view.verdict), *effects, Piece("nav", None)]


@section("load", "Under load", order=50)
def load(view: View) -> Content:
    """The speed-up of each way at each number of concurrent requests."""
    verdict = view.verdict
    return [*say("load", verdict), load_table(verdict)] if max(verdict.concurrencies, default=1) > 1 else None


@section("engine", "In the engine", order=51)
def engine(view: View) -> Content:
    """What engine_costs.json predicts (`understudy time`)."""
    return engine_parts(view.verdict) or None


@section("latency", "Latency", order=52)
def latency(view: View) -> Content:
    """Waits for the first and for every further token, and the stages of a block, at every load."""
    rows = view.verdict.measured
    if not any(row.first_token_ms for row in rows):
        return None
    return [*say("latency"), waits_table(rows), stages_table(rows)]
