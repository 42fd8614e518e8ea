"""`understudy show`: a finished run on the screen, with some decoded prompts, or as a page."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from distill.commands.options import ShowRunOptions
from distill.config.layout import CONFIG, EXPORT, best_student
from distill.config.load import load_trusted
from distill.report.money import Prices, parse_prices
from distill.report.page import write_page
from distill.report.screen import last_screen, marked_completion, print_money
from distill.run.session import open_pair
from distill.run.verdict_record import Verdict, load_verdict
from speculative.decode import decode
from speculative.drafters.draft import Draft

SHOWN_PROMPTS = 3


def show(options: ShowRunOptions) -> None:
    """Print the verdict, or write the page of a result and print its name.

    Raises UserError: as `show_run` and `write_page`, and for invalid prices.
    """
    prices = parse_prices(options.price_per_hour)
    if options.page is not None:
        print(write_page(options.run, options.page, prices))
    else:
        show_run(options.run, options.trust_remote_code, prices)


def show_run(run: Path, trusted: bool = False, prices: Prices | None = None) -> None:
    """Print the verdict of a finished run, some completions and the next commands.

    Raises UserError: the run is not finished, or its target is missing.
    """
    verdict, console = load_verdict(run), Console()
    # Without the target's weights nothing can be decoded.
    completions = held_out_completions(run, verdict, trusted) if verdict.costs else []
    last_screen(console, run, verdict, completions, run / EXPORT if (run / EXPORT).exists() else None)
    if prices is not None:
        print_money(console, verdict, prices)


def held_out_completions(run: Path, verdict: Verdict, trusted: bool) -> list[Panel]:
    """Completions of the first held-out prompts with the best draft, with accepted tokens marked.

    Raises UserError: the run is not finished, or its target is missing.
    """
    config = load_trusted(run / CONFIG, trusted)
    with open_pair(config, str(best_student(run)), config.judge.prompts) as pair:
        settings = replace(pair.settings.under(config.judge_rule, config.judge.gamma), seed=config.seed + 2)
        drafter = Draft(pair.draft, verdict.drafts[-1].drafting).drafter()
        responses, _ = decode(pair.model, drafter, pair.keyed[:SHOWN_PROMPTS], settings)
    return [marked_completion(pair.target.tokenizer, response) for response in responses]
