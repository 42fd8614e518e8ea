"""What was run and checked, how to serve the draft, the words of the page."""

import shlex

from distill.report.section import Made, Part, Piece, fine, heading, section
from distill.report.sections.curves import of_block
from distill.report.view import View
from distill.run.result import Result
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
    "speed-up": "Tokens per second over the same target alone. Timed where it was measured; predicted as tau / (gamma c + v), or tau / (c + v) "
    "in one pass a block.",
    "replay": "tau computed from the two models' probabilities along stored text of the target, for every gamma at once.",
    "rule": "How the server accepts. sample: the draft samples; greedy-draft: the draft takes its most probable token; greedy: both do "
    "(temperature 0); block: accepts whole blocks jointly.",
    "[a, b]": "95 % interval, from resampling the held-out prompts.",
}


@section("run", "What was run", order=98, nav="What was run")
def run(view: View) -> Made:
    """Provenance, the config, the checks of the instrument."""
    result = view.result
    parts: list[Part] = [Piece("facts", run_facts(view))]
    if result.files.get("proposals"):
        parts.append(
            fine(f"Every proposed token with its probabilities: {result.files['proposals']} beside result.json.")
        )
    parts += [Piece("config", result.config)] if result.config else []
    return [*parts, heading("Checks of the instrument"), Piece("list", check_lines(result))]


@section("serve", "Serve it", order=99, nav="Serve it")
def serve(view: View) -> Made:
    """What starts each engine with this pair, and why that may not be worth it."""
    if not view.result.serve:
        return None
    warning = serve_warning(view)
    return [*([Piece("warning", warning)] if warning else []), Piece("serve", view.result.serve)]


@section("words", "The words of this page", order=100, nav="Words")
def words(view: View) -> Made:
    """The glossary."""
    return [Piece("facts", list(GLOSSARY.items()))]


def serve_warning(view: View) -> str:
    """Why the commands may not be worth running, "" where the draft pays off."""
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
        reasons.append(
            "with prompt lookup before it the draft is faster than by itself (understudy generate; see what your engine can chain)"
        )
    if verdict.pays is False or verdict.outcome == "no_speed":
        reasons.append("the target with this draft by itself was not certainly faster than the target alone")
    if reasons:
        return f"Before serving it: {'; '.join(reasons)}. The commands are given all the same."
    if verdict.pays is None:
        return "Not timed: whether the target with this draft is faster than alone was not measured."
    return ""


def check_lines(result: Result) -> list[str]:
    """The instrument's own checks, in words; what has no words here is shown as key and value."""
    checks = dict(result.verdict.self_checks)
    lines = []
    if "alpha_replay" in checks:
        size = [f"{checks.pop(key)} {key}" for key in ("prompts", "tokens") if key in checks] + [
            str(checks.pop("dtype", ""))
        ]
        lines.append(
            f"The target as its own draft scores alpha {checks.pop('alpha_replay'):.4f} by replay and "
            f"{checks.pop('alpha_live', float('nan')):.4f} live: 1 is right, within {checks.pop('alpha_tolerance', 0):g} "
            f"({', '.join(part for part in size if part)})."
        )
        for key in ("gamma", "batch_size", "alpha_noise"):
            checks.pop(key, None)
        lines += checks.pop("warnings", [])
    if "greedy_equal" in checks:
        ties, equal = checks.pop("near_ties", None) or [], checks.pop("greedy_equal")
        checks.pop("near_tie_tolerance", None)
        parted = f"; {len(ties)} part at a near-tie of two logits." if ties else "."
        lines.append(
            f"Speculative greedy text equals plain greedy text on {equal} of {equal + len(ties)} prompts{parted}"
        )
    lines += [
        f"{key.replace('_', ' ')}: {value}" for key, value in checks.items() if isinstance(value, str | int | float)
    ]
    return [*(lines or ["No self-check was run here (nothing was decoded)."]), _agreement_line(result)]


def _agreement_line(result: Result) -> str:
    """Live decoding against replay of its own text: both of one run, the last one that was counted."""
    verdict = result.verdict
    judged = [one for one in verdict.checkpoints if one.step == verdict.drafts[-1].step]
    runs = [(verdict.replay_check, verdict.live_tokens), *((one.replay_check, one.live_tokens) for one in judged)]
    check, tokens = next(((check, tokens) for check, tokens in runs if check and tokens), (None, 0))
    start = "Live decoding against replay of its own text:"
    if check is None:
        return f"{start} not compared, no live run was counted."
    return f"{start} tau {tokens / check.live_blocks:.2f} beside {agreement_words(check, tokens)}."


def run_facts(view: View) -> list[tuple[str, str]]:
    """What was run, on what: (name, value), values that are not recorded left out."""
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
    others = {
        key: value for key, value in facts.items() if isinstance(value, str | int | float) and len(str(value)) < 200
    }
    rows += [(key.replace("_", " "), str(value)) for key, value in others.items()]
    return [(name, value) for name, value in rows if value]
