"""What a person reads of a probe: a sentence for each draft and one for all, and the tables behind them."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distill.commands.probe.memory import memory_lines
from distill.report.screen_table import screen_table
from distill.report.tables import interval
from distill.run.verdict_record import WAYS
from speculative.explain.ceilings import WORTHWHILE
from speculative.measure.effects import too_few

DECISION_WORDS = {
    "hopeless": "hopeless",
    "no_headroom": "no headroom",
    "already_pays": "go: pays already",
    "needs_distillation": "go: distil it",
    "out_of_reach": "no go",
}
NOISY = 1.4  # Of a quiet machine; rules alone differ by up to 1.15 in a target step.


class Stages:
    """Names each stage on the console while it runs, and keeps its seconds."""

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


def assumptions(given: bool, t_verify: str, context: int) -> list[str]:
    """What the speed-ups take for granted."""
    if not given:
        return [
            f"times are of this machine, {torch.get_num_threads()} threads, at a context of {context} tokens; between measured "
            "gammas they are interpolated"
        ]
    said = ["times are given, not measured: nothing of this machine enters; the same for every draft and rule"]
    if t_verify:
        return [*said, f"a verify call takes {t_verify} whatever gamma"]
    return [
        *said,
        "--t-verify is not given: a verify call is taken to cost one target step (v = 1), which flatters large gammas",
    ]


def busy_machine(seconds: Sequence[float]) -> list[str]:
    """A note when the same target step was timed very differently: then no speed-up here is worth much."""
    if not seconds or max(seconds) < NOISY * min(seconds):
        return []
    return [
        f"one target step took between {1e3 * min(seconds):.1f} and {1e3 * max(seconds):.1f} ms: the machine is busy, so take "
        "speed-ups for rough ones, or probe again when it is quiet"
    ]


def draft_sentence(record: dict[str, Any], rival: float) -> str:
    """The verdict about one draft in words, from its record in a probe's result; rival: speed-up of prompt lookup."""
    together = record["lead"]["together"]
    if record["decision"] == "hopeless" or together is None:
        return _alone_sentence(record, rival)
    now, distilled = together["now"], together["reachable"]
    at = f" at gamma {now['gamma']}" if now["gamma"] else ""
    return (
        f"{_alone_sentence(record, rival)} With prompt lookup before it: {now['speed_up']:.2f}x{at} as it is, "
        f"{distilled['speed_up']:.2f}x distilled."
    )


def _alone_sentence(record: dict[str, Any], rival: float) -> str:
    lead, costs = record["lead"], record["costs"][0]
    now, reachable, ceiling = lead["now"], lead["reachable"], lead["ceiling"]
    alpha, gained = lead["alpha"], reachable["alpha"] - lead["alpha"]
    has = f"alpha {alpha:.3f}, "
    has += f"{now['speed_up']:.2f}x at gamma {now['gamma']}" if now["gamma"] else "which no gamma makes pay"
    hope = f"distilled as far as others from there (alpha {reachable['alpha']:.2f}) it would give {reachable['speed_up']:.2f}x"
    name, decision = record["name"], record["decision"]
    if decision == "hopeless":
        return f"{name}: hopeless with {has}; {costs['hopeless_words']}."
    if decision == "no_headroom":
        beaten = f"; prompt lookup gives {rival:.2f}x" if rival > now["speed_up"] else ""
        return (
            f"{name}: no headroom. It already accepts {alpha:.3f} of a ceiling of {ceiling['alpha']:.3f}, and drafts that start "
            f"there gain about {gained:.3f}: distilling cannot pay much. Serve it as it is, {now['speed_up']:.2f}x at gamma "
            f"{now['gamma']}{beaten}."
        )
    if decision == "already_pays":
        return f"{name}: go. It pays as it is ({has}); {hope}, its ceiling is {ceiling['speed_up']:.2f}x."
    if decision == "needs_distillation":
        beaten = f" and prompt lookup gives {rival:.2f}x for free" if rival > max(now["speed_up"], WORTHWHILE) else ""
        return f"{name}: go, but it needs distillation. It has {has}{beaten}; {hope}, its ceiling is {ceiling['speed_up']:.2f}x."
    bar = f"prompt lookup's {rival:.2f}x" if rival > WORTHWHILE else f"{WORTHWHILE}x"
    return f"{name}: no go. It has {has}; {hope}, under {bar}: take a better or a cheaper draft."


