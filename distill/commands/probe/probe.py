"""`understudy probe`: go or no-go for a target and its candidate drafts, before a GPU-hour is spent on distilling."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source
from data.prompts.split import content_hash
from distill.commands.generate.generate import place_of
from distill.commands.options import STDLIB, ProbeOptions
from distill.commands.output import check_writable, write_asked
from distill.commands.probe.memory import Device, device_of, memory_record
from distill.commands.probe.plan import MOST_GAMMA, TIMED_CONTEXT, Plan, read_plan
from distill.commands.probe.rivals import repetition_of, rival_rows
from distill.commands.probe.screen import (
    Stages,
    assumptions,
    busy_machine,
    draft_sentence,
    overall_sentence,
    print_probe,
    ways_sentence,
)
from distill.config.target import TargetConfig
from distill.models.draft import as_exported, read_draft
from distill.models.load import model_fingerprint, resolve, saved_dtype
from distill.models.target import Target
from distill.models.vocabulary import vocabulary_rows
from distill.run.prompts import asked_rows, render_rows
from distill.run.session import context_limit
from distill.run.verdict_record import WAYS
from speculative.decoder.responses import DecodeSettings, Prompt
from speculative.drafters.draft import Draft, drafts_of
from speculative.drafters.parallel import Drafting
from speculative.engine.models import end_token_ids, max_positions
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, frozen_responses
from speculative.explain import ceilings
from speculative.measure.cost import StepCosts, best_gamma, measure_costs
from speculative.measure.effects import rough_detectable
from speculative.measure.replay import law_of
from speculative.measure.self_checks import self_checks
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule, rules_of_text
from speculative.rules.sampling import SamplingSettings

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 32
TIMED_BLOCKS = 8


@dataclass
class _Candidate:
    """A draft that was asked about; `model` is None and `record["refused"]` says why when it cannot be used.

    One that can draft both ways is two, of one model: see `_ways`.
    """

    record: dict[str, Any]
    model: PreTrainedModel | None
    costs: list[StepCosts] = field(default_factory=list)


@dataclass(frozen=True)
class _Text:
    """The target's answers at one temperature, and how it would have drafted for itself."""

    temperature: float
    sampling: SamplingSettings
    responses: list[HeldoutResponse]
    peaks: list[ceilings.TargetPeaks]

    @property
    def rules(self) -> tuple[Rule, ...]:
        return rules_of_text(law_of("sample", self.sampling))

    @property
    def keys(self) -> list[Any]:
        return [response.prompt for response in self.responses]


def probe_command(options: ProbeOptions, console: Console) -> None:
    """Probes, and prints what was found; stages are named on standard error."""
    print_probe(console, probe(options, Console(stderr=True)))


