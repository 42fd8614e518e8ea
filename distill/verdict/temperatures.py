"""What temperature does to acceptance: the judged draft on answers that the target gives at each of judge.temperatures."""

from dataclasses import replace

import numpy as np

from distill.models.target import Target
from distill.run.result import TemperatureRow
from distill.verdict.evidence import Evidence
from speculative.evaluate import frozen_responses
from speculative.explain.repetition import repetition
from speculative.measure.cost import best_gamma
from speculative.measure.metrics import rule_curve
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

PROMPTS = 16
MOST_GAMMA = 16


def temperature_rows(evidence: Evidence, target: Target) -> list[TemperatureRow]:
    """One row a temperature, coldest first; empty where judge.temperatures is.

    The target answers the same few held-out prompts at each, at its serving top-p, top-k and min-p; the draft scores
    the answers. Rule `sample`, and `greedy` at 0. Intervals stand alone.
    """
    settings, draft, rows = evidence.question.settings, evidence.best.draft, []
    distinct = list({one.prompt: one for one in evidence.question.frozen}.values())
    # Spread over the set, which is stored longest prompt first.
    chosen = [distinct[place] for place in np.linspace(0, len(distinct) - 1, min(PROMPTS, len(distinct))).astype(int)]
    costs = evidence.best_costs
    for temperature in sorted(set(evidence.question.judge.temperatures)):
        sampling = _sampling(settings.sampling, temperature)
        rule: Rule = "greedy" if sampling.greedy else "sample"
        texts = frozen_responses(
            target.model, [(one.key, one.prompt_ids) for one in chosen], replace(settings, sampling=sampling, rule=rule),
            "held-out", batch_size=evidence.question.judge.batch_size,
        )  # fmt: skip
        gammas = range(1, max(MOST_GAMMA, evidence.question.gamma) + 1)
        scores = score_tokens(draft.model, texts, sampling, offsets=draft.offsets(evidence.question.gamma))
        keys = [text.prompt for text in texts]
        curve = rule_curve(scores, keys, rule, gammas, survival_gamma=evidence.question.gamma)
        taus = dict(zip(curve.gammas, curve.tau, strict=True))
        best: tuple[int | None, float | None] = (None, None)
        if costs is not None:
            best = best_gamma(costs.timed(taus), costs)
        repeated = repetition(texts)
        rows.append(
            TemperatureRow(
                temperature=temperature,
                rule=rule,
                prompts=curve.prompts,
                tokens=curve.tokens,
                alpha=curve.alpha,
                alpha_ci=curve.alpha_ci,
                gamma=evidence.question.gamma,
                tau=taus[evidence.question.gamma],
                tau_ci=curve.tau_ci[curve.gammas.index(evidence.question.gamma)],
                best_gamma=best[0],
                predicted_speed_up=best[1],
                repeated=repeated.repeated,
                looping=repeated.looping,
            )
        )
    return rows


def _sampling(serving: SamplingSettings, temperature: float) -> SamplingSettings:
    return GREEDY if temperature == 0 else replace(serving, temperature=temperature)
