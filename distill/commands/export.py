"""`understudy export` and `understudy check-export`: the run's best draft as a directory that engines serve."""

from pathlib import Path

from distill.commands.options import CheckExportOptions, ExportOptions
from distill.config.layout import ADAPTER, RAW
from distill.config.load import load_config
from distill.export.check import outside_check
from distill.export.export import ExportReport, export_draft
from distill.report.screen import export_lines, outside_check_lines
from distill.run.folder import read_run
from speculative.errors import UserError


def export(options: ExportOptions) -> None:
    """Exports, and says what each engine takes."""
    print("\n".join(export_lines(export_run(options))))


def export_run(options: ExportOptions) -> ExportReport:
    """Writes a run's best draft, or a checkpoint's, with what the run knows of it.

    Raises:
        UserError: no such run, or see `export_draft`.
    """
    facts = dict(vars(read_run(options.run)))
    if options.quantize:
        facts["quantize"] = None if options.quantize == "none" else options.quantize
    adapter = facts["student_dir"].with_name(ADAPTER)
    if options.adapter:
        _require_adapter(adapter)
        facts["adapter"] = adapter
    return export_draft(**facts, to=options.to, dtype=options.dtype, overwrite=options.overwrite)


def _require_adapter(adapter: Path) -> None:
    averaged = (adapter.parent / RAW).exists()
    if averaged or not adapter.is_dir():
        why = "its better weights are averaged ones (optim.ema)" if averaged else "it has none"
        raise UserError(f"{adapter.parent}: --adapter: {why}; export a run of student.lora without it, from step 1 on")


def check_export(options: CheckExportOptions) -> int:
    """Prints what transformers' own assisted generation found; the exit status, 1 when it does not agree with us."""
    config = load_config(options.config, options.overrides or [])
    found = outside_check(config, options.exported, options.prompts, options.gamma)
    print("\n".join(outside_check_lines(found, options.gamma)))
    return 0 if found["equal"] == found["prompts"] and found["within_interval"] else 1
