"""The screen of a probe: a sentence for each draft and one for all, and their tables."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.text import Text

from distill.commands.probe.plan import Plan
from distill.commands.probe.result import Probe, Prospect, draft_sentence
from distill.report.table import NOTHING, Cell, Column, Table
from speculative.explain.ceilings import Price
from speculative.measure.effects import too_few
from speculative.measure.intervals import interval
from speculative.measure.measured import TARGET, Measured

DECISION_WORDS = {
    "hopeless": "hopeless",
    "no_headroom": "no headroom",
    "already_pays": "go: pays already",
    "needs_distillation": "go: distil it",
    "out_of_reach": "no go",
}
NOISY = 1.4  # Of a quiet machine; rules alone differ by up to 1.15 in a target step.


class Stages:
    """Print each stage on the console while it runs, and record its seconds."""

    def __init__(self, console: Console | None) -> None:
        self.console, self.seconds = console, dict[str, float]()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        # No spinner: its thread would be timed with the models.
        if self.console is not None:
            self.console.print(f"{name} ...", end=" ", highlight=False)
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - began, 2)
            if self.console is not None:
                self.console.print(f"{self.seconds[name]:.1f} s", highlight=False)


def assumptions(plan: Plan) -> list[str]:
    if plan.given is None:
        return [
            f"times are measured on this machine, {torch.get_num_threads()} threads, at a context of {plan.context} tokens, and interpolated between "
            "measured gammas"
        ]
    if plan.engine is not None:
        return [
            f"times are those of {plan.engine.engine}, without prefill, and the same for every draft and rule; gammas and batch sizes are those "
            "that it was timed at, so --gammas and --batch-sizes are not used"
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
    for prospect in result.drafts:
        if prospect.refused is not None:
            console.print(Text(f"{prospect.name}: refused: {prospect.refused}", style="yellow"))
    console.print(prices_table(result))
    for prospect in result.usable:
        console.print(outlook_table(prospect, result))
    if result.usable:
        console.print(ways_table(result))
        console.print(break_even_table(result.usable))
    for line in probe_lines(result):
        console.print(Text(line, style="bold green" if line.startswith("Verdict: ") and result.go else ""))


def probe_lines(result: Probe) -> list[str]:
    """The probe in sentences: the checks, prompt lookup, the ceilings, each draft's verdict, and the overall verdict last."""
    settings, checks = result.settings, result.checks
    texts = ", ".join(f"{about.tokens:,} tokens at {about.text}" for about in result.texts)
    lines = [
        f"self-check: the target as its own draft has alpha {checks['alpha_live']:.4f}; speculative greedy text equals plain greedy text on "
        f"{checks['greedy_equal']} of {checks['prompts']} prompts"
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
    for prospect in result.drafts:
        lines += [f"note: {prospect.name}: {note}" for note in prospect.notes]
        if prospect.refused is None:
            words, seen = too_few(settings.prompts), prospect.detectable_alpha or 0.0
            if words is None and seen >= 0.0005:
                more = f"{4 * settings.prompts} prompts detect {seen / 2:.3f}"
                words = f"{settings.prompts} prompts detect a gain of {seen:.3f} in alpha with 80 % probability; {more}"
            lines += [] if words is None else [f"{prospect.name}: {words}"]
            lines += [draft_sentence(prospect, baseline)] if len(result.drafts) > 1 else []
    return [*lines, f"Verdict: {result.sentence}"]


def prices_table(result: Probe) -> Table:
    """Step times by batch size: the target alone, then each draft in the block loop with it."""
    times = [Column(name, ".2f") for name in ("target step, ms", "draft step, ms", "c")]
    table = Table(
        ["", "rule", Column("batch", "d"), *times, "verify call, ms, by gamma", "perfect draft"],
        title=f"{result.settings.times} times",
        caption="c: draft call (a token, or a block in one pass) / target step; perfect draft: speed-up at alpha 1 @ gamma",
    )
    for row in result.target_prices:
        table.add(TARGET, "", row.batch_size, 1e3 * row.target_step_seconds, None, None, _verify(row), "")
    for row in (price for prospect in result.usable for price in prospect.prices):
        seconds = 1e3 * row.target_step_seconds, 1e3 * row.draft_step_seconds
        perfect = Cell(_times(row.perfect_speed_up, row.perfect_gamma), mark="hopeless" if row.hopeless else "")
        table.add(row.way, row.rule, row.batch_size, *seconds, row.cost_ratio, _verify(row), perfect)
    return table


def outlook_table(prospect: Prospect, result: Probe) -> Table:
    """Acceptance and speed-up of a draft under each rule at each temperature: now, distilled and at the ceiling."""
    settings = result.settings
    table = Table(
        [
            "text",
            "rule",
            Column("alpha", ".3f"),
            Column("headroom", "+.3f"),
            "survival",
            Column("tau", ".2f"),
            "now",
            "distilled",
            "ceiling",
        ],
        title=f"{prospect.name} as it is: {settings.prompts} prompts, batch {settings.batch_sizes[0]}",
        caption="@: gamma; headroom: ceiling minus alpha; survival of the first 1, 2, 3 drafted tokens; predicted speed-up now, distilled "
        "(the usual result from this start), and at the ceiling of the rule",
    )
    for outlook in prospect.outlooks:
        now, gamma = outlook.now, outlook.now.gamma or min(3, max(outlook.taus))
        table.add(
            now.text,
            Cell(now.rule, note=DECISION_WORDS[outlook.decision]),
            Cell(now.alpha, ci=now.alpha_ci),
            (outlook.ceiling.alpha or 0.0) - (now.alpha or 0.0),
            " ".join(f"{kept:.2f}" for kept in outlook.survival[:3]),
            Cell(outlook.taus[gamma], note=f"@{gamma}"),
            *(_times(row.speed_up or 1.0, row.gamma or 0) for row in (now, outlook.distilled, outlook.ceiling)),
        )
    return table


def ways_table(result: Probe) -> Table:
    """Prompt lookup, each draft, and both together, before and after distilling."""
    table = Table(
        ["text", "way", Column("speed-up now", ".2f", "x"), Column("distilled", ".2f", "x")],
        title=f"predicted speed-up of each way, batch {result.settings.batch_sizes[0]}",
    )
    for lookup in result.lookups:
        table.add(lookup.text, *_way(lookup), None)
        for one in result.usable:
            for outlook in one.outlooks:
                if outlook.both and outlook.now.text == lookup.text:
                    both, distilled = outlook.both
                    table.add(lookup.text, *_way(outlook.now), outlook.distilled.speed_up)
                    table.add(lookup.text, *_way(both), distilled.speed_up)
    return table


def _way(row: Measured) -> tuple[Cell, Cell]:
    ci, at = (row.speed_up_ci, f"@{row.gamma}") if row.gamma else (None, "does not pay")
    return Cell(row.way, note=row.sizes), Cell(row.speed_up, ci=ci, note=at)


def break_even_table(used: Sequence[Prospect]) -> Table:
    """The alpha below which drafting is slower than plain decoding, by gamma."""
    gammas = list(used[0].prices[0].break_even_alpha)
    columns: list[Column | str] = ["", *(Column(str(gamma), ".2f") for gamma in gammas)]
    table = Table(columns, title="break-even alpha by gamma (if tokens are accepted independently)")
    for one in used:
        alphas = one.prices[0].break_even_alpha
        table.add(one.name, *("never" if alphas.get(gamma) is None else alphas[gamma] for gamma in gammas))
    return table


def _verify(price: Price) -> str:
    return " ".join(f"{gamma}:{1e3 * seconds:.1f}" for gamma, seconds in price.verify_seconds.items())


def _times(speed_up: float, gamma: int) -> str:
    return f"{speed_up:.2f}x @{gamma}" if gamma else NOTHING