def overall_sentence(
    facts: dict[str, Any], usable: Sequence[dict[str, Any]], rival: float, planned: dict[str, Any] | None
) -> str:
    """One sentence for all: which draft to distil, or why none; and what prompt lookup gives for free."""
    free = (
        f"Prompt lookup alone gives {rival:.2f}x for free: a draft must beat that."
        if rival >= 1.05
        else "Prompt lookup gives nothing here."
    )
    if facts["decision"] == "no_draft" and planned is None:
        return f"No draft was given. {free}"
    if planned is not None and not usable:
        perfect = planned["perfect"]
        needed = planned["break_even_alpha"].get("5")
        start = "Hopeless" if facts["decision"] == "hopeless" else "No draft was given"
        alpha = (
            "no alpha pays at gamma 5"
            if needed is None
            else f"alpha must be over {needed:.2f} at gamma 5 to pay at all"
        )
        return f"{start}: c = {planned['cost_ratio']:.2f}, a perfect draft gives {perfect['speed_up']:.2f}x; {alpha}. {free}"
    best = next(record for record in usable if record["name"] == facts["best"])
    if len(usable) == 1:
        return f"{best['sentence']} {free}"
    goes = [record["name"] for record in usable if record["go"]]
    if not goes:
        return f"No go: of {len(usable)} drafts none is worth distilling; nearest: {best['sentence']} {free}"
    return (
        f"Go with {best['name']} ({len(goes)} of {len(usable)} drafts are worth distilling). {best['sentence']} {free}"
    )


def ways_sentence(ways: Sequence[dict[str, Any]]) -> str:
    """What each way to draft gives, where a draft has two; faster first."""
    gives = [f"{WAYS[record['drafting']]} gives {record['lead']['now']['speed_up']:.2f}x" for record in ways]
    return f" Drafting {', '.join(gives)} as it is." if len(ways) > 1 else ""


def print_probe(console: Console, result: dict[str, Any]) -> None:
    """The tables of a probe, the sentences last: they are what stays on the screen."""
    for record in result["drafts"]:
        if record["refused"] is not None:
            console.print(Text(f"{record['name']}: refused: {record['refused']}", style="yellow"))
    used = [record for record in result["drafts"] if record["refused"] is None]
    console.print(costs_table(result))
    for record in used:
        console.print(cells_table(record, result))
    if used:
        console.print(rivals_table(result))
        console.print(break_even_table(used))
    for line in probe_lines(result):
        console.print(Text(line, style="bold green" if line.startswith("Verdict: ") and result["go"] else ""))


def probe_lines(result: dict[str, Any]) -> list[str]:
    """The probe in sentences: what was checked, the free rival, the ceilings, each draft's verdict, the whole's last."""
    settings, checks = result["settings"], result["checks"]
    texts = ", ".join(f"{text['tokens']:,} tokens at temperature {text['temperature']:g}" for text in result["texts"])
    lines = [
        f"self-check: the target as its own draft has alpha {checks['alpha_live']:.4f}; speculative greedy text equals plain on "
        f"{checks['greedy_equal']} of {checks['prompts']} prompts"
        + (f" ({len(checks['near_ties'])} near-ties)" if checks["near_ties"] else ""),
        *(f"warning: {said}" for said in checks["warnings"]),
        f"text: {settings['prompts']} prompts, {texts}",
        *(f"taken for granted: {said}" for said in result["costs"]["assumptions"]),
        *(f"note: {note}" for note in result["notes"]),
        *memory_lines(result["memory"]),
    ]
    for facts in result["repetition"]:
        lines.append(
            f"at temperature {facts['temperature']:g} {facts['repeated']:.0%} of the target's tokens repeat 8 or more in a row that stood "
            f"before, {facts['looping']:.0%} go round in a loop"
        )
        if facts["warning"]:
            lines.append(f"note: {facts['warning']}")
    for facts in result["lookup"]:
        gives = f"{facts['speed_up']:.2f}x at gamma {facts['gamma']}" if facts["gamma"] else "no speed-up"
        lines.append(
            f"prompt lookup at temperature {facts['temperature']:g}: {gives} (proposes at {facts['proposes']:.0%} of the "
            f"tokens, right at {facts['hits']:.0%})"
        )
    for facts in result["greedy_ceilings"]:
        lines.append(
            f"a draft that takes its argmax can have no more than alpha {facts['alpha']:.3f} {interval(facts['alpha_ci'])} at "
            f"temperature {facts['temperature']:g}: the mean of the target's largest probability"
        )
    for record in result["drafts"]:
        lines += [f"note: {record['name']}: {note}" for note in record["notes"]]
        if record["refused"] is None:
            lines += _detectable(record, settings["prompts"])
            lines += [record["sentence"]] if len(result["drafts"]) > 1 else []
    return [*lines, f"Verdict: {result['sentence']}"]


def _detectable(record: dict[str, Any], prompts: int) -> list[str]:
    few = too_few(prompts)
    if few is not None:
        return [f"{record['name']}: {few}"]
    seen = record["detectable_alpha"]
    if seen is None or seen < 0.0005:
        return []
    return [
        f"{record['name']}: with these {prompts} prompts a gain of {seen:.3f} in alpha would be seen in 4 of 5 cases (80 % power), "
        f"with {4 * prompts} one of {seen / 2:.3f}"
    ]


