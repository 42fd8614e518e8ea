"""`understudy compare A B ...`: drafts side by side on the same held-out responses, paired prompt by prompt; a gate for CI.

`prompt-lookup` and `lookup+draft:DRAFT` are ways too, at the n-gram sizes that replay of the text finds best at the gamma compared at;
they have no alpha. `parallel:DRAFT` and `lookup+parallel:DRAFT` draft a block in one pass, which needs a draft trained for it.
Alpha and tau come from replay, so the target's weights are needed only to time the drafts, and drafts that were never
trained here are judged like any other. Differences are against the first draft, their intervals widened for the number
of drafts (Bonferroni); those by domain also for the number of domains.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from data.files import read_manifest
from distill.commands.compare.comparison import (
    Comparison,
    JudgedGate,
    Scored,
    comparison,
    way_of,
    with_lookup,
)
from distill.commands.compare.options import CompareOptions
from distill.commands.compare.screen import print_comparison
from distill.commands.compare.served import compare_served, is_url
from distill.commands.output import check_known, check_writable, write_asked
from distill.config.layout import RESPONSES, best_student, find_student, run_of
from distill.run.heldout_set import HeldoutSet, load_heldout_set
from distill.run.responses import decode_settings
from distill.run.session import context_limit
from distill.verdict.scored_drafts import step_costs, typical_length
from speculative.drafters.draft import Draft, Drafting
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.measure.cost import StepCosts
from speculative.measure.engine_costs import EngineCosts
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import RULES
from speculative.rules.verify import draft_settings_for

METRICS = ("alpha", "tau", "speed_up")
OTHERS = "others"  # --fail-below others: exit 1 when another way is certainly better


@dataclass(frozen=True)
class Gate:
    """One `--fail-below`: the first draft's metric, or the lower end of its interval, must reach the bound."""

    text: str
    metric: str
    lower_end: bool
    bound: float


def compare(options: CompareOptions, console: Console) -> int:
    """Run `compare_command`, or `compare_served` if a way is a URL, print the result and return the exit status."""
    own = [name for name in options.drafts if not is_url(name)]
    if len(own) < len(options.drafts):
        _refuse_early(options)
        return compare_served(options, load_text(replace(options, drafts=own)), console)
    result, status = compare_command(options)
    print_comparison(console, result)
    return status


def compare_command(options: CompareOptions) -> tuple[Comparison, int]:
    """(the comparison, exit status 1 if a gate fails and 0 otherwise); writes --out.

    Raises UserError: fewer than two drafts, no run to take the text from, a draft of another target or vocabulary, an invalid gate.
    """
    limits = [text for text in options.fail_below or () if text != OTHERS]
    gates = [parse_gate(text, options.timing, options.drafts[:1]) for text in limits]
    _refuse_early(options)
    text = load_text(options)
    gamma = options.gamma or text.config.judge.gamma
    with text.target.single_load():
        scored_ways = read_drafts(text, options.drafts, gamma, options.timing)
    result = comparison(text, scored_ways, gamma)
    judged, failures = judge_gates(result, gates, OTHERS in (options.fail_below or ()))
    result = result.model_copy(update={"gates": judged, "failures": failures})
    write_asked("--out", options.out, result.record())
    return result, 1 if failures else 0


def _refuse_early(options: CompareOptions) -> None:
    if len(options.drafts) < 2:
        raise UserError("compare needs at least two drafts: runs, checkpoints, model directories or hub ids")
    if all(not is_url(name) and way_of(name).draft is None for name in options.drafts):
        raise UserError("compare: one way needs a draft, e.g. compare prompt-lookup runs/demo lookup+draft:runs/demo")
    check_known("--rule", options.rule, ("", *RULES))
    check_writable("--out", options.out)


