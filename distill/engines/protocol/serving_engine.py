"""The engine that a run's draft is made for (serving.engine): it sets the rule, and refuses what it cannot serve."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distill.config.layout import EXPORT
from distill.config.run import RunConfig
from distill.config.sections import did_you_mean
from distill.engines.protocol.engine import Engine, known_engines
from distill.engines.protocol.facts import EngineFacts, gather_facts
from distill.engines.protocol.verdict import check
from distill.models.target import TargetSide
from speculative.errors import UserError


def serving_engine(config: RunConfig) -> Engine | None:
    """The engine of serving.engine; None if the config names none. Raises UserError for an unknown name."""
    engines = {engine.key: engine for engine in known_engines().values()}
    if (key := config.serving.engine) is None:
        return None
    if key not in engines:
        raise UserError(f"serving.engine: unknown engine {key!r}: {did_you_mean(key, engines)}")
    return engines[key]


def for_engine(config: RunConfig) -> RunConfig:
    """The config with the engine's default rule, unless it names a rule itself.

    Raises UserError: the engine is unknown, does not accept by the named rule, or cannot serve these settings.
    """
    engine = serving_engine(config)
    if engine is None:
        return config
    sampling, rules = config.serving.sampling, engine.rules_at(config.serving.sampling)
    settings = EngineFacts(
        target=config.target.path,
        draft=str(config.folder / EXPORT),
        gamma=config.judge.gamma,
        draft_quantised=config.export.quantize is not None,
        sampling=sampling,
    )
    reasons = engine.refusals(settings)
    if config.student.parallel and not engine.one_pass:
        reasons = [*reasons, "it drafts token by token; leave student.parallel out"]
    _require(engine, reasons)
    for key, rule in (("serving.rule", config.serving.rule), ("judge.rule", config.judge.rule)):
        if rule is not None and rule not in rules:
            known = f"{engine.name} accepts by {' or '.join(rules)} at these settings"
            raise UserError(f"{key}: {rule}, but {known}; leave {key} out, or serving.engine")
    serving = config.serving.model_copy(update={"rule": config.serving.rule or rules[0]})
    return config.model_copy(update={"serving": serving})


def pair_notes(config: RunConfig, target: TargetSide, student: Any) -> list[str]:
    """What to know of serving this pair with the engine, as lines; none without an engine or a student.

    Raises UserError: the engine cannot serve the pair.
    """
    engine = serving_engine(config)
    if engine is None or student is None:
        return []
    # An export has the target's tokenizer, ids, rows and dtype.
    draft = replace(target, config=student.config)
    how = {"gamma": config.judge.gamma, "sampling": config.serving.sampling}
    facts = gather_facts(target, draft, str(config.folder / EXPORT), **how)
    facts = replace(
        facts,
        draft_rows=facts.target_rows,
        draft_quantised=config.export.quantize is not None,
        differences={},
        dtypes=("", ""),
    )
    verdict = check(engine.name, facts)
    _require(engine, verdict.reasons)
    rule = f"{engine.name} accepts by rule {config.judge_rule}"
    return [rule, *(f"warning: {engine.name} {verdict.version}: {warning}" for warning in verdict.warnings)]


def _require(engine: Engine, reasons: Sequence[str]) -> None:
    if reasons:
        raise UserError(f"serving.engine: {engine.name} cannot serve this run: {'; '.join(reasons)}")
