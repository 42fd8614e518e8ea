"""Is a served text the target's own? Two tests of it against the target's probabilities, by a plain forward over the whole text.

places     The position of each token in its distribution, which is uniform for a true sampler (`losslessness`).
log_prob   Mean log-probability of the tokens against the mean of minus the entropies: the text is as likely as expected.
           Given the text before, each token's log-probability has a known mean and variance, so the sum is a z-score.

Acceptance alone is not enough: a draft may predict wrong text well.
Shapes: R rows of a forward, V vocabulary, T tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from transformers import PreTrainedModel

from speculative.explain.losslessness import LEVEL, masses, uniformity
from speculative.measure.token_scores import StoredText, values_by_text
from speculative.rules.sampling import SamplingSettings, logits_to_probs

# Log-probability used for an impossible token: one in a thousand may be rounding at the edge of a nucleus.
IMPOSSIBLE = -20.0


@dataclass(frozen=True)
class TextLaw:
    """p: of both tests, Bonferroni. log_prob, expected: nats a token. impossible: tokens outside the target's distribution.

    log_target_probs: of each token of each text.
    """

    p: float
    log_prob: float
    expected: float
    tokens: int
    impossible: int
    log_target_probs: list[np.ndarray]

    @property
    def same(self) -> bool:
        """Whether the text can be the target's."""
        return self.p >= LEVEL


def text_law(target: PreTrainedModel, texts: Sequence[StoredText], settings: SamplingSettings) -> TextLaw:
    """Both tests of these texts under sampling settings that are not greedy. Raises UserError: the target returns NaN."""
    assert not settings.greedy, "nothing is sampled at temperature 0"

    def columns(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        probs_RV = logits_to_probs(logits_RV, settings)
        logs_RV = probs_RV.double().log()
        weighted_RV = torch.where(probs_RV > 0, probs_RV.double() * logs_RV, 0.0)
        mean_R = weighted_RV.sum(-1)
        square_R = torch.where(probs_RV > 0, weighted_RV * logs_RV, 0.0).sum(-1)
        log_prob_R = logs_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1)
        law = (log_prob_R, mean_R, square_R - mean_R**2)
        return torch.stack([*masses(probs_RV, token_ids_R), *law], 1)

    values = values_by_text(target, texts, columns, 5, "target")
    likelier_T, own_T, log_prob_T, mean_T, variance_T = np.concatenate(values).T
    places = uniformity([(likelier_T, own_T)], 0)
    said_T = np.maximum(log_prob_T, IMPOSSIBLE)
    spread = float(np.sqrt(np.maximum(variance_T, 0.0).sum()))
    z = float((said_T - mean_T).sum()) / max(spread, 1e-9)
    p_log_prob = float(2 * special.ndtr(-abs(z))) if spread > 1e-6 or abs(z) > 1 else 1.0
    return TextLaw(
        min(1.0, 2 * min(places.p_value, p_log_prob)),
        float(said_T.mean()),
        float(mean_T.mean()),
        len(said_T),
        int(np.isneginf(log_prob_T).sum()),
        [values_T5[:, 2] for values_T5 in values],
    )