def costs_table(result: dict[str, Any]) -> Table:
    """Step times by batch size: the target alone, then each draft in the block loop with it."""
    table = screen_table(
        "given times" if result["costs"]["given"] else "measured times, ms",
        ("", "rule", "batch", "target\nstep", "draft\nstep", "c", "verify call by gamma", "perfect\ndraft"),
        words=("", "rule"),
        overflow="fold",
        caption="c: draft call (a token, or one pass a block) / target step; v: verify call of gamma + 1 tokens / target step; perfect: alpha 1",
    )
    for facts in result["costs"]["target"]:
        table.add_row(
            "target", "", str(facts["batch_size"]), _ms(facts["target_step_seconds"]), "", "", _verify(facts), ""
        )
    for record in result["drafts"]:
        for place, facts in enumerate(record.get("costs", [])):
            perfect = facts["perfect"]
            table.add_row(
                record["name"] if place == 0 else "", facts["rule"], str(facts["batch_size"]), _ms(facts["target_step_seconds"]),
                _ms(facts["draft_step_seconds"]), f"{facts['cost_ratio']:.2f}", _verify(facts), _times(perfect),
                style="red" if facts["hopeless"] else "",
            )  # fmt: skip
    return table


def cells_table(record: dict[str, Any], result: dict[str, Any]) -> Table:
    """What a draft has under each rule and temperature, and what it could have."""
    settings = result["settings"]
    table = screen_table(
        f"{record['name']} as it is: {settings['prompts']} prompts, batch {settings['batch_sizes'][0]}",
        ("T", "rule", "alpha", "room", "sur-\nvival", "tau", "now", "distilled", "at\nbest"),
        words=("rule",),
        no_wrap=True,
        overflow="fold",
        padding=(0, 1, 0, 0),
        caption="@: gamma; room: alpha up to its ceiling; survival of the first 1, 2, 3 drafted tokens; speed-up now, distilled as far as "
        "drafts that start there have come, and at the ceiling of the rule",
    )
    for cell in record["cells"]:
        curve, gamma = cell["curve"], cell["now"]["gamma"] or min(3, cell["curve"]["gammas"][-1])
        table.add_row(
            f"{cell['temperature']:g}",
            f"{cell['rule']}\n{DECISION_WORDS[cell['decision']]}",
            f"{curve['alpha']:.3f}\n{interval(curve['alpha_ci'], 2)}",
            f"{cell['headroom']['alpha']:+.3f}",
            "\n".join(f"{kept:.2f}" for kept in curve["survival"][:3]),
            f"{curve['tau'][gamma]:.2f}\n@{gamma}",
            _times(cell["now"], "\n"),
            _times(cell["reachable"], "\n"),
            _times(cell["ceiling"], "\n"),
        )
    return table


def rivals_table(result: dict[str, Any]) -> Table:
    """Lookup, each draft, and both: as they are, and with the draft distilled."""
    table = screen_table(
        f"what to run, by replay, batch {result['settings']['batch_sizes'][0]}",
        ("T", "", "n-grams", "now", "", "distilled"),
        words=("", "n-grams"),
        overflow="fold",
        caption="n-grams: of prompt lookup, longest to shortest; @: gamma",
    )
    for row in result["rivals"]:
        sizes = f"{row['max_ngram']}-{row['min_ngram']}" if row["max_ngram"] else ""
        distilled = "" if row["distilled"] is None else f"{row['distilled']:.2f}x"
        ends = interval(row["speed_up_ci"], 2) if row["gamma"] else ""
        table.add_row(f"{row['temperature']:g}", row["name"], sizes, _times(row), ends, distilled)
    return table


def break_even_table(used: Sequence[dict[str, Any]]) -> Table:
    """The alpha under which drafting is slower than not, by gamma."""
    gammas = list(used[0]["costs"][0]["break_even_alpha"])
    table = screen_table("break-even alpha by gamma (as if tokens were accepted independently)", ("", *gammas))
    for record in used:
        alphas = record["costs"][0]["break_even_alpha"]
        cells = ("never" if alphas.get(g) is None else f"{alphas[g]:.2f}" for g in gammas)
        table.add_row(record["name"], *cells)
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _verify(facts: dict[str, Any]) -> str:
    pairs = facts["verify_seconds"].items()
    return " ".join(f"{gamma}:{1e3 * seconds:.1f}" for gamma, seconds in pairs)


def _times(facts: dict[str, Any], between: str = " ") -> str:
    return f"{facts['speed_up']:.2f}x{between}@{facts['gamma']}" if facts["gamma"] else "-"
