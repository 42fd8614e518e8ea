"""Acceptance at other temperatures: the judged draft on the target's answers at each of judge.temperatures."""

from dataclasses import replace

import numpy as np

from distill.models.target import Target
from distill.run.result import TemperatureRow
from distill.verdict.evidence import Evidence, with_speeds
from speculative.evaluate import as_heldout
from speculative.explain.repetition import repetition
from speculative.measure.metrics import rule_curve
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

PROMPTS = 16


def temperature_rows(evidence: Evidence, target: Target) -> list[TemperatureRow]:
    """One row per temperature, the lowest first; empty if judge.temperatures is empty.

    The target answers the same few held-out prompts at each, with its serving top-p, top-k and min-p, and the draft scores
    the answers. The rule is `sample`, and `greedy` at 0. The intervals are not corrected for their number.
    """
    settings, draft, rows = evidence.question.settings, evidence.best.draft, []
    distinct = list({one.prompt: one for one in evidence.question.frozen}.values())
    # Spread over the set, which is stored longest prompt first.
    chosen = [distinct[place] for place in np.linspace(0, len(distinct) - 1, min(PROMPTS, len(distinct))).astype(int)]
    for temperature in sorted(set(evidence.question.judge.temperatures)):
        sampling = GREEDY if temperature == 0 else replace(settings.sampling, temperature=temperature)
        rule: Rule = "greedy" if sampling.greedy else "sample"
        question, asked = evidence.question, [(one.key, one.prompt_ids) for one in chosen]
        alone = replace(settings, sampling=sampling, rule=rule, gamma=0)
        texts = as_heldout(question.decoding(target.model, None, asked, alone, question.judge.batch_size), "held-out")
        gamma = evidence.question.gamma
        scores = score_tokens(draft.model, texts, sampling, offsets=draft.offsets(gamma))
        curve = rule_curve(scores, [text.prompt for text in texts], rule, survival_gamma=gamma)
        curve = with_speeds(curve, evidence.best_costs)
        rows.append(TemperatureRow(temperature=temperature, curve=curve, repetition=repetition(texts)))
    return rows
