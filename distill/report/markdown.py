"""The Markdown twin of the report, and the words both twins use. Pure: a result in, text out.

Text of the models stands in code spans, and signs that mean something in Markdown or HTML are escaped everywhere else.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from distill.report.money import Prices
from distill.report.serving_tables import serving_sections
from distill.report.tables import (
    OUTCOMES,
    SHOWN_DISAGREEMENTS,
    Cell,
    GivenTimes,
    Table,
    contest_table,
    cost_words,
    count,
    disagreement_table,
    forgetting_table,
    given_table,
    headline_table,
    interval,
    judged,
    labels_of,
    main_curves,
    number,
    percent,
    response_facts,
    rules_table,
    signed,
    slice_tables,
    targets_table,
    times,
)
from distill.report.text_tables import Section, text_sections
from distill.run.result import Calibration, Result
from distill.run.verdict_record import BestDraft, Judgement, Verdict
from speculative.measure.effects import words
from speculative.measure.replay import agreement_words

GLOSSARY = {
    "target": "The large model that is served. The text is always its own: speculation changes the speed, not the words.",
    "draft": "The small model that proposes the next tokens, which the target then checks all at once.",
    "block": "One round: the draft proposes gamma tokens, the target verifies them in one call and adds one token of its own.",
    "gamma": "How many tokens the draft proposes in a block.",
    "alpha, acceptance rate": "How often a proposed token is accepted, averaged over every position of the target's text. 1 = the draft and the "
    "target agree always.",
    "accepted / drafted": "Accepted tokens over all proposed ones. Tokens behind the first rejected one are wasted, so it is below alpha and falls "
    "with gamma.",
    "tau, block efficiency": "Tokens written per call of the target: from 1 (every proposal is wrong) to gamma + 1.",
    "survival": "How often the first j tokens of a block are all accepted.",
    "correction, bonus": "The target's own token: in place of the first rejected one, or behind a block that was accepted whole.",
    "c, cost ratio": "Seconds of one draft call over seconds of one step of the target. A call drafts a token, or the whole block where the draft "
    "drafts it in one pass.",
    "v": "Seconds of the target call that verifies a block over seconds of a call for one token.",
    "speed-up": "Tokens per second over the same target alone: tau / (gamma c + v), or tau / (c + v) in one pass a block.",
    "replay": "tau computed from the two models' probabilities along stored text of the target, for every gamma at once.",
    "rule": "How the server accepts. sample: the draft samples; greedy-draft: the draft takes its most probable token; greedy: both do "
    "(temperature 0); block: accepts whole blocks jointly.",
    "[a, b]": "95 % interval, from resampling the held-out prompts.",
}


def times_words(given: GivenTimes, verdict: Verdict) -> str:
    """At which step times a speed-up is computed, and where they come from."""
    source = {"given": "given", "measured": "measured here", "example": "an example, nothing was measured here"}[
        given.source
    ]
    return (
        f"target {1e3 * given.target_seconds:.4g} ms a step, draft {1e3 * given.draft_seconds:.4g} ms ({cost_words(verdict, given.cost_ratio, 3)}), each drafted "
        f"token lengthens the target's call by {percent(given.verify_extra, 1)} ({source})"
    )


def missing_lines(result: Result) -> dict[str, str]:
    """{section: one line} for what a reader may look for and this result does not hold."""
    curves = main_curves(result)
    survival = any(row.survival for row in result.contestants)
    known = (
        ("steps", len(result.steps) > 1, "Only one checkpoint was judged, so there is no curve over steps."),
        ("survival", survival, "Survival by position was not measured: it needs live decoding."),
        ("curves", curves, "There are no curves over gamma: no rule could be replayed on this held-out text."),
        ("speed", result.costs or not curves, "Nothing was timed on this machine; the curve below is for other times."),
        ("slices", result.slices, "There are no slices."),
        ("tokens", result.token_view, "There is no token view: nothing was decoded live."),
        ("disagreements", result.disagreements, "No disagreements were recorded."),
        ("calibration", result.calibration, "The draft's confidence was not measured under this rule."),
    )
    return {section: line for section, is_there, line in known if not is_there}


def speed_line(result: Result) -> str:
    """Best gamma and what it should give on this machine."""
    verdict, costs = result.verdict, result.costs
    if costs is None or verdict.best_gamma is None:
        return ""
    if verdict.best_gamma == 0:
        return f"No gamma pays on this machine ({cost_words(verdict, costs.cost_ratio)})."
    return (
        f"Best gamma on this machine: {best_gamma_words(verdict)}, predicted speed-up {times(verdict.predicted_speed_up)} "
        f"({cost_words(verdict, costs.cost_ratio)}, batch {costs.batch_size})."
    )


def best_gamma_words(verdict: Verdict) -> str:
    """`6 (4 to 8 are as good)`: the best gamma only as far as it is known."""
    ends = verdict.best_gamma_range
    alike = (
        f" ({ends[0]} to {ends[1]} are as good within 3 %, or what costs are known to)"
        if ends and ends[0] < ends[1]
        else ""
    )
    return f"{verdict.best_gamma}{alike}"


def effect_lines(verdict: Verdict) -> list[str]:
    """How sure the gain is, and what these prompts could have seen."""
    effects, against_served = verdict.effects, verdict.against_served
    served = (
        [f"Against the served draft, paired by prompt: {words(against_served.record())}."] if against_served else []
    )
    if not effects:
        return served
    looks, method = effects.looks, effects.method
    sure = f"intervals of {percent(effects.confidence)}"
    if looks > 1:
        sure = f"intervals of {percent(effects.corrected_confidence, 2)} each, {percent(effects.confidence)} over all looks"
    return [
        f"Gain over the baseline, paired by prompt: {words(effects.record())}.",
        *served,
        f"Both drafts on the same {count(effects.prompts, 'prompt')} ({effects.tokens:,} tokens), tau and speed-up by replay: so a gain can "
        f"differ from the difference of two live runs. {method[0].upper()}{method[1:]}; {sure}.",
    ]


def calibration_line(calibration: Calibration) -> str:
    """What to do with the draft's confidence."""
    said = calibration.words.rstrip(".")
    return f"{said[:1].upper()}{said[1:]}."


