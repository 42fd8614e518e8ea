"""Sections on provenance and checks, serving commands, and the glossary."""

import shlex

from distill.report.section import Content, Part, Piece, glossary, say, section
from distill.report.view import View
from distill.run.result import Result


@section("run", "What was run", order=98, nav="What was run")
def run(view: View) -> Content:
    """Provenance, the config and the checks."""
    result = view.result
    parts: list[Part] = [Piece("facts", run_facts(view))]
    if name := result.files.get("proposals"):
        parts.append(Piece("fine", f"Every proposed token with its probabilities is in {name}, next to result.json."))
    parts += [Piece("config", result.config)] if result.config else []
    parts += [Piece("heading", "Checks"), *say("checks"), Piece("facts", check_facts(result))]
    return [*parts, *say("agreement", view.verdict)]


@section("serve", "Serve it", order=99, nav="Serve it")
def serve(view: View) -> Content:
    """The command for each engine, and why serving may not be worth it."""
    if not view.result.serve:
        return None
    warnings = (Piece("warning", line) for line in say("before_serving", view.verdict, view.draft.step))
    return [*warnings, Piece("serve", view.result.serve)]


@section("words", "Glossary", order=100, nav="Glossary")
def words(view: View) -> Content:
    return [Piece("facts", list(glossary().items()))]


def check_facts(result: Result) -> list[tuple[str, str]]:
    """(name, value) of the checks that ran before anything was measured; a list is counted."""
    checks = {
        name: len(value) if isinstance(value, list) else value for name, value in result.verdict.self_checks.items()
    }
    return [
        (name.replace("_", " "), f"{value:.6g}" if isinstance(value, float) else str(value))
        for name, value in checks.items()
        if isinstance(value, str | int | float)
    ]


def run_facts(view: View) -> list[tuple[str, str]]:
    """(name, value) of the run, machine and settings; values that were not recorded are left out."""
    result, verdict, costs = view.result, view.verdict, view.verdict.costs
    facts = dict(result.provenance)
    dirty, commit, argv = (facts.pop(key, None) for key in ("uncommitted_changes", "commit", "argv"))
    versions, sampling = (facts.pop(key, None) or {} for key in ("versions", "sampling"))
    machine = [str(facts.pop(key)) for key in ("machine", "device") if facts.get(key) is not None]
    machine += [f"{threads} threads"] if (threads := facts.pop("threads", None)) else []
    rows = [
        ("run", f"{result.name} ({result.kind}), {result.made or ''}"),
        (
            "judged",
            f"rule {verdict.rule}, gamma {verdict.gamma}, {verdict.prompts} held-out prompts, {verdict.tokens:,} tokens",
        ),
        ("serving settings", ", ".join(f"{key} {value}" for key, value in sampling.items())),
        ("command", shlex.join(map(str, argv or []))),
        ("commit", f"{commit}{f' with uncommitted changes ({dirty})' if dirty else ''}" if commit else ""),
        ("machine", ", ".join(machine)),
        ("prompts timed", str(len(result.timed_prompts)) if result.timed_prompts else ""),
    ]
    if costs:
        target, draft = 1e3 * costs.target_step_seconds, 1e3 * costs.draft_step_seconds
        ratio = f"c = {costs.cost_ratio:.3f}" + (" per block" if view.draft.drafting == "parallel" else "")
        rows += [
            ("timed at", f"batch {costs.batch_size}, context {costs.context} tokens"),
            (
                "step times",
                f"target {target:.2f} ms, draft {draft:.2f} ms, {ratio}{', ' * bool(costs.steps)}{costs.steps}",
            ),
        ]
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    others = {key: str(value) for key, value in facts.items() if isinstance(value, str | int | float)}
    rows += [(key.replace("_", " "), value) for key, value in others.items() if len(value) < 200]
    return [(name, value) for name, value in rows if value]
