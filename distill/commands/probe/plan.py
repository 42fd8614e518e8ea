"""The options of a probe: temperatures, gammas, batch sizes, given times."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from distill.commands.output import numbers_of
from distill.commands.probe.options import ProbeOptions
from distill.config.layout import run_of
from distill.run.verdict_record import WAYS
from speculative.drafters.draft import Draft
from speculative.errors import UserError
from speculative.measure.cost import StepCosts, given_costs
from speculative.measure.engine_costs import EngineCosts
from speculative.measure.metrics import MOST_GAMMA
from speculative.rules.rule import Rule

GIVEN_GAMMA, TIMED_CONTEXT = 16, 128  # costs given by hand are extended to this gamma


# Both characters that look like a micro sign: U+00B5, which keyboards have, and the Greek letter.
SECONDS_OF = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9, "": 1e-3}
_DURATION = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z\u00b5\u03bc]*)\s*", re.IGNORECASE)


def parse_seconds(text: str, option: str) -> float:
    """Seconds of a duration: a number followed by s, ms, us, µs or ns, or a plain number of milliseconds.

    Raises UserError, with the option in the message, for anything else and for a time that is not above 0 or not finite.
    """
    match = _DURATION.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in SECONDS_OF:
        raise UserError(f"{option} {text}: give a time such as 25ms, 0.025s or 300us (a plain number is milliseconds)")
    seconds = float(match.group(1)) * SECONDS_OF[unit]
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"{option} {text}: a time must be above 0 and finite")
    return seconds


@dataclass(frozen=True)
class Plan:
    """The parsed options. `lead`: the temperature and rule of the costs, the decision and the sentences."""

    temperatures: list[float]
    gammas: list[int]
    batch_sizes: list[int]
    given: StepCosts | None
    context: int = TIMED_CONTEXT
    engine: EngineCosts | None = None

    @property
    def lead(self) -> tuple[float, Rule]:
        sampled = [value for value in self.temperatures if value > 0]
        temperature = sampled[0] if sampled else 0.0
        return temperature, Rule.usual(temperature)

    def costs_of(self, draft: Draft | None, load: int) -> StepCosts | None:
        """The given costs of a draft: at a load, of the engine whose file was given. A draft call takes the
        same time for a token and for a block.

        Raises UserError: the engine was timed with a draft that proposes the other way.
        """
        if self.engine is not None:
            costs = next(one for one in self.engine.costs if one.batch_size == load)
            if draft is not None and draft.parallel != costs.parallel:
                way = WAYS["parallel" if costs.parallel else "autoregressive"]
                raise UserError(f"engine_costs.json was timed for `{way}`; run `understudy time` with this draft")
            return costs
        if self.given is None or draft is None or not draft.parallel:
            return self.given
        call, verify = self.given.draft_seconds[1], self.given.verify_seconds[1]
        return given_costs(self.given.target_seconds, call, verify, max(GIVEN_GAMMA, *self.gammas), parallel=True)


def read_plan(options: ProbeOptions) -> Plan:
    """Temperatures, gammas, batch sizes and given costs. Raises UserError for an invalid option."""
    temperatures = numbers_of("--temperatures", options.temperatures, float, 0.0, 100.0)
    gammas = sorted(numbers_of("--gammas", options.gammas, int, 1, MOST_GAMMA))
    batch_sizes = numbers_of("--batch-sizes", options.batch_sizes, int, 1, 4096)
    costs, runs = None, [run for item in options.drafts or () if (run := run_of(item))]
    durations = options.times if "," in options.times else ""
    file = Path(options.times) if options.times else None
    if file is None and len(options.drafts or ()) == len(runs) == 1 and (runs[0] / EngineCosts.FILE).is_file():
        file = runs[0] / EngineCosts.FILE
    if file is not None and not durations:
        engine = EngineCosts.read(file)
        loads, gammas = [item.batch_size for item in engine.costs], list(engine.costs[0].verify_seconds)
        return Plan(temperatures, gammas, loads, engine.costs[0], engine=engine)
    if durations:
        seconds = [parse_seconds(part.strip(), "--times") for part in durations.split(",")]
        if len(seconds) > 3 or min(seconds[2:], default=seconds[0]) < seconds[0]:
            raise UserError(
                f"--times {durations}: give a target step, a draft call and, if known, a verify call, which takes at least as "
                "long as a target step"
            )
        verify = seconds[2] if len(seconds) > 2 else None
        costs, batch_sizes = given_costs(seconds[0], seconds[1], verify, max(GIVEN_GAMMA, *gammas)), [1]
    return Plan(temperatures, gammas, batch_sizes, costs)
