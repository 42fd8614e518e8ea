"""What `understudy readback` says: one table, the causes, one sentence."""

from pathlib import Path

from rich.console import Console

from distill.report.screen_table import screen_table
from distill.report.serving_tables import served_lines, served_rows
from distill.run.served_record import ServedRecord
from distill.run.verdict_record import WAYS


def print_served(console: Console, record: ServedRecord, run: Path) -> None:
    """The table of served.json, its notes and causes, and whether the engine agrees."""
    table = screen_table(
        f"{run} in {record.where}: {WAYS[record.drafting]}, rule {record.rule}, gamma {record.gamma}, {record.prompts} prompts, {record.tokens:,} tokens",
        ("", "served", "replay", "run's text"),
        caption="[95 % interval]; tau without the first token of a response, which is the prefill's",
    )
    for name, served, replayed, expected in served_rows(record):
        table.add_row(name, served, replayed, expected)
    console.print(table)
    for note in record.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for cause in record.causes:
        console.print(cause, style="yellow", highlight=False, markup=False)
    for line in served_lines(record):
        console.print(line, style="green" if record.agrees else "yellow", highlight=False, markup=False)
