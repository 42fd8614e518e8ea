"""Tests for each cause of a disagreement between engine and replay. Each cause that is found gives one line."""

import math

from distill.commands.readback.comparison import Counted, Predicted, Replayer
from speculative.explain.text_law import TextLaw
from speculative.measure.engine_blocks import canary, foreign_tokens
from speculative.measure.replay import WORRYING_Z

_FOREIGN = 0.05  # Share of accepted tokens that the run's draft would not propose; rounding explains less.
_LEAST = 3  # such tokens, at least
_FAR = 0.1  # Share of the blocks


def acceptance_causes(counted: Counted, replayer: Replayer, prediction: Predicted) -> list[str]:
    """Return the causes of a difference in blocks, the most certain first.

    ``found``: the prediction at the requested gamma under the rule that the server is assumed to use.
    """
    tau = replayer.expect(prediction.rule, counted.gamma)[0]
    share = counted.accepted_per_drafted
    share = (counted.tau - 1.0) / counted.gamma if share is None else share
    broken = canary(share, (tau - 1.0) / counted.gamma, counted.blocks)
    canary_line = (
        f"canary: {share:.3f} of the drafted tokens are accepted (tau {counted.tau:.2f}; {tau:.2f} by replay "
        "of the run's own text); "
    )
    if broken == "all":  # Replay of the served text agrees: it is the draft's own text.
        return [f"{canary_line}the engine accepts all that is drafted, so its text is the draft's; do not serve it"]
    causes = _differences(counted, replayer, prediction)
    if broken == "none":
        canary_line += "a quantised draft can load and propose noise (sglang#39087); serve it unquantised"
        causes[-1:] = ["; ".join([*causes[-1:], canary_line])]
    return causes


def _differences(counted: Counted, replayer: Replayer, prediction: Predicted) -> list[str]:
    causes: list[str] = []
    if counted.varies and not (prediction.agrees and counted.gamma == prediction.gamma):
        varies = f"gamma: the server varies it ({counted.varies}), and replay needs one gamma; use --concurrency 1"
        return foreign(counted, replayer, prediction) or [varies]
    if counted.gamma != prediction.gamma:
        there = replayer.predict(counted, prediction.rule, counted.gamma)
        fits = "replay agrees" if there.agrees else f"replay disagrees there too, z {there.z:+.1f}"
        causes.append(
            f"gamma: the server drafts {counted.gamma} tokens per block, not {prediction.gamma}; at gamma {counted.gamma} {fits} "
            f"(tau {there.tau:.2f}); start it with gamma {prediction.gamma}, or give --gamma {counted.gamma}"
        )
        if there.agrees:
            return causes
        prediction = there
    causes += foreign(counted, replayer, prediction)
    if prediction.agrees:
        return causes
    for rule in replayer.rules(prediction.rule):
        other = replayer.predict(counted, rule, counted.gamma)
        if rule != prediction.rule and other.agrees:
            causes.append(
                f"rule: the counts match rule {rule} (tau {other.tau:.2f}), not {prediction.rule}; give --rule {rule}"
            )
    if not causes:
        causes.append(
            f"draft: acceptance is {'lower' if counted.tau < prediction.tau else 'higher'} than replay of the run's best draft (tau "
            f"{counted.tau:.2f}, replay {prediction.tau:.2f}), and no rule or gamma explains it; check that the server uses "
            f"this run's export of the best checkpoint, in the same precision, and drafts in the same way"
        )
    return causes


def foreign(counted: Counted, replayer: Replayer, prediction: Predicted) -> list[str]:
    """Detect another draft, which accepts other tokens even if it accepts the same number.

    Argmax drafts: count accepted tokens that our draft would not propose. Sampled drafts: given the text, each token is accepted
    with a known probability, so the sum of (accepted - probability) x (probability - 1/2) has mean 0 and a known variance.
    """
    if counted.rows is None or not replayer.knows(prediction.rule) or prediction.rule.joint:
        return []
    assert replayer.scores is not None
    accepted, never, tested = foreign_tokens(counted.rows, replayer.scores, prediction.rule)
    if prediction.rule.draws:
        terms = [((was - own) * (own - 0.5), own * (1 - own) * (own - 0.5) ** 2) for own, was in tested]
        spread = math.sqrt(sum(variance for _, variance in terms))
        z = sum(term for term, _ in terms) / max(spread, 1e-9)
        over = f"z {z:+.1f} over {len(tested):,} tokens"
        finding = f"the accepted tokens differ from those of this run's best draft ({over})"
        strange = spread > 0 and abs(z) > WORRYING_Z
    else:
        finding = f"the run's best draft would not propose {never:,} of the {accepted:,} accepted tokens"
        strange = never >= _LEAST and never > _FOREIGN * accepted
    cause = f"draft: {finding}; the server uses another draft (another checkpoint, or one made for another target)"
    return [cause] if strange else []


def text_causes(law: TextLaw) -> list[str]:
    """Return the cause if sampled text does not follow the target at the requested settings."""
    if law.same:
        return []
    return [
        f"text: the sampled text does not fit the target at the requested settings (log-probability {law.log_prob:.2f} per token, expected "
        f"{law.expected:.2f}, p {law.p:.1g}; {law.impossible:,} of {law.tokens:,} tokens have probability 0): "
        "the server samples with other "
        "settings (temperature, truncation), serves another target, or has a bug; check whether it writes the same without a draft"
    ]


def few_note(counted: Counted, prediction: Predicted) -> list[str]:
    """Return a note if the test can miss a large difference in blocks."""
    far = f"a difference below {100 * prediction.unseen:.0f} % from replay"
    return [f"{counted.blocks:,} blocks are too few to detect {far}; use more prompts"] * (prediction.unseen >= _FAR)
