"""The screen of a probe: a sentence for each draft and one for all, and their tables."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.text import Text

from distill.commands.probe.plan import Plan
from distill.commands.probe.result import Probe, draft_sentence
from distill.report.measured import timed_table
from distill.report.table import NOTHING, Cell, Column, Table
from speculative.explain.ceilings import Price
from speculative.measure.effects import too_few
from speculative.measure.intervals import interval
from speculative.measure.measured import TARGET
from speculative.progress import phase

NOISY = 1.4  # Of a quiet machine; rules alone differ by up to 1.15 in a target step.


class Stages:
    """Show each stage while it runs, print its seconds and record them."""

    def __init__(self, console: Console | None) -> None:
        self.console, self.seconds = console, dict[str, float]()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with phase(name):
                yield
        finally:
            self.seconds[name] = round(time.perf_counter() - began, 2)
            if self.console is not None:
                self.console.print(f"{name}: {self.seconds[name]:.1f} s", highlight=False)


def assumptions(plan: Plan) -> list[str]:
    if plan.given is None:
        return [
            f"times are measured on this machine, {torch.get_num_threads()} threads, at a context of {plan.context} tokens, and "
            "interpolated between measured gammas"
        ]
    if plan.engine is not None:
        return [
            f"times are those of {plan.engine.engine}, without prefill, and the same for every draft and rule; gammas and "
            "batch sizes are those that it was timed at, so --gammas and --batch-sizes are not used"
        ]
    verify = plan.given.verify_seconds[1]
    free = "no verify call is given, so it is assumed to cost one target step (v = 1); that favours large gammas"
    return [
        "times are given, not measured, and the same for every draft and rule",
        f"a verify call takes {1e3 * verify:g} ms at every gamma" if verify > plan.given.target_seconds else free,
    ]


def busy_machine(seconds: Sequence[float]) -> list[str]:
    """A note if timings of the same target step differ a lot, because speed-ups are unreliable then."""
    if not seconds or max(seconds) < NOISY * min(seconds):
        return []
    return [
        f"one target step took between {1e3 * min(seconds):.1f} and {1e3 * max(seconds):.1f} ms: the machine is busy, so "
        "speed-ups are rough; probe again when it is idle"
    ]


def print_probe(console: Console, result: Probe) -> None:
    """Print the tables of a probe, then the sentences, so that they stay on the screen."""
    for probed in result.drafts:
        if probed.refused is not None:
            console.print(Text(f"{probed.name}: refused: {probed.refused}", style="yellow"))
    console.print(prices_table(result))
    for table in outlook_tables(result):
        console.print(table)
    for line in probe_lines(result):
        console.print(Text(line, style="bold green" if line.startswith("Verdict: ") and result.go else ""))


def probe_lines(result: Probe) -> list[str]:
    """The probe in sentences: the checks, prompt lookup, the ceilings, each draft's verdict, and the overall verdict last."""
    settings, checks = result.settings, result.checks
    texts = ", ".join(f"{about.tokens:,} tokens at {about.text}" for about in result.texts)
    lines = [
        f"self-check: the target as its own draft has alpha {checks['alpha_live']:.4f}; speculative greedy text equals "
        f"plain greedy text on {checks['greedy_equal']} of {checks['prompts']} prompts"
        + (f" ({len(checks['near_ties'])} near-ties)" if checks["near_ties"] else ""),
        *(f"warning: {words}" for words in checks["warnings"]),
        f"text: {settings.prompts} prompts, {texts}",
        *(f"assumption: {words}" for words in result.assumptions),
        *(f"note: {note}" for note in result.notes),
        *([] if result.memory is None else result.memory.lines()),
    ]
    for about, lookup in zip(result.texts, result.lookups, strict=True):
        gives = f"{lookup.speed_up:.2f}x at gamma {lookup.gamma}" if lookup.gamma else "no speed-up"
        lines += [
            f"at {about.text} {about.repeated:.0%} of the target's tokens repeat a sequence of 8 or more, "
            f"{about.looping:.0%} are in a loop",
            *([f"note: {about.warning}"] if about.warning else []),
            f"prompt lookup at {about.text}: {gives} (proposes at {about.proposes:.0%} of the tokens, right at {about.hits:.0%})",
        ]
        if about.greedy_alpha is not None:
            lines.append(
                f"a draft that proposes its argmax can reach at most alpha {about.greedy_alpha:.3f} {interval(about.greedy_alpha_ci)} "
                f"at {about.text}, the mean of the target's largest probability"
            )
    baseline = next(row.speed_up or 1.0 for row in result.lookups if row.text == settings.lead_text)
    for probed in result.drafts:
        lines += [f"note: {probed.name}: {note}" for note in probed.notes]
        if probed.refused is None:
            words, seen = too_few(settings.prompts), probed.detectable_alpha or 0.0
            if words is None and seen >= 0.0005:
                more = f"{4 * settings.prompts} prompts detect {seen / 2:.3f}"
                words = f"{settings.prompts} prompts detect a gain of {seen:.3f} in alpha with 80 % probability; {more}"
            lines += [] if words is None else [f"{probed.name}: {words}"]
            lines += [draft_sentence(probed, baseline)] if len(result.drafts) > 1 else []
    return [*lines, f"Verdict: {result.sentence}"]


def prices_table(result: Probe) -> Table:
    """Step times by batch size: the target alone, then each draft in the block loop with it."""
    times = [Column(name, ".2f") for name in ("target step, ms", "draft step, ms", "c")]
    table = Table(
        ["", "rule", Column("batch", "d"), *times, "verify call, ms, by gamma", "break-even alpha", "perfect draft"],
        title=f"{result.settings.times} times",
        caption="c: draft call (a token, or a block in one pass) / target step; break-even alpha: by gamma, if "
        "tokens are accepted independently; perfect draft: speed-up at alpha 1 @ gamma",
    )
    for row in result.target_prices:
        table.add(TARGET, "", row.batch_size, 1e3 * row.target_step_seconds, None, None, _verify(row), "", "")
    for row in (price for probed in result.usable for price in probed.prices):
        seconds = 1e3 * row.target_step_seconds, 1e3 * row.draft_step_seconds
        perfect = Cell(_times(row.perfect_speed_up, row.perfect_gamma), mark="hopeless" if row.hopeless else "")
        alphas = " ".join(
            f"{gamma}:{'never' if alpha is None else f'{alpha:.2f}'}"
            for gamma, alpha in row.break_even_alpha.items()
            if gamma in row.verify_seconds
        )
        table.add(row.way, row.rule, row.batch_size, *seconds, row.cost_ratio, _verify(row), alphas, perfect)
    return table


def outlook_tables(result: Probe) -> Iterator[Table]:
    """A table for each text and rule: acceptance and predicted speed-up of each way, now, distilled and at the ceiling of the rule."""
    about = "tau and speed-up at each way's best gamma; distilled: the usual result from this start"
    for text, rule in dict.fromkeys((row.text, row.rule) for row in result.measured):
        rows = [
            row
            for row in result.measured
            if (row.text, row.rule, row.concurrency) == (text, rule, result.settings.batch_sizes[0])
        ]
        yield timed_table(rows, None, f"{result.settings.prompts} prompts, {text}, rule {rule}", about)


def _verify(price: Price) -> str:
    return " ".join(f"{gamma}:{1e3 * seconds:.1f}" for gamma, seconds in price.verify_seconds.items())


def _times(speed_up: float, gamma: int) -> str:
    return f"{speed_up:.2f}x @{gamma}" if gamma else NOTHING
