"""`understudy export` and `understudy check-export`: the run's best draft as a directory that engines serve."""

from distill.commands.options import CheckExportOptions, ExportOptions
from distill.config.load import load_config
from distill.export.check import outside_check
from distill.export.export import ExportReport, export_draft
from distill.report.screen import outside_check_lines
from distill.run.folder import read_run


def export_run(options: ExportOptions) -> ExportReport:
    """Writes a run's best draft, or a checkpoint's, with what the run knows of it.

    Raises:
        UserError: no such run, or see `export_draft`.
    """
    facts = dict(vars(read_run(options.run)))
    if options.quantize:
        facts["quantize"] = None if options.quantize == "none" else options.quantize
    return export_draft(**facts, to=options.to, dtype=options.dtype, overwrite=options.overwrite)


def check_export(options: CheckExportOptions) -> int:
    """Prints what transformers' own assisted generation found; the exit status, 1 when it does not agree with us."""
    config = load_config(options.config, options.overrides or [])
    found = outside_check(config, options.exported, options.prompts, options.gamma)
    print("\n".join(outside_check_lines(found, options.gamma)))
    return 0 if found["equal"] == found["prompts"] and found["within_interval"] else 1
