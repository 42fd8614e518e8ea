"""What explains a disagreement between engine and replay. Each cause that is found gives one line."""

from distill.commands.readback.comparison import Counted, ReplayedTau, Replayer
from speculative.explain.text_fit import TextFit

_FAR = 0.1  # Share of the blocks


def acceptance_causes(counted: Counted, replayer: Replayer, prediction: ReplayedTau) -> list[str]:
    """Return the causes of a difference in blocks, the most certain first.

    ``prediction``: at the requested gamma under the rule that the server is assumed to use.
    """
    causes: list[str] = []
    if counted.gamma != prediction.gamma:
        there = replayer.predict(counted, prediction.rule, counted.gamma)
        fits = "replay agrees" if there.agrees else f"replay disagrees there too, z {there.z:+.1f}"
        causes.append(
            f"gamma: the server drafts {counted.gamma} tokens per block, not {prediction.gamma}; at gamma {counted.gamma} {fits} "
            f"(tau {there.tau:.2f}); start it with gamma {prediction.gamma}, or give --gamma {counted.gamma}"
        )
        prediction = there
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
            f"{counted.tau:.2f}, replay {prediction.tau:.2f}), and no rule or gamma explains it; check that the server uses this run's "
            "export of the best checkpoint, in the same precision, and drafts in the same way, with one gamma at all loads"
        )
    return causes


def text_causes(fit: TextFit) -> list[str]:
    """Return the cause if sampled text does not follow the target at the requested settings."""
    if fit.same:
        return []
    return [
        f"text: the sampled text does not fit the target at the requested settings (log-probability {fit.log_prob:.2f} per token, expected "
        f"{fit.expected:.2f}, p {fit.p:.1g}; {fit.impossible:,} of {fit.tokens:,} tokens have probability 0): "
        "the server samples with other "
        "settings (temperature, truncation), serves another target, or has a bug; check whether it writes the same without a draft"
    ]


def few_note(counted: Counted, prediction: ReplayedTau) -> list[str]:
    """Return a note if the test can miss a large difference in blocks."""
    far = f"a difference below {100 * prediction.unseen:.0f} % from replay"
    return [f"{counted.blocks:,} blocks are too few to detect {far}; use more prompts"] * (prediction.unseen >= _FAR)
