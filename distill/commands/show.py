"""`understudy show` and `understudy report`: print a finished run with some decoded prompts, or write it as a page."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from distill.commands.options import ReportOptions, ShowRunOptions
from distill.config.layout import CONFIG, EXPORT, best_student
from distill.config.load import load_trusted
from distill.report.money import parse_prices
from distill.report.page import given_times, report_command
from distill.report.screen import last_screen, marked_completion, print_money
from distill.run.session import open_pair
from distill.run.verdict_record import Verdict, load_verdict
from speculative.decode import decode
from speculative.drafters.draft import Draft


def show(options: ShowRunOptions) -> None:
    """Run `show_run`. Raises UserError as it does."""
    show_run(options.run, options.trust_remote_code)


def show_run(run: Path, trusted: bool = False) -> None:
    """Print the verdict of a finished run, some completions and the next commands.

    Raises UserError: the run is not finished, or its target is missing.
    """
    verdict = load_verdict(run)
    # Without the target's weights nothing can be decoded.
    shown = held_out_completions(run, 3, verdict, trusted) if verdict.run else []
    last_screen(Console(), run, verdict, shown, run / EXPORT if (run / EXPORT).exists() else None)


def held_out_completions(run: Path, count: int, verdict: Verdict, trusted: bool) -> list[Panel]:
    """Completions of the first held-out prompts with the best draft, with accepted tokens marked.

    Raises UserError: the run is not finished, or its target is missing.
    """
    config = load_trusted(run / CONFIG, trusted)
    pair = open_pair(config, str(best_student(run)), config.judge.prompts)
    settings = replace(pair.settings.under(config.judge_rule, config.judge.gamma), seed=config.seed + 2)
    drafter = Draft(pair.draft, verdict.drafts[-1].drafting).drafter()
    responses, _ = decode(pair.target.model, drafter, pair.keyed[:count], settings)
    return [marked_completion(pair.target.tokenizer, response) for response in responses]


def report(options: ReportOptions) -> None:
    """Write the page and print the names of its files.

    Raises UserError: no result, invalid times or prices, a file that cannot be written.
    """
    prices = parse_prices(options.price_per_hour)
    files = report_command(options.run, options.to, given_times(options.t_target, options.t_draft), prices)
    if prices is not None:
        print_money(Console(), files.result, prices)
    print(f"{files.html}\n{files.summary}")