def steps_line(result: Result) -> str:
    """What the numbers of the checkpoints were measured on."""
    # Only counted blocks have an interval of tau.
    if any(step.tau_ci for step in result.steps):
        return (
            "alpha is of the same frozen held-out text for every checkpoint. tau was counted live on the same prompts, so each "
            "checkpoint was counted on text of its own."
        )
    return "Every checkpoint was judged on the same frozen held-out text, tau by replay."


def slices_line(result: Result) -> str:
    """What the intervals of the gains hold for, and when a slice is marked."""
    marks = ("“worse” and “forgotten”" if result.forgetting else "“worse”") + " marks"
    levels = [group.corrected_confidence for group in result.slices if group.corrected_confidence]
    if not any(row.gain is not None for group in result.slices for row in group.rows):
        return "Each interval stands alone."
    if not levels:
        return "Each interval stands alone at 95 %; nothing is marked as worse, because among many rows some look so by chance."
    return (
        f"The intervals of the gains hold together at 95 % over the rows of a table (Bonferroni: each at up to {percent(max(levels), 1)}); "
        f"{marks} a loss that is certain by them, on enough prompts. Those of alpha stand alone."
    )


def serve_warning(result: Result) -> str:
    """Why the commands may not be worth running, "" where the draft pays off."""
    verdict = result.verdict
    outcome, pays, reasons = verdict.outcome, verdict.pays_off, []
    if outcome == "loss":
        reasons.append("this draft is worse than the undistilled one")
    elif judged(result).step == 0:
        reasons.append("this draft is the undistilled one")
    elif outcome == "no_measurable_gain":
        reasons.append("this draft is not certainly better than the undistilled one")
    if outcome == "rival_better":
        reasons.append(f"{verdict.run} is faster and needs no training")
    elif outcome == "best_together":
        reasons.append(
            "with prompt lookup before it the draft is faster still (understudy generate; see what your engine can chain)"
        )
    if pays is False or outcome == "no_speed":
        reasons.append("the target with this draft was not certainly faster than the target alone")
    if verdict.best_gamma == 0:
        reasons.append("by the measured steps no gamma is predicted to pay")
    if reasons:
        return f"Before serving it: {'; '.join(reasons)}. The commands are given all the same."
    if pays is None or outcome == "not_timed":
        return "Not timed: whether the target with this draft is faster than alone was not measured."
    return ""