def parse_gate(text: str, timing: bool = True, first: Sequence[str] = ()) -> Gate:
    """`tau=2.1` or `tau.ci_low=2.0`, about the first way.

    Raises UserError: another metric, no number, a speed that is not measured, or alpha of a way without one.
    """
    name, _, number = text.partition("=")
    metric, dot, end = name.strip().partition(".")
    if metric not in METRICS or (dot and end != "ci_low"):
        raise UserError(
            f"--fail-below {text}: the metrics are {', '.join(METRICS)}, each also with .ci_low for the lower end of its interval, "
            "e.g. tau=2.1 or tau.ci_low=2.0"
        )
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise UserError(f"--fail-below {text}: {number or 'nothing'!r} is not a number; write e.g. {name}=2.1")
    if metric == "speed_up" and not timing:
        raise UserError(f"--fail-below {text}: the speed-up is not known with --no-timing; remove one of the two")
    if metric == "alpha" and any(not is_url(name) and way_of(name).recipe.looks_up for name in first):
        raise UserError(f"--fail-below {text}: {first[0]} has no alpha; use tau or speed_up, or name a draft first")
    return Gate(text, metric, bool(dot), bound)


def target_of(run: Path) -> str | None:
    """Fingerprint of the target that answered a run's prompts; None if none are answered yet."""
    manifests = map(read_manifest, sorted((run / RESPONSES).glob("*/")))
    return next((str(manifest["target"]) for manifest in manifests if "target" in manifest), None)


def load_text(options: CompareOptions) -> HeldoutSet:
    """The held-out responses to judge on: that of --on, or of the first draft that is a run.

    Raises UserError: none of the drafts is a run, a rule the run has no text for, a draft of another target.
    """
    paths = [path for name in options.drafts if (path := way_of(name).draft) is not None]
    runs = [(path, run) for path in paths if (run := run_of(path)) is not None]
    home = options.on or next((run for _, run in runs if target_of(run) is not None), None)
    if home is None:
        raise UserError(f"none of {', '.join(paths) or 'the URLs'} is a run with held-out responses; give --on RUN")
    rule: Any = options.rule or None
    text = load_heldout_set(home, rule, options.trust_remote_code)
    if rule is not None:
        draft_settings_for(text.rule, text.sampling)
    wanted = str(text.manifest["target"])
    # With --on the user has said whose text counts: a draft of an older target is then a draft like any other.
    for path, run in runs if options.on is None else []:
        other = target_of(run)
        if other is not None and other != wanted:
            raise UserError(
                f"{path}: distilled for another target (fingerprint {other}; {home} has {wanted}); to judge it as a "
                f"draft for that target, add --on {home}"
            )
    return text


def read_drafts(text: HeldoutSet, names: Sequence[str], gamma: int, timing: bool) -> list[Scored]:
    """Every way: its draft scored on the text and, if asked, timed next to the target. One draft is in memory at a time.

    Drafts of the same shape and way of drafting share one measurement, because their steps cost the same. All share the target's
    times, so two drafts differ only by their own steps.

    Raises UserError: a draft that does not exist, has another vocabulary or too short a context, or cannot draft this way.
    """
    if timing and text.config.target.at_server:
        raise UserError(f"{text.run}: the target is on a server, so nothing can be timed here; add --no-timing")
    drafts: dict[tuple[str, Drafting], Scored] = {}
    by_shape: dict[Any, StepCosts] = {}
    for name in names:
        (_, path), drafting = way_of(name), way_of(name).drafting
        if path is None or (find_student(path), drafting) in drafts:
            continue
        draft = _load(text, path, drafting)
        scores = score_tokens(draft.model, text.responses, text.sampling, offsets=draft.offsets(gamma))
        if timing and draft.shape not in by_shape:
            with text.target.loaded() as target:
                by_shape[draft.shape] = _timed(text, target, draft, gamma)
        engine = EngineCosts.stored(run) if (run := run_of(path)) else None
        scored = Scored(
            name=path,
            path=path,
            parameters=draft.model.num_parameters(),
            scores=scores,
            costs=None,
            shape=draft.shape,
            engine=engine if engine and engine.costs[0].parallel == draft.parallel else None,
        )
        drafts[find_student(path), drafting] = scored
    costs = _shared_target(by_shape)
    scored_ways = []
    for number, name in enumerate(names):
        path = way_of(name).draft
        own = None if path is None else drafts[find_student(path), way_of(name).drafting]
        price = next(iter(costs.values()), None) if own is None else costs.get(own.shape)
        found = with_lookup(own, text.responses, text.rule, gamma, price) if way_of(name).recipe.looks_up else own
        assert found is not None
        shown = name if name not in names[:number] else f"{name} #{number + 1}"
        scored_ways.append(replace(found, name=shown, path=name, costs=price))
    return scored_ways