def probe(options: ProbeOptions, console: Console | None = None) -> dict[str, Any]:
    """Everything the probe found as plain JSON, written to `options.out` too when that is given.

    Stages are named on `console`. Keys: target, settings, checks, texts, costs (of the target alone), lookup and
    rivals, repetition and
    greedy_ceilings by temperature, drafts (each: refused, drafting, vocabulary, costs by rule and batch size, cells by temperature
    and rule, lead, decision, go, sentence), notes, seconds by stage, and of the best draft decision, go, best, drafting, sentence.
    A draft that can draft both ways has two rows there, and is the faster of them in the decision.
    `decision` is one of `ceilings.DecisionWord`, or `no_draft`. Decisions and speed-ups are for the first batch size.

    Raises:
        UserError: an option that cannot be, a folder that is not there, prompts that do not fit, no draft that can be used.
        SelfCheckError: the judge contradicts itself on this target.
    """
    plan, device = read_plan(options), device_of(options)
    check_writable("--out", options.out)
    stages = Stages(console)
    with stages("loading"):
        place = place_of(options.device)
        opened = Target(TargetConfig(path=options.target, dtype=options.dtype), place, what="target")  # type: ignore[arg-type]
        target = opened.model
        prompts, notes = _prompts(options, opened.tokenizer, opened.facts.context_length)
        longest = max(len(ids) for _, ids in prompts) + options.max_tokens
        candidates = [way for path in options.drafts or () for way in _ways(_candidate(path, opened, longest))]
    _require_one(candidates)
    settings = _decode_settings(options, target, plan.lead[0])
    with stages("self-check"):
        few = DecodeSettings(
            settings.sampling, 4, plan.lead[1], min(CHECKED_TOKENS, options.max_tokens), settings.eos_ids
        )
        checks = self_checks(target, prompts[:CHECKED_PROMPTS], few)
    texts = [_text(options, target, prompts, temperature, stages) for temperature in plan.temperatures]
    plan = _with_room(plan, [target, *(one.model for one in candidates if one.model is not None)], notes)
    # With a draft, other batch sizes are timed with it.
    own_plan = replace(plan, batch_sizes=plan.batch_sizes[:1]) if candidates else plan
    alone = _measured(own_plan, target, None, [plan.lead[1]], "the target", stages)
    first = next(iter(alone.values()))
    gammas = range(1, max(first.verify_seconds) + 1)
    lookup = {text.temperature: ceilings.lookup_outlook(text.responses, text.keys, gammas, first) for text in texts}
    for candidate in candidates:
        _judge(candidate, plan, target, texts, lookup, stages)
    _require_one(candidates)
    records = [candidate.record for candidate in candidates]
    result: dict[str, Any] = {
        "format": 1,
        "target": {**_described(options.target, target), "dtype": str(target.dtype).removeprefix("torch.")},
        "settings": _settings_record(options, plan, prompts, place),
        "checks": checks,
        "texts": [
            {"temperature": text.temperature, "tokens": sum(len(response.response_ids) for response in text.responses)}
            for text in texts
        ],
        "costs": {
            "given": plan.given is not None,
            "assumptions": assumptions(plan.given is not None, options.t_verify, plan.context),
            "target": [ceilings.cost_facts(one) for one in alone.values()],
        },
        "rivals": rival_rows(lookup, records),
        "repetition": [{"temperature": text.temperature, **repetition_of(text.responses)} for text in texts],
        "lookup": [{"temperature": temperature, **facts} for temperature, facts in lookup.items()],
        "greedy_ceilings": [
            {"temperature": text.temperature, **ceilings.greedy_ceiling(text.peaks, text.keys, gammas)}
            for text in texts
            if not text.sampling.greedy
        ],
        "drafts": records,
        "notes": [*notes, *busy_machine(_lead_seconds(plan, candidates, first))],
        "memory": _memory(device, options.dtype, target, candidates),
        "seconds": stages.seconds,
    }
    warning = next(facts["warning"] for facts in result["repetition"] if facts["temperature"] == plan.lead[0])
    result |= _overall(records, lookup[plan.lead[0]]["speed_up"], plan.given, warning)
    write_asked("--out", options.out, result)
    return result


def _memory(
    device: Device | None, dtype: str, target: PreTrainedModel, candidates: Sequence[_Candidate]
) -> dict[str, Any] | None:
    """What the pair takes as it is served: in the dtype that the target is saved in, or the one asked for."""
    if device is None:
        return None
    served = saved_dtype(target.config) if dtype == "auto" else target.dtype
    drafts = {id(one.model): (one.record["name"], one.model) for one in reversed(candidates) if one.model is not None}
    return memory_record(device, served, target, list(drafts.values())[::-1])


