"""What `understudy traffic export` and `forget` say on the screen."""

import shutil
from pathlib import Path

from rich.console import Console

from data.traffic.exports import forget_exported, list_exports, row_id
from data.traffic.record import read_salt
from data.traffic.retention import forget
from distill.live.traffic.export import export_traffic, partial_of
from distill.live.traffic.options import ExportTrafficOptions, ForgetOptions
from speculative.errors import UserError


def export_command(options: ExportTrafficOptions, console: Console) -> None:
    """Exports, and says what was left out and why."""
    made = export_traffic(
        options.log, options.run, options.to, heldout=options.heldout, alike=options.alike, quotas=_quotas(options.quota),
        target_version=options.target_version, assume_sampling=options.assume_sampling,
    )  # fmt: skip
    lines = [f"note: {warning}" for warning in made["warnings"]]
    lines += [
        f"{made['requests']:,} requests: {made['train']:,} to train on ({made['train_tokens']:,} tokens), {made['heldout']:,} held out"
    ]
    lines += [f"  {train:,} and {held:,} of slice {name}" for name, (train, held) in made["slices"].items()]
    lines += [f"  {count:,} left out: {why}" for why, count in made["left_out"].items()]
    for line in [*lines, f"{made['folder']}: prompts/ and responses/train/, for a run as docs/traffic.md says"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _quotas(words: list[str] | None) -> dict[str, int]:
    found = {}
    for word in words or ():
        name, _, count = word.rpartition("=")
        if not count.isdecimal() or not int(count):
            raise UserError(f"--quota {word}: give a number of requests, 5000 or SLICE=5000")
        found[name] = int(count)
    return found


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
                f"{run}: was trained from it and may hold copies: delete its prompts/, responses/, signal/ and rollouts/"
            )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