def _load(text: HeldoutSet, path: str, drafting: Drafting) -> Draft:
    run = run_of(path)
    if run == Path(path) and not best_student(run).is_dir():
        raise UserError(f"{path}: this run has no best checkpoint yet; finish it, or give one of its checkpoints")
    try:
        draft = Draft(text.draft(path), drafting)
    except UserError as error:
        said = str(error).removeprefix("parallel draft: ")
        raise UserError(said if path in said else f"{path}: {said}") from error
    limit = max_positions(draft.model.config)
    longest = max(len(one.prompt_ids) + len(one.response_ids) for one in text.responses)
    if limit is not None and limit < longest:
        raise UserError(f"{path}: its context is {limit} tokens, but the text of {text.run} needs {longest}")
    return draft


def _timed(text: HeldoutSet, target: PreTrainedModel, draft: Draft, gamma: int) -> StepCosts:
    config = text.config
    positions = (max_positions(model.config) for model in (target, draft.model))
    settings = decode_settings(config.serving, config.seed, text.target).under(text.rule, gamma)
    context = context_limit(*positions, config.data.context_length)
    timed = step_costs(config.judge, settings, target, draft, context, typical_length(text.responses))
    return timed.of_text(text.responses)


def _shared_target(by_shape: Mapping[Any, StepCosts]) -> dict[Any, StepCosts]:
    """The costs with the target's side the same for all: the median over the measurements."""
    if not by_shape:
        return {}
    measured = list(by_shape.values())
    gammas = set.intersection(*(set(costs.verify_seconds) for costs in measured))
    target = statistics.median(costs.target_seconds for costs in measured)
    verify = {g: statistics.median(costs.verify_seconds[g] for costs in measured) for g in sorted(gammas)}
    return {shape: replace(costs, target_seconds=target, verify_seconds=verify) for shape, costs in by_shape.items()}


def judge_gates(result: Comparison, gates: Sequence[Gate], others_too: bool) -> tuple[list[JudgedGate], list[str]]:
    """(every gate with its value, one line for each failed gate). Gates are about the first draft."""
    first, lines, judged = result.row(result.against), [], []
    for gate in gates:
        value = getattr(first, f"{gate.metric}_ci")[0] if gate.lower_end else getattr(first, gate.metric)
        shut = value < gate.bound
        judged.append(JudgedGate(condition=gate.text, metric=gate.metric, value=value, bound=gate.bound, failed=shut))
        if shut:
            what = f"the lower end of the 95 % interval of {gate.metric}" if gate.lower_end else gate.metric
            at = "" if gate.metric == "alpha" else f" at gamma {result.gamma}"
            lines.append(f"{first.way}: {what}{at} is {value:.4g}, below {gate.bound:g} (--fail-below {gate.text})")
    for other in result.differences_on() if others_too else []:
        if other.certain_tau == "gain":
            lines.append(
                f"{first.way}: tau at gamma {result.gamma} is certainly worse than that of {other.way}, by "
                f"{other.tau:.3f} (--fail-below others)"
            )
    return judged, lines
