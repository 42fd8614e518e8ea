"""`understudy show` and `understudy report`: print a finished run with some decoded prompts, or write it as a page."""

import json
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

from distill.commands.options import ReportOptions, ShowRunOptions
from distill.config.layout import CONFIG, EXPORT, PROMPTS, SYNTHETIC, best_student
from distill.config.load import load_trusted
from distill.export.hub.profile import SpeculationProfile, profile_of, read_profile
from distill.report.money import parse_prices
from distill.report.page import given_times, report_command
from distill.report.screen import last_screen, marked_completion, print_money
from distill.report.table import Column, Table
from distill.run.responses import synthetic_line
from distill.run.session import open_pair
from distill.run.verdict_record import Verdict, load_verdict
from speculative.decode import decode
from speculative.drafters.draft import Draft


def show(options: ShowRunOptions) -> None:
    """Run `show_run`; with a profile, print it beside the run's own instead. Raises UserError as they do."""
    if options.profile is None:
        show_run(options.run, options.trust_remote_code)
        return
    verdict, other = load_verdict(options.run), read_profile(options.profile)
    Console().print(profiles_table(profile_of(verdict, verdict.gamma, "", "", []), other, options.profile.name))


def profiles_table(own: SpeculationProfile, other: SpeculationProfile, name: str) -> Table:
    """Rates of two drafts by position, then mean tokens of a block, over all and by domain."""
    told = [other.method or "method not recorded", *([] if other.measured else ["not measured"])]
    told += [f"{key} {value}" for key, value in (other.measurement_conditions or {}).items() if value is not None]
    columns = [Column(f"{rate}{of}", ".3f") for of in ("", ", other") for rate in ("conditional", "marginal")]
    table = Table(
        ["position", *columns], title="The run's draft and another", caption=f"other: {name}, {', '.join(told)}"
    )
    rates = [rates or [] for one in (own, other) for rates in (one.conditional_accept_rates, one.marginal_accept_rates)]
    for place, row in enumerate(zip_longest(*rates), start=1):
        table.add(str(place), *row)
    for domain in ["", *sorted({**(own.per_category or {}), **(other.per_category or {})})]:
        sides = [(one.per_category or {}).get(domain) if domain else one for one in (own, other)]
        means = [one and one.mean_accept_length for one in sides]
        table.add("tokens per block" + (f", {domain}" if domain else ""), None, means[0], None, means[1])
    return table


def show_run(run: Path, trusted: bool = False) -> None:
    """Print the verdict of a finished run, some completions and the next commands.

    Raises UserError: the run is not finished, or its target is missing.
    """
    verdict, synthetic = load_verdict(run), run / PROMPTS / f"{SYNTHETIC}.json"
    if synthetic.exists():
        made = json.loads(synthetic.read_text(encoding="utf-8"))
        Console().print(synthetic_line(made["method"], made["counts"]))
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
