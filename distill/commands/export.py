"""`understudy export`: write the best draft for engines, or check an export in transformers. And `understudy check-pair`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from distill.commands.options import ExportOptions
from distill.commands.output import check_known
from distill.commands.serve import read_export
from distill.config.command_line import CheckPairOptions
from distill.config.layout import ADAPTER, CONFIG, run_of
from distill.config.load import load_trusted
from distill.engines.protocol.engine import known_engines
from distill.export.check import outside_check
from distill.export.export import ExportReport, export_draft
from distill.export.facts import read_run
from distill.export.hub import check_repository, upload, write_responses
from distill.export.pair import check_pair
from distill.run.session import open_pair
from speculative.errors import UserError
from speculative.progress import phase

CHECKED_PROMPTS = 20  # held-out prompts that --check decodes


def export(options: ExportOptions) -> int:
    """Export, print which engines support the pair, and upload what was requested; or check an export. Return the exit status.

    Raises UserError: a repository's name, the login or the hub; see also `export_run` and `check_export`.
    """
    if options.check is not None:
        return check_export(options, options.check)
    repositories = {"--push": options.push, "--push-dataset": options.push_dataset}
    repositories = {option: repository for option, repository in repositories.items() if repository}
    for option, repository in repositories.items():
        check_repository(option, repository)
    report = export_run(options)
    print("\n".join(export_lines(report)))
    # Both are complete before the first is public.
    folders = {"--push": report.path}
    if options.push_dataset:
        folders["--push-dataset"] = write_responses(options.run)
    for option, repository in repositories.items():
        kind: Any = "model" if option == "--push" else "dataset"
        print(upload(option, repository, folders[option], kind))
    return 0


def export_run(options: ExportOptions) -> ExportReport:
    """Export a run's best draft, or one checkpoint, with the run's measurements.

    Raises UserError: no --to; there is no such run; see also `export_draft`.
    """
    if options.to is None:
        raise UserError("export: give --to DIR to write an export, or --check DIR to check one")
    facts = read_run(options.run, options.trust_remote_code)
    if options.quantize:
        quantize: Any = None if options.quantize == "none" else options.quantize
        facts = replace(facts, quantize=quantize)
    adapter = facts.student_dir.with_name(ADAPTER) if options.adapter else None
    if adapter is not None and not adapter.is_dir():
        raise UserError(
            f"{adapter.parent}: --adapter: it has no adapter; export a checkpoint of a run with student.lora"
        )
    with phase("exporting"):
        return export_draft(facts, options.to, dtype=options.dtype, overwrite=options.overwrite, adapter=adapter)


def check_export(options: ExportOptions, exported: Path) -> int:
    """Print the comparison with transformers' assisted generation, at the exported gamma; return 1 if it disagrees, else 0.

    Raises UserError: no run, or no export in ``exported``.
    """
    run = run_of(options.run)
    if run is None:
        raise UserError(f"{options.run}: no run (a directory with config.yaml); --check needs its held-out prompts")
    config = load_trusted(run / CONFIG, options.trust_remote_code)
    gamma = read_export(exported)[1].gamma
    with open_pair(config, str(exported), CHECKED_PROMPTS) as pair:
        compared = outside_check(pair, exported, gamma)
    where = config.target
    broken, notes = check_pair(where.path, str(exported), trusted=where.trust_remote_code, revision=where.revision)
    theirs, (low, high) = compared.theirs, compared.tau_ci
    lines = [f"same greedy tokens as the target alone on {sum(theirs.equal_N)} of {len(theirs.equal_N)} prompts"]
    lines += [f"first difference: {theirs.first_difference}"] if theirs.first_difference else []
    lines.append(
        f"tau at gamma {gamma}: transformers {theirs.tau:.3f}, ours {compared.tau:.3f} [{low:.3f}, {high:.3f}]"
    )
    print(*lines, *broken, *notes, sep="\n")
    return 0 if compared.agrees else 1


def check_pair_command(options: CheckPairOptions) -> int:
    """Print what is wrong with the files of a pair; return 1 if something breaks serving, else 0."""
    known = {name.lower(): name for name in known_engines()}
    if options.engine:
        check_known("--engine", options.engine.lower(), tuple(known))
    engines = [known[options.engine.lower()]] if options.engine else list(known.values())
    parallel, trusted = options.tensor_parallel, options.trust_remote_code
    broken, notes = check_pair(
        options.target, options.draft, options.gguf or [], engines=engines, tensor_parallel=parallel, trusted=trusted
    )
    checked = ", ".join(f"{name} {known_engines()[name].version}" for name in engines)
    print(*broken, *notes, f"findings that break serving: {len(broken)}, notes: {len(notes)} ({checked})", sep="\n")
    return 1 if broken else 0


def export_lines(report: ExportReport) -> list[str]:
    """Return lines that say what was written, what was checked, and which engines support the pair."""
    lines = [
        f"{report.path}: {report.parameters:,} parameters in {report.dtype}, vocabulary: {report.vocabulary.detail}"
    ]
    lines.extend(f"checked: {check}" for check in report.checks)
    for engine in report.engines:
        told = "supports this pair" if engine.ok else f"refuses this pair: {'; '.join(engine.reasons)}"
        lines.append(f"{engine.engine:<14} {told}")
        lines.extend(f"warning: {engine.engine} {engine.version}: {warning}" for warning in engine.warnings)
    lines.extend(f"warning: {warning}" for warning in report.warnings)
    lines.append(f"how to serve it: {report.path / 'SERVING.md'}")
    return lines