def _prompts(
    options: ProbeOptions, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> tuple[list[Prompt], list[str]]:
    """At most `count` distinct prompts from all over the source, and what a reader should know of them."""
    embedded = options.prompts == STDLIB
    room = (context or 1 << 20) - options.max_tokens
    if room < 1:
        raise UserError(
            f"--max-tokens {options.max_tokens} leaves no room for a prompt in the target's context of {context}: lower it"
        )
    if embedded:
        rows = sorted(load_source(PromptSource(path=STDLIB, split="heldout")), key=content_hash)[: 4 * options.count]
        rows = [replace(row, origin=f"prompt-{number}") for number, row in enumerate(rows, start=1)]
    else:
        rows, _ = asked_rows(options.prompts, options.prompt_column, options.messages_column)
    prompts = render_rows(rows, tokenizer, options.chat)
    distinct = list({tuple(ids): (key, ids) for key, ids in reversed(prompts)}.values())[::-1]
    if embedded:
        distinct = [prompt for prompt in distinct if len(prompt[1]) <= room] or distinct
        chosen = distinct[: options.count]
    else:
        order = np.random.default_rng(options.seed).permutation(len(distinct))[: options.count]
        chosen = [distinct[index] for index in sorted(order)]
    for key, ids in chosen:
        if len(ids) > room:
            raise UserError(
                f"prompt {key} has {len(ids)} tokens; with --max-tokens {options.max_tokens} that exceeds the target's "
                f"context of {context}: shorten the prompt or lower --max-tokens"
            )
    notes = []
    if len(chosen) < options.count:
        notes.append(f"{len(chosen)} distinct prompts, not the {options.count} asked for: intervals are wider")
    return chosen, notes


def _candidate(path: str, target: Target, longest: int) -> _Candidate:
    """A draft as it would be served, in the dtype that the target is saved in, or the reason why it cannot be.

    Raises UserError for a folder or hub id that cannot be loaded: that is a typing mistake, not a finding.
    """
    model, agreement = read_draft(resolve(path), target)
    vocabulary = {"verdict": agreement.verdict, "detail": agreement.detail}
    facts = _described(path, model) | {"drafting": "autoregressive"}
    record: dict[str, Any] = {**facts, "refused": None, "notes": [], "vocabulary": vocabulary}
    context: int | None = record["context"]
    if agreement.verdict == "refuse":
        record["refused"] = (
            f"it does not share the target's vocabulary: {agreement.detail}; choose a draft of the target's family, or carve one from the target"
        )
    elif context is not None and longest > context:
        record["refused"] = (
            f"its context of {context} tokens is too short: the longest prompt needs {longest} with its response; lower --max-tokens or shorten the prompts"
        )
    if record["refused"] is not None:
        return _Candidate(record, None)
    try:
        served = as_exported(model, target)
    except UserError as error:
        record["refused"] = (
            f"{str(error).split(';')[0]}: the file is damaged, or its numbers are too large for the dtype it is served in"
        )
        return _Candidate(record, None)
    if model_fingerprint(served) == target.facts.fingerprint:
        record["notes"].append("it is the target itself: it accepts everything and saves nothing")
    return _Candidate(record, served)


def _ways(candidate: _Candidate) -> list[_Candidate]:
    """The candidate drafting token by token, and as another one in one pass a block where its config names a mask token."""
    if candidate.model is None or len(drafts_of(candidate.model)) == 1:
        return [candidate]
    own = {"name": f"{candidate.record['name']}, {WAYS['parallel']}", "drafting": "parallel"}
    notes = ["what distilling would bring it is told from drafts that draft token by token, at every offset alike"]
    return [candidate, _Candidate({**candidate.record, **own, "notes": notes}, candidate.model)]


def _require_one(candidates: Sequence[_Candidate]) -> None:
    """Raises UserError with the reasons when drafts were given and none can be used."""
    if candidates and all(candidate.model is None for candidate in candidates):
        reasons = [f"{candidate.record['name']}: {candidate.record['refused']}" for candidate in candidates]
        raise UserError(f"no draft can be used: {'; '.join(reasons)}" if len(reasons) > 1 else f"draft {reasons[0]}")


def _described(name: str, model: PreTrainedModel) -> dict[str, Any]:
    return {
        "name": name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "layers": getattr(model.config.get_text_config(), "num_hidden_layers", None),
        "context": max_positions(model.config),
        "vocabulary_rows": vocabulary_rows(model.config),
    }


def _decode_settings(options: ProbeOptions, target: PreTrainedModel, temperature: float) -> DecodeSettings:
    rule: Rule = "greedy" if temperature == 0 else "sample"
    return DecodeSettings(
        SamplingSettings(temperature), 0, rule, options.max_tokens, end_token_ids(target), options.seed
    )


def _text(
    options: ProbeOptions, target: PreTrainedModel, prompts: list[Prompt], temperature: float, stages: Stages
) -> _Text:
    settings = _decode_settings(options, target, temperature)
    with stages(f"target answers {len(prompts)} prompts at temperature {temperature:g}"):
        responses = frozen_responses(target, prompts, settings, "probe", batch_size=min(32, len(prompts)))
        return _Text(
            temperature, settings.sampling, responses, ceilings.target_peaks(target, responses, settings.sampling)
        )


def _with_room(plan: Plan, models: Sequence[PreTrainedModel], notes: list[str]) -> Plan:
    """The plan with the gammas and the context that the shortest model can be timed at."""
    limit = context_limit(*(max_positions(model.config) for model in models))
    gammas = [gamma for gamma in plan.gammas if (TIMED_BLOCKS + 3) * (gamma + 1) < limit - 32] or [1]
    if plan.given is None and gammas != plan.gammas:
        notes.append(
            f"gammas over {gammas[-1]} are not timed: a context of {limit} has no room for {TIMED_BLOCKS} such blocks"
        )
    context = max(2, min(TIMED_CONTEXT, limit - (TIMED_BLOCKS + 3) * (gammas[-1] + 1)))
    return replace(plan, gammas=gammas, context=context)


def _lead_seconds(plan: Plan, candidates: Sequence[_Candidate], alone: StepCosts) -> list[float]:
    """What one target step took at the first batch size, each time it was measured."""
    measured = [alone, *(costs for candidate in candidates for costs in candidate.costs)]
    return [costs.target_seconds for costs in measured if costs.batch_size == plan.batch_sizes[0]]


def _measured(
    plan: Plan,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    rules: Sequence[Rule],
    name: str,
    stages: Stages,
    drafting: Drafting = "autoregressive",
) -> dict[tuple[str, int], StepCosts]:
    """Costs by rule at the first batch size, and of the leading rule at the others."""
    first = plan.batch_sizes[0]
    asked = [(rule, first) for rule in rules] + [(plan.lead[1], size) for size in plan.batch_sizes[1:]]
    given = plan.costs_of(drafting)
    if given is not None:
        return dict.fromkeys(asked[: len(rules)], given)
    with stages(f"timing {name}"):
        return {
            (rule, size): measure_costs(
                target, None if draft is None else Draft(draft, drafting),
                DecodeSettings(SamplingSettings(0.0 if rule == "greedy" else plan.lead[0] or 1.0), rule=rule),
                gammas=plan.gammas, batch_size=size, context=plan.context,
            )
            for rule, size in asked
        }  # fmt: skip


def _judge(
    candidate: _Candidate,
    plan: Plan,
    target: PreTrainedModel,
    texts: Sequence[_Text],
    lookup: dict[float, dict[str, Any]],
    stages: Stages,
) -> None:
    """Fill a draft's record: one pass per temperature for every rule, its times, and what follows from both."""
    if candidate.model is None:
        return
    record, name, drafting = candidate.record, candidate.record["name"], candidate.record["drafting"]
    offsets = None if drafting == "autoregressive" else MOST_GAMMA if plan.given else max(plan.gammas)
    rules = list(dict.fromkeys([plan.lead[1], *(rule for text in texts for rule in text.rules)]))
    cells = []
    try:
        with stages(f"{name} reads the answers"):
            scores = [score_tokens(candidate.model, text.responses, text.sampling, offsets=offsets) for text in texts]
        costs = _measured(plan, target, candidate.model, rules, name, stages, drafting)
    except UserError as error:
        record["refused"], candidate.model = str(error), None
        return
    candidate.costs = list(costs.values())
    first = plan.batch_sizes[0]
    for text, own in zip(texts, scores, strict=True):
        for rule in text.rules:
            rival = lookup[text.temperature]["speed_up"]
            said = text.responses if rule == text.rules[0] else None
            outlook = ceilings.draft_outlook(own, text.peaks, text.keys, rule, costs[rule, first], rival, said)
            cells.append({"temperature": text.temperature, **outlook})
            if (text.temperature, rule) == plan.lead:
                record["detectable_alpha"] = rough_detectable([one.accept_probs(rule) for one in own], text.keys)
    lead = next(cell for cell in cells if (cell["temperature"], cell["rule"]) == plan.lead)
    taus = {gamma: tau for gamma, tau in zip(lead["curve"]["gammas"], lead["curve"]["tau"], strict=True) if gamma > 0}
    record["costs"] = [{"rule": rule, **ceilings.cost_facts(facts)} for (rule, _), facts in costs.items()]
    for facts, own_costs in zip(record["costs"], candidate.costs, strict=True):
        if facts["rule"] == plan.lead[1]:
            facts["best"] = dict(zip(("gamma", "speed_up"), best_gamma(taus, own_costs), strict=True))
    record |= {"cells": cells, "decision": lead["decision"]}
    record["lead"] = {"alpha": lead["curve"]["alpha"], "alpha_ci": lead["curve"]["alpha_ci"]} | {
        name: lead[name] for name in ("temperature", "rule", "now", "reachable", "ceiling", "headroom", "together")
    }
    record["go"] = lead["decision"] in ceilings.WORTH_DISTILLING
    record["sentence"] = draft_sentence(record, lookup[plan.lead[0]]["speed_up"])


def _settings_record(options: ProbeOptions, plan: Plan, prompts: list[Prompt], place: torch.device) -> dict[str, Any]:
    return {
        "prompts_from": options.prompts,
        "prompts": len(prompts),
        "chat": options.chat,
        "max_tokens": options.max_tokens,
        "temperatures": plan.temperatures,
        "lead": {"temperature": plan.lead[0], "rule": plan.lead[1]},
        "gammas": plan.gammas,
        "batch_sizes": plan.batch_sizes,
        "device": str(place),
        "threads": torch.get_num_threads(),
        "seed": options.seed,
    }


def _overall(
    records: Sequence[dict[str, Any]], lookup: float, given: StepCosts | None, warning: str | None
) -> dict[str, Any]:
    """{decision, go, best, drafting, sentence}: of the draft with the best prospect; without a draft, of the given costs."""
    drafts: list[list[dict[str, Any]]] = []
    for record in records:
        # One pass a block stands behind the same draft token by token.
        if record["drafting"] == "autoregressive":
            drafts.append([])
        if record["refused"] is None:
            drafts[-1].append(record)
    ways = [sorted(of, key=_pace, reverse=True) for of in drafts if of]
    usable, ways_told = [of[0] for of in ways], ""
    if usable:
        best = max(usable, key=lambda record: (record["go"], record["lead"]["reachable"]["speed_up"]))
        facts = {"decision": best["decision"], "go": best["go"], "best": best["name"], "drafting": best["drafting"]}
        ways_told = ways_sentence(next(of for of in ways if of[0] is best))
    else:
        hopeless = given is not None and ceilings.hopeless_because(given) is not None
        facts = {"decision": "hopeless" if hopeless else "no_draft", "go": False, "best": None, "drafting": None}
    planned = None if given is None else ceilings.cost_facts(given)
    sentence = overall_sentence(facts, usable, lookup, planned) + ways_told
    return facts | {"sentence": f"{sentence} But {warning}." if warning else sentence}


def _pace(record: dict[str, Any]) -> tuple[float, float]:
    """Speed-ups of a draft as it is and distilled."""
    return record["lead"]["now"]["speed_up"], record["lead"]["reachable"]["speed_up"]
