"""Sections on provenance and checks, serving commands, and the glossary."""

import shlex

from distill.report.section import Content, Part, Piece, section
from distill.report.sections.curves import of_block
from distill.report.view import View
from distill.run.result import Result
from speculative.measure.replay import agreement_words

GLOSSARY = {
    "target": "The large model that is served. Speculative decoding changes its speed, not its text.",
    "draft": "The small model that proposes the next tokens. The target checks them all in one call.",
    "block": "One round: the draft proposes gamma tokens, the target verifies them in one call and adds one of its own.",
    "alpha, acceptance rate": "Share of proposed tokens that are accepted, over all positions of the target's text.",
    "accepted / drafted": "As alpha, but tokens after the first rejected one count too, so it falls as gamma grows.",
    "tau, block efficiency": "Tokens per target call: from 1 (every proposal is rejected) to gamma + 1.",
    "survival": "How often the first j tokens of a block are all accepted.",
    "correction, bonus": "The target's own token: in place of the first rejected one, or after a fully accepted block.",
    "c, cost ratio": "Time of one draft call (for a token, or a block in one pass) over time of one target step.",
    "v": "Time of the target call that verifies a block over time of a call for one token.",
    "speed-up": "Tokens per second over those of the target alone: timed, or predicted as tau / (gamma c + v).",
    "replay": "tau computed from both models' probabilities on stored text of the target, for every gamma at once.",
    "rule": "How the server accepts. sample: the draft samples. greedy-draft: it takes its most probable token. "
    "greedy: temperature 0. block: whole blocks are judged jointly.",
    "[a, b]": "95 % interval, from resampling the held-out prompts.",
}

CHECKS = (
    "Before measuring, the target as its own draft must have alpha 1, and speculative greedy text must equal plain greedy text. "
    "Without live decoding nothing was checked."
)


@section("run", "What was run", order=98, nav="What was run")
def run(view: View) -> Content:
    """Provenance, the config and the checks."""
    result = view.result
    parts: list[Part] = [Piece("facts", run_facts(view))]
    if name := result.files.get("proposals"):
        parts.append(Piece("fine", f"Every proposed token with its probabilities is in {name}, next to result.json."))
    parts += [Piece("config", result.config)] if result.config else []
    parts += [Piece("heading", "Checks"), CHECKS, Piece("facts", check_facts(result))]
    return [*parts, *agreement_lines(result)]


@section("serve", "Serve it", order=99, nav="Serve it")
def serve(view: View) -> Content:
    """The command for each engine, and why serving may not be worth it."""
    if not view.result.serve:
        return None
    warning = serve_warning(view)
    return [*([Piece("warning", warning)] if warning else []), Piece("serve", view.result.serve)]


@section("words", "Glossary", order=100, nav="Glossary")
def words(view: View) -> Content:
    return [Piece("facts", list(GLOSSARY.items()))]


def serve_warning(view: View) -> str:
    """Why serving the draft may not be worth it; "" if the draft pays off."""
    verdict = view.verdict
    reasons = []
    if verdict.outcome == "loss":
        reasons.append("this draft is worse than the undistilled one")
    elif view.draft.step == 0:
        reasons.append("this draft is the undistilled one")
    elif verdict.outcome == "no_measurable_gain":
        reasons.append("this draft is not certainly better than the undistilled one")
    if verdict.outcome == "baseline_better":
        reasons.append(f"{verdict.to_run()} is faster and needs no training")
    elif verdict.outcome == "best_together":
        reasons.append("the draft is faster with prompt lookup before it (understudy generate, or an engine with both)")
    if verdict.pays is False or verdict.outcome == "no_speed":
        reasons.append("the target with this draft by itself was not certainly faster than the target alone")
    if reasons:
        return f"Before serving it: {'; '.join(reasons)}. The commands are listed anyway."
    if verdict.pays is None:
        return "Not timed: it was not measured whether the target is faster with this draft."
    return ""


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


def agreement_lines(result: Result) -> list[str]:
    """Live decoding compared with replay of its own text, at checkpoints and in the verdict."""
    verdict, lines = result.verdict, list[str]()
    if fresh := [step.fresh_check for step in verdict.checkpoints if step.fresh_check]:
        lines.append(
            f"At {len(fresh)} checkpoints the target's server answered up to {max(check.prompts for check in fresh)} prompts "
            f"again, |z| of alpha at most {max(abs(check.z) for check in fresh):.1f}; "
            f"{sum(not check.agrees for check in fresh) or 'none'} disagreed with the stored responses."
        )
    if live := [step.live_check for step in verdict.checkpoints if step.live_check and step.live_check.replay]:
        replays = [check.replay for check in live if check.replay]
        scores = [abs(replay.z) for replay in replays if replay.z is not None]
        lines.append(
            f"Each of {len(live)} checkpoints decoded up to {max(check.prompts for check in live)} prompts live"
            f"{f', |z| at most {max(scores):.1f}' if scores else ''}; "
            f"{sum(not replay.agrees for replay in replays) or 'none'} disagreed with replay."
        )
    if verdict.replay_check and (tokens := verdict.live_tokens):
        tau = tokens / verdict.replay_check.live_blocks
        lines.append(
            f"The verdict decoded all prompts: tau {tau:.2f}, {agreement_words(verdict.replay_check, tokens)}."
        )
    return lines or ["Live decoding was not compared with replay, because nothing was decoded live."]


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
        ratio = f"c = {costs.cost_ratio:.3f}{of_block(view)}"
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
