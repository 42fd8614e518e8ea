"""Section on a serving engine: its measurements compared with replay (`understudy readback`)."""

import itertools

from distill.report.measured import waits_table
from distill.report.section import Content, say, section
from distill.report.table import Cell, Column, Table
from distill.report.view import View
from distill.run.readback_record import ReadbackRecord


@section("readback", "Measured in an engine", order=45)
def readback(view: View) -> Content:
    """The content of readback.json in the run's folder."""
    record = view.result.readback
    if record is None:
        return None
    return [*readback_lines(record), *record.causes, *record.notes, *readback_tables(record)]


def readback_tables(record: ReadbackRecord) -> list[Table]:
    """Served figures, replay of the served text and replay of the run's own text, then survival by position."""
    served, replay, expected = record.served, record.replay, record.expected
    figures = Table(
        [
            "",
            Column("tau", ".2f"),
            Column("accepted/drafted", ".3f"),
            Column("tokens/s", ".1f"),
            Column("response, s", ".3g"),
            Column("speed-up", ".2f", "x"),
        ]
    )
    figures.add(
        "served",
        Cell(served.tau, served.tau_ci),
        served.accepted_per_drafted,
        Cell(served.tokens_per_second, record.tokens_per_second_ci),
        Cell(record.latency, record.latency_ci),
        Cell(served.speed_up, served.speed_up_ci),
    )
    if replay is not None and expected is not None:
        figures.add("replay", replay.tau, replay.accepted_per_drafted, "", "", "")
        figures.add("run's text", Cell(expected.tau, expected.tau_ci), "", "", "", "")
    places = len(record.survival.get("served", record.survival.get("replay", [])))
    survival = Table(["survival of the first", *(Column(str(place + 1), ".3f") for place in range(places))])
    ends = {"served": record.survival_ci or []}
    for name in ("served", "replay"):
        if shares := record.survival.get(name, [])[:places]:
            cells = itertools.zip_longest(shares, ends.get(name, []))
            survival.add(name, *(Cell(*cell) for cell in cells), *[None] * (places - len(shares)))
    tables = [figures, survival, waits_table(record.measured), speed_table(record)]
    return [table for table in tables if table.cells]


def speed_table(record: ReadbackRecord) -> Table:
    """The predicted and the served speed-up at each load, and the difference; empty without --speed."""
    shares = [Column(name, "+.0%") for name in ("difference", "of tau", "of steps")]
    speeds = Column("predicted", ".2f", "x"), Column("served", ".2f", "x")
    table = Table([Column("load", "d"), Column("gamma", "d"), *speeds, *shares, "within 10 %"])
    for row in record.speed:
        table.add(
            row.predicted.concurrency,
            row.predicted.gamma,
            *(Cell(timed.speed_up, timed.speed_up_ci) for timed in (row.predicted, row.served)),
            row.difference,
            row.of_tau,
            row.of_costs,
            Cell("yes" if row.holds else "no", note="; ".join(row.causes)),
        )
    return table


def readback_lines(record: ReadbackRecord) -> list[str]:
    """Whether the engine's counts agree with replay, and its texts."""
    return say("readback", record)