def check_lines(result: Result) -> list[str]:
    """The instrument's own checks, in words; what has no words here is shown as key and value."""
    checks = dict(result.checks)
    lines = []
    if "alpha_replay" in checks:
        size = [f"{checks.pop(key)} {key}" for key in ("prompts", "tokens") if key in checks] + [
            str(checks.pop("dtype", ""))
        ]
        lines.append(
            f"The target as its own draft scores alpha {number(checks.pop('alpha_replay'), 4)} by replay and "
            f"{number(checks.pop('alpha_live', None), 4)} live: 1 is right, within {checks.pop('alpha_tolerance', 0):g} "
            f"({', '.join(part for part in size if part)})."
        )
        for key in ("gamma", "batch_size", "alpha_noise"):
            checks.pop(key, None)
        lines += checks.pop("warnings", [])
    if "greedy_equal" in checks:
        ties = checks.pop("near_ties", None) or []
        checks.pop("near_tie_tolerance", None)
        equal = checks.pop("greedy_equal")
        lines.append(
            f"Speculative greedy text equals plain greedy text on {equal} of {equal + len(ties)} prompts"
            + (f"; {len(ties)} part at a near-tie of two logits." if ties else ".")
        )
    for key, value in checks.items():
        if isinstance(value, str | int | float):
            lines.append(f"{key.replace('_', ' ')}: {value}")
    return [*(lines or ["No self-check was run here (nothing was decoded)."]), _agreement_line(result)]


def _agreement_line(result: Result) -> str:
    """Live decoding against replay of its own text: both of one run, the last one that was counted."""
    verdict, main = result.verdict, judged(result)
    records = [record for record in verdict.checkpoints if record.step == main.step]
    runs: list[BestDraft | Judgement] = [verdict.best, *records]
    checked = ((one.replay_check, one.live_tokens) for one in runs)
    check, tokens = next(((check, tokens) for check, tokens in checked if check and tokens), (None, 0))
    start = "Live decoding against replay of its own text:"
    if check is not None:
        told = agreement_words(check.record(), tokens)
        return f"{start} tau {number(tokens / check.live_blocks, 2)} beside {told}."
    if main.tau_by == "replay":
        return f"{start} not compared, nothing was decoded live: tau {number(main.tau, 2)} is by replay."
    return f"{start} not compared, the result holds no replay of the live run."


