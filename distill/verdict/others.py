"""The same draft on the held-out text of other targets: one draft pass each, none of their weights."""

from collections.abc import Sequence

from distill.run.others import OtherTarget
from distill.run.verdict_record import Effects, OnTarget, Verdict
from distill.verdict.evidence import BASELINE, Evidence
from distill.verdict.judge import judge_by_replay
from speculative.measure.effects import paired_effects
from speculative.measure.token_scores import score_tokens


def on_others(verdict: Verdict, evidence: Evidence, others: Sequence[OtherTarget], looks: int) -> Verdict:
    """The verdict with a row for each other target, and what they come to in its sentence.

    looks: as for `paired_effects`.
    """
    rows, settings = [], evidence.settings
    both = [next(one for one in evidence.contestants if one.name == BASELINE), evidence.best]
    for other in others:
        scores = [
            score_tokens(one.draft.model, other.heldout, settings.sampling, offsets=one.draft.offsets(settings.gamma))
            for one in both
        ]
        before, after = (
            judge_by_replay(one.draft, other.heldout, settings, own) for one, own in zip(both, scores, strict=True)
        )
        keys = [text.prompt for text in other.heldout]
        effects = Effects.model_validate(
            paired_effects(scores[1], scores[0], keys, rule=evidence.rule, gamma=evidence.gamma, looks=looks)
        )
        rows.append(
            OnTarget(
                target=other.name,
                weight=other.weight,
                prompts=after["prompts"],
                tokens=after["tokens"],
                alpha=after["alpha"],
                tau=after["tau"],
                baseline_tau=before["tau"],
                alpha_gain=effects.alpha,
            )
        )
    told = "; ".join(
        f"on {row.target} the same draft has tau {row.tau:.2f} (undistilled {row.baseline_tau:.2f}), alpha "
        f"{row.alpha_gain.gain:+.3f} [{row.alpha_gain.ci[0]:+.3f}, {row.alpha_gain.ci[1]:+.3f}]"
        for row in rows
    )
    return verdict.model_copy(update={"targets": rows, "sentence": f"{verdict.sentence.removesuffix('.')}; {told}."})
