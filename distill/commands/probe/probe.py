"""`understudy probe`: go or no-go for a target and its drafts, before a GPU-hour is spent on distilling."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from transformers import PreTrainedModel

from distill.commands.output import check_writable, write_asked
from distill.commands.probe.memory import device_of, memory_of
from distill.commands.probe.options import ProbeOptions
from distill.commands.probe.plan import GIVEN_GAMMA, TIMED_CONTEXT, Plan, read_plan
from distill.commands.probe.result import ModelFacts, Probe, ProbedDraft, Settings, overall
from distill.commands.probe.screen import Stages, assumptions, busy_machine, print_probe
from distill.commands.probe.texts import ProbeText, answered, chosen_prompts, decode_settings, text_name
from distill.commands.target import open_target
from distill.models.draft import as_served_from, read_draft
from distill.models.load import model_fingerprint, resolve, saved_dtype
from distill.models.target import Target, target_notes
from distill.models.vocabulary import vocabulary_rows
from distill.run.session import context_limit
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, drafts_of
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.explain import ceilings
from speculative.measure.cost import TIMED_BLOCKS, StepCosts, measure_costs
from speculative.measure.effects import rough_detectable
from speculative.measure.measured import TARGET, Measured
from speculative.measure.self_checks import self_checks
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 32


def probe_command(options: ProbeOptions, console: Console) -> None:
    """Probe and print the result; stages are printed on standard error."""
    print_probe(console, probe(options, Console(stderr=True)))


def probe(options: ProbeOptions, console: Console | None = None) -> Probe:
    """Run the probe and write the result to `options.out` if given; stages are printed on `console`.

    A draft that can draft both ways is two drafts; the faster one decides.

    Raises UserError: an invalid option, a missing folder, prompts that do not fit, or no usable draft. SelfCheckError: the judge
    contradicts itself on this target.
    """
    plan, device = read_plan(options), device_of(options.server)
    check_writable("--out", options.out)
    stages = Stages(console)
    with contextlib.ExitStack() as memory:
        with stages("loading"):
            opened = open_target(options.target, options.dtype, options.device)
            target = memory.enter_context(opened.loaded())
            prompts, notes = chosen_prompts(options, opened.tokenizer, opened.facts.context_length)
            notes += target_notes(opened.side, SamplingSettings(plan.lead[0]))
            longest = max(len(ids) for _, ids in prompts) + options.max_tokens
            drafts = [way for path in options.drafts or () for way in _ways(_probed(path, opened, longest))]
        _require_one(drafts)
        served = saved_dtype(target.config) if options.dtype == "auto" else target.dtype
        models = {
            id(probed.draft.model): (probed.name, probed.draft.model)
            for probed in drafts[::-1]
            if probed.draft is not None
        }
        room = None if device is None else memory_of(device, served, target, list(models.values())[::-1])
        with stages("self-check"):
            few = replace(decode_settings(options, opened, plan.lead[0]), gamma=4, seed=0)
            few = replace(few, max_tokens=min(CHECKED_TOKENS, options.max_tokens))
            checks = self_checks(target, prompts[:CHECKED_PROMPTS], few)
        texts = []
        for temperature in plan.temperatures:
            with stages(f"target answers {len(prompts)} prompts at temperature {temperature:g}"):
                texts.append(answered(options, opened, prompts, temperature))
        plan = _within_context(
            plan, [target, *(probed.draft.model for probed in drafts if probed.draft is not None)], notes
        )
        # With a draft, other batch sizes are timed with it.
        own_plan = replace(plan, batch_sizes=plan.batch_sizes[:1]) if drafts else plan
        lead = texts[plan.temperatures.index(plan.lead[0])]
        timed = _timed(own_plan, target, None, [plan.lead[1]], "the target", stages)
        alone = {of: costs.of_text(lead.responses) for of, costs in timed.items()}
        first = next(iter(alone.values()))
        facts = [text.facts(range(1, max(first.verify_seconds) + 1), first) for text in texts]
        lookups = {row.text: row for row, _ in facts}
        for probed in drafts:
            _judge(probed, plan, target, texts, lookups, stages)
        _require_one(drafts)
        planned = None if plan.given is None else ceilings.price_of(TARGET, plan.lead[1].name, plan.given)
        lead_text = text_name(plan.lead[0])
        decision, best, sentence = overall(drafts, lookups[lead_text], planned)
        first_prices = [
            price for probed in drafts for price in probed.prices if price.batch_size == plan.batch_sizes[0]
        ]
        warning = next(about.warning for _, about in facts if about.text == lead_text)
        result = Probe(
            target=_described(options.target, target),
            settings=_settings(options, plan, len(prompts), opened.device),
            checks=dict(checks),
            texts=[about for _, about in facts],
            target_prices=[ceilings.price_of(TARGET, rule.name, costs) for (rule, _), costs in alone.items()],
            lookups=list(lookups.values()),
            drafts=drafts,
            assumptions=assumptions(plan),
            notes=[
                *notes,
                *([f"the target's steps ran as {first.steps}"] if first.steps else []),
                *busy_machine([first.target_seconds, *(price.target_step_seconds for price in first_prices)]),
            ],
            memory=room,
            seconds=stages.seconds,
            decision=decision,
            best=None if best is None else best.name,
            drafting=None if best is None else best.drafting,
            sentence=f"{sentence} Warning: {warning}." if warning else sentence,
        )
    write_asked("--out", options.out, result.record())
    return result


def _settings(options: ProbeOptions, plan: Plan, prompts: int, device: torch.device) -> Settings:
    return Settings(
        options.prompts,
        prompts,
        options.chat,
        options.max_tokens,
        text_name(plan.lead[0]),
        plan.lead[1].name,
        plan.gammas,
        plan.batch_sizes,
        plan.engine.label if plan.engine else "measured" if plan.given is None else "given",
        str(device),
        torch.get_num_threads(),
    )


def _probed(path: str, target: Target, longest: int) -> ProbedDraft:
    """A draft as it would be served, in the dtype that the target is saved in, or the reason why it cannot be.

    Raises UserError for a folder or hub id that cannot be loaded: that is a typing mistake, not a finding.
    """
    model, agreement = read_draft(resolve(path), target)
    probed = ProbedDraft(path, _described(path, model), f"{agreement.verdict}: {agreement.detail}")
    context = probed.model.context
    if agreement.verdict == "refuse":
        probed.refused = (
            f"it does not share the target's vocabulary: {agreement.detail}; choose a draft of the target's family, or carve "
            "one from the target"
        )
    elif context is not None and longest > context:
        probed.refused = (
            f"its context of {context} tokens is too short: the longest prompt and its response need {longest}; lower "
            "--max-tokens or shorten the prompts"
        )
    if probed.refused is not None:
        return probed
    try:
        served = as_served_from(path, model, target)
    except UserError as error:
        probed.refused = f"{str(error).split(';')[0]}: the file is damaged, or its weights are too large for the dtype it is served in"
        return probed
    with target.loaded() as whole:
        if model_fingerprint(served) == model_fingerprint(whole):
            probed.notes.append("this is the target itself: everything is accepted and no time is saved")
    probed.draft = Draft(served)
    return probed


def _ways(probed: ProbedDraft) -> list[ProbedDraft]:
    """The draft token by token, and a second way that drafts a block in one pass if the config has a mask token."""
    if probed.draft is None:
        return [probed]
    note = "distilled figures are estimated from drafts that draft token by token, with the same gain at every offset"
    ways = [probed]
    for draft in drafts_of(probed.draft.model)[1:]:
        way = ProbedDraft(probed.name, probed.model, probed.vocabulary, draft=draft, notes=[note])
        way.name = f"{probed.name}, {way.drafting}"
        ways.append(way)
    return ways


def _require_one(drafts: Sequence[ProbedDraft]) -> None:
    """Raises UserError with the reasons when drafts were given and none can be used."""
    if drafts and all(probed.draft is None for probed in drafts):
        reasons = [f"{probed.name}: {probed.refused}" for probed in drafts]
        raise UserError(f"no draft can be used: {'; '.join(reasons)}" if len(reasons) > 1 else f"draft {reasons[0]}")


def _described(name: str, model: PreTrainedModel) -> ModelFacts:
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    context, rows = max_positions(model.config), vocabulary_rows(model.config)
    return ModelFacts(name, model.num_parameters(), layers, context, rows, str(model.dtype).removeprefix("torch."))


def _within_context(plan: Plan, models: Sequence[PreTrainedModel], notes: list[str]) -> Plan:
    """The plan with the gammas and the context that the shortest model can be timed at."""
    limit = context_limit(*(max_positions(model.config) for model in models))
    gammas = [gamma for gamma in plan.gammas if (TIMED_BLOCKS + 3) * (gamma + 1) < limit - 32] or [1]
    if plan.given is None and gammas != plan.gammas:
        notes.append(f"gammas above {gammas[-1]} are not timed: {TIMED_BLOCKS} blocks exceed the context of {limit}")
    context = max(2, min(TIMED_CONTEXT, limit - (TIMED_BLOCKS + 3) * (gammas[-1] + 1)))
    return replace(plan, gammas=gammas, context=context)


def _timed(
    plan: Plan, target: PreTrainedModel, draft: Draft | None, rules: Sequence[Rule], name: str, stages: Stages
) -> dict[tuple[Rule, int], StepCosts]:
    """Costs by rule at the first batch size, and of the leading rule at the others."""
    first = plan.batch_sizes[0]
    cells = [(rule, first) for rule in rules] + [(plan.lead[1], size) for size in plan.batch_sizes[1:]]
    given = {(rule, size): costs for rule, size in cells if (costs := plan.costs_of(draft, size)) is not None}
    if given:
        return given
    with stages(f"timing {name}"):
        return {
            (rule, size): measure_costs(
                target,
                draft,
                DecodeSettings(SamplingSettings(0.0 if rule.greedy else plan.lead[0] or 1.0), rule=rule),
                gammas=plan.gammas,
                batch_size=size,
                context=plan.context,
            )
            for rule, size in cells
        }


def _judge(
    probed: ProbedDraft,
    plan: Plan,
    target: PreTrainedModel,
    texts: Sequence[ProbeText],
    lookups: Mapping[str, Measured],
    stages: Stages,
) -> None:
    """Fill a draft's record: scores from one pass per temperature for every rule, times, and the figures that follow from both."""
    draft, name = probed.draft, probed.name
    if draft is None:
        return
    most = max(GIVEN_GAMMA if plan.given else 1, *plan.gammas)
    load = plan.batch_sizes[0]
    rules = list(dict.fromkeys([plan.lead[1], *(rule for text in texts for rule in text.rules)]))
    try:
        with stages(f"{name} reads the answers"):
            offsets = draft.offsets(most, least=most)
            scores = [score_tokens(draft.model, text.responses, text.sampling, offsets=offsets) for text in texts]
        shown = texts[plan.temperatures.index(plan.lead[0])].responses
        costs = {
            of: scores_of_text.of_text(shown)
            for of, scores_of_text in _timed(plan, target, draft, rules, name, stages).items()
        }
    except UserError as error:
        probed.refused, probed.draft = str(error), None
        return
    for text, scores_of_text in zip(texts, scores, strict=True):
        for rule in text.rules:
            responses = text.responses if rule == text.rules[0] else None
            outlook = ceilings.draft_outlook(
                scores_of_text,
                text.peaks,
                text.keys,
                costs[rule, load],
                text.row(name, rule.name, load),
                lookups[text.name].speed_up or 1.0,
                responses,
            )
            probed.outlooks.append(outlook)
            if (text.sampling.temperature, rule) == plan.lead:
                probed.lead = outlook
                probed.detectable_alpha = rough_detectable(
                    [one.accept_probs(rule) for one in scores_of_text], text.keys
                )
    lead = probed.lead
    assert lead is not None
    probed.prices = [ceilings.price_of(name, rule.name, of) for (rule, _), of in costs.items()]
    probed.at_loads = [ceilings.at_load(lead.now, lead.taus, of) for (_, size), of in costs.items() if size != load]