def run_facts(result: Result) -> list[tuple[str, str]]:
    """What was run, on what: (name, value), values that are not recorded left out."""
    facts, costs, verdict = dict(result.provenance), result.costs, result.verdict
    dirty = facts.pop("uncommitted_changes", None)
    commit, argv = facts.pop("commit", None), facts.pop("argv", None)
    versions = facts.pop("versions", None) or {}
    machine = [f"{facts.pop(key)}" for key in ("machine", "device") if facts.get(key) is not None]
    threads = facts.pop("threads", None)
    sampling = facts.pop("sampling", None) or {}
    rows = [
        ("run", f"{result.name} ({result.kind}), {result.made or ''}"),
        (
            "judged",
            f"rule {verdict.rule}, gamma {verdict.gamma}, {verdict.prompts} held-out prompts, {verdict.tokens:,} tokens",
        ),
        ("serving settings", ", ".join(f"{key} {value}" for key, value in sampling.items())),
        ("command", shlex.join(map(str, argv)) if argv else ""),
        ("commit", f"{commit}{f' with uncommitted changes ({dirty})' if dirty else ''}" if commit else ""),
        ("machine", ", ".join(machine) + (f", {threads} threads" if threads else "")),
        ("prompts timed", f"{len(result.timed_prompts)}" if result.timed_prompts else ""),
        ("timed at", f"batch {costs.batch_size}, context {costs.context} tokens" if costs else ""),
        (
            "step times",
            f"target {1e3 * costs.target_step_seconds:.2f} ms, draft {1e3 * costs.draft_step_seconds:.2f} ms, {cost_words(verdict, costs.cost_ratio, 3)}"
            if costs
            else "",
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
    ]
    rows += [
        (key.replace("_", " "), str(value))
        for key, value in facts.items()
        if isinstance(value, str | int | float) and len(str(value)) < 200
    ]
    return [(name, value) for name, value in rows if value]


def escaped(text: str) -> str:
    """Plain text for Markdown: one line, nothing in it is markup."""
    flat = " ".join(str(text).split())
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", flat)


def code_span(text: str) -> str:
    """Text as code inside a table: a fence longer than any run of backticks in it; a bar would end the cell."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", "\\|")


def code_block(text: str, language: str = "") -> str:
    """A fenced block that the text cannot end."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def markdown_table(table: Table) -> str:
    """A pipe table; notes and marks stand behind the value."""
    texts = max(1, table.texts)
    lines = [
        "| " + " | ".join(escaped(column) for column in table.columns) + " |",
        "|" + "|".join("---" if place < texts else "---:" for place in range(len(table.columns))) + "|",
        *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in table.rows),
    ]
    return "\n".join(([f"**{escaped(table.title)}**", ""] if table.title else []) + lines)


def _cell(cell: Cell) -> str:
    text = code_span(cell.text) if cell.code else escaped(cell.text)
    text = f"**{text}**" if cell.strong and text else text
    mark = f"**{escaped(cell.mark)}**" if cell.mark else ""
    return " ".join(part for part in (text, escaped(cell.note), mark) if part)


def markdown(result: Result, given: GivenTimes, prices: Prices | None = None) -> str:
    """The whole report as Markdown, in the order of the page; what needs a screen (figures, single tokens) is left to the page."""
    verdict, missing = result.verdict, missing_lines(result)
    parts = [
        f"# {escaped(result.name)}: {OUTCOMES[verdict.outcome]}",
        f"**{escaped(verdict.sentence)}**",
        f"Rule {escaped(verdict.rule)}, gamma {verdict.gamma}, {verdict.prompts} held-out prompts, {verdict.tokens:,} tokens; "
        "\\[95 % interval\\].",
        markdown_table(headline_table(result)),
        *([markdown_table(contest)] if (contest := contest_table(result)) else []),
        *(escaped(line) for line in effect_lines(verdict)),
        *(f"> Warning: {escaped(line)}" for line in verdict.warnings),
        "## Acceptance over steps",
        *([missing["steps"]] if "steps" in missing else [steps_line(result), markdown_table(_steps_table(result))]),
        "## Survival by position",
        missing.get("survival") or markdown_table(_survival_table(result)),
        "## Speed-up over gamma",
        *_speed_parts(result, given, missing),
        *_section_parts(serving_sections(result, prices)),
        "## Slices",
        *(
            [missing["slices"]]
            if "slices" in missing
            else [slices_line(result), *map(markdown_table, slice_tables(result))]
        ),
    ]
    parts += _section_parts(text_sections(result))
    others = targets_table(result)
    parts += ["## Other targets", markdown_table(others)] if others else []
    forgotten = forgetting_table(result)
    parts += ["## Forgetting", markdown_table(forgotten)] if forgotten else []
    parts += ["## Held-out responses", missing.get("tokens") or markdown_table(_responses_table(result))]
    expensive = disagreement_table(result, 0, SHOWN_DISAGREEMENTS)
    parts += ["## Most expensive disagreements", markdown_table(expensive) if expensive else missing["disagreements"]]
    more = len(result.disagreements) - SHOWN_DISAGREEMENTS
    parts += [f"{more} more are on the page."] if more > 0 else []
    calibration = result.calibration
    parts += [
        "## Calibration of the draft",
        escaped(calibration_line(calibration)) if calibration else missing["calibration"],
    ]
    parts += ["## What was run", "\n".join(f"- {escaped(name)}: {escaped(value)}" for name, value in run_facts(result))]
    if result.config:
        parts += [f"<details><summary>Config</summary>\n\n{code_block(result.config, 'yaml')}\n\n</details>"]
    parts += ["## Checks of the instrument", "\n".join(f"- {escaped(line)}" for line in check_lines(result))]
    if result.serve:
        warning = serve_warning(result)
        parts += ["## Serve it", *([f"> Warning: {warning}"] if warning else [])]
    for engine in result.serve:
        takes = "takes this pair" if engine.ok else "does not take this pair"
        note = f". {escaped(engine.note)}" if engine.note else ""
        parts.append(f"**{escaped(engine.engine)}** {takes}{note}\n\n{code_block(engine.command, engine.language)}")
    return "\n\n".join(parts) + "\n"


