"""What `understudy readback` says: one table, the causes, one sentence."""

from pathlib import Path

from rich.console import Console

from distill.report.sections.served import served_lines, served_tables
from distill.run.served_record import ServedRecord
from distill.run.verdict_record import WAYS


def print_served(console: Console, record: ServedRecord, run: Path) -> None:
    """The table of served.json, its notes and causes, and whether the engine agrees."""
    own = record.served
    title = f"{run} in {record.where}: {WAYS[record.drafting]}, rule {own.rule}, gamma {own.gamma}"
    console.print(f"{title}, {own.prompts} prompts, {own.tokens:,} tokens", highlight=False, markup=False)
    for table in served_tables(record):
        console.print(table)
    console.print("tau without the first token of a response, which is the prefill's; [95 % interval]", markup=False)
    for note in record.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for cause in record.causes:
        console.print(cause, style="yellow", highlight=False, markup=False)
    for line in served_lines(record):
        console.print(line, style="green" if record.agrees else "yellow", highlight=False, markup=False)
