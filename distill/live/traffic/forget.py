"""`understudy traffic forget`: requests removed from a log and from what was exported of it."""

import shutil
from pathlib import Path

from rich.console import Console

from distill.live.traffic.exported import forget_exported, list_exports, partial_of, row_id
from distill.live.traffic.options import ForgetOptions
from distill.live.traffic.record import read_salt
from distill.live.traffic.retention import forget


def forget_command(options: ForgetOptions, console: Console) -> None:
    """Forgets in the log and in its exports that are still there, and says where else rows may lie.

    Raises:
        UserError: no log there; a file that is damaged or cannot be written.
    """
    salt = read_salt(options.log)
    lines = [
        f"{options.log}: {forget(options.log, options.ids):,} lines removed; a keyed hash of each id is kept, and nothing else"
    ]
    rows = {row_id(salt, one) for one in options.ids}
    for export in list_exports(options.log):
        folder = Path(export.folder)
        shutil.rmtree(partial_of(folder), ignore_errors=True)  # of an export that was killed
        lines += [f"{folder}: an export that is no longer there: if it was moved or copied, delete it there"]
        if folder.is_dir():
            found = forget_exported(folder, rows)
            lines[-1] = (
                f"{folder}: {found} rows removed, prompts and responses" if found else f"{folder}: held nothing of it"
            )
        for run in filter(Path.exists, map(Path, export.uses)):
            lines.append(
                f"{run}: was trained from it and may hold copies: delete its prompts/, responses/ and rollouts/, and with held-out "
                "prompts also report.*, result.json and proposals.parquet; its drafts work without"
            )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