def _section_parts(sections: Sequence[Section]) -> list[str]:
    parts = []
    for section in sections:
        parts += [f"## {section.title}", *map(escaped, section.lines), *map(markdown_table, section.tables)]
    return parts


def _speed_parts(result: Result, given: GivenTimes, missing: Mapping[str, str]) -> list[str]:
    rules, at_times = rules_table(result), given_table(result, given)
    if at_times is None:
        return [missing["curves"]]
    parts = [missing.get("speed") or escaped(speed_line(result)), markdown_table(rules) if rules else ""]
    parts += [
        f"Rule {escaped(row.rule)} is left out: {escaped(row.why)}."
        for row in (result.curves.refused if result.curves else [])
    ]
    parts += [f"Speed-up at these times: {escaped(times_words(given, result.verdict))}.", markdown_table(at_times)]
    return [part for part in parts if part]


def _steps_table(result: Result) -> Table:
    rows = [
        [
            Cell(str(step.step)),
            Cell(number(step.alpha), interval(step.alpha_ci)),
            Cell(number(step.tau, 2), interval(step.tau_ci, 2)),
            Cell(signed(step.gain.alpha_gain), interval(step.gain.ci)) if step.gain else Cell(""),
        ]
        for step in result.steps
    ]
    return Table(("step", "alpha", "tau", "gain in alpha"), rows)


def _survival_table(result: Result) -> Table:
    rows = [(row, row.survival) for row in result.contestants if row.survival]
    longest, labels = max(len(survival) for _, survival in rows), labels_of(result)
    cells = [
        [Cell(labels[row.name], strong=row is judged(result)), *(Cell(number(value)) for value in survival)]
        + [Cell("")] * (longest - len(survival))
        for row, survival in rows
    ]
    return Table(("first j accepted", *(f"j = {place}" for place in range(1, longest + 1))), cells)


def _responses_table(result: Result) -> Table:
    rows = []
    for response in result.token_view.responses if result.token_view else []:
        written = response_facts(response)
        counts = [response.tokens_count, response.blocks, response.accepted, response.drafted]
        counts += [written["target"], written["bonus"]]
        rows.append([Cell(response.key, response.domain), *(Cell(str(tokens)) for tokens in counts)])
    return Table(("response", "tokens", "target calls", "accepted", "drafted", "corrected", "bonus"), rows)
