"""Is a served text the target's own? Three tests of it against the target's probabilities, by a plain forward over the whole text.

places     The position of each token in its distribution, which is uniform on [0, 1) for a true sampler (Rosenblatt 1952): the mass
           of the tokens before it, plus a random share of its own. Once with the likelier tokens before it, once with the lower ids.
log_prob   Mean log-probability of the tokens against the mean of minus the entropies: the text is as likely as expected.
           Given the text before, each token's log-probability has a known mean and variance, so the sum is a z-score.

Acceptance alone is not enough: a draft may predict wrong text well.

For one text, which may be short and nearly certain, a z-score is no proof. `Evidence` is one at any length: with a tilt s, the product over
tokens of p(x)^-s / sum_v p(v)^(1-s) has the mean 1 if the target wrote the text, so it exceeds 1 / level with a probability below the level
(Markov). Positive tilts grow on unlikely text, negative ones on text that is too likely, such as that of a lower temperature.

Shapes: R rows of a forward, V vocabulary, T tokens of a response, N of all, K equal bins of the unit interval, S tilts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from transformers import PreTrainedModel

from speculative.decoder.responses import Response
from speculative.engine.arithmetic import computing_as
from speculative.measure.self_checks import STOP_AT, SelfCheckError, first_difference, next_logits
from speculative.measure.token_scores import StoredText, values_by_text
from speculative.rules.sampling import SamplingSettings, logits_to_probs

LEVEL = 1e-3  # false-alarm rate of a check of text
BINS = 16
LEAST_PER_BIN = 5  # below this expected count a chi-square's p-value is not reliable
# Log-probability used for an impossible token: one in a thousand may be rounding at the edge of a nucleus.
IMPOSSIBLE = -20.0
TILTS = (-0.5, -0.25, -0.125, 0.125, 0.25, 0.5)
CERTAIN = float(np.log(1e6))  # evidence that one of a million of the target's own texts has
# At temperature 0 the most probable token is written, or another one where rounding decides.
TIE, MOST_OTHERS = 0.1, 0.02


def _masses(probs_RV: torch.Tensor, token_ids_R: torch.Tensor) -> list[torch.Tensor]:
    """[mass of likelier tokens, mass of the token and its ties, mass of lower ids, mass of the token alone], each (R,)."""
    token_R1 = token_ids_R.unsqueeze(-1)
    alone_R1 = probs_RV.gather(-1, token_R1)
    lower_R1 = probs_RV.double().cumsum(-1).gather(-1, token_R1) - alone_R1
    likelier_R, ties_R = (
        torch.where(chosen_RV, probs_RV, 0.0).sum(-1, dtype=torch.float64)
        for chosen_RV in (probs_RV > alone_R1, probs_RV == alone_R1)
    )
    return [likelier_R, ties_R, lower_R1.squeeze(-1), alone_R1.squeeze(-1).double()]


def uniformity(likelier_N: np.ndarray, mass_N: np.ndarray, seed: int = 0) -> float:
    """p-value of the chi-square test that `likelier + U x mass` of all tokens is uniform: under a true sampler the numbers are independent
    and uniform, in whatever text and order. With few tokens there are fewer bins; with fewer than two bins the p-value is 1.
    """
    bins = min(BINS, len(mass_N) // LEAST_PER_BIN)
    if bins < 2:
        return 1.0
    places_N = likelier_N + np.random.default_rng(seed).random(len(mass_N)) * mass_N
    counts_K = np.bincount((places_N * bins).astype(int).clip(0, bins - 1), minlength=bins)
    return float(special.chdtrc(bins - 1, ((counts_K - counts_K.mean()) ** 2).sum() / counts_K.mean()))


@dataclass(frozen=True)
class TextFit:
    """p: of the three tests, Bonferroni. log_prob, expected: nats a token. impossible: tokens outside the target's distribution.

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


def text_fit(
    target: PreTrainedModel, texts: Sequence[StoredText], settings: SamplingSettings, inputs: str = ""
) -> TextFit:
    """All tests of these texts under sampling settings that are not greedy. inputs: of the engine that wrote them (`computing_as`), whose
    tokens are sometimes outside the target's own nucleus. Raises UserError: the target returns NaN.
    """
    assert not settings.greedy, "nothing is sampled at temperature 0"

    def columns(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        probs_RV, *of_engine = (logits_to_probs(own_RV, settings) for own_RV in logits_RV.chunk(2 if inputs else 1, -1))
        logs_RV = probs_RV.double().log().clamp_min(IMPOSSIBLE)
        weighted_RV = (of_engine[0] if inputs else probs_RV).double() * logs_RV
        mean_R, square_R = weighted_RV.sum(-1), (weighted_RV * logs_RV).sum(-1)
        log_prob_R = probs_RV.gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1).double().log()
        moments = (log_prob_R, mean_R, square_R - mean_R**2)
        return torch.stack([*_masses(probs_RV, token_ids_R), *moments], 1)

    values = values_by_text(target, texts, columns, 7, "target", inputs)
    *places, log_prob_T, mean_T, variance_T = np.concatenate(values).T
    p_places = min(uniformity(*places[:2]), uniformity(*places[2:]))
    said_T = np.maximum(log_prob_T, IMPOSSIBLE)
    spread = float(np.sqrt(np.maximum(variance_T, 0.0).sum()))
    z = float((said_T - mean_T).sum()) / max(spread, 1e-9)
    p_log_prob = float(2 * special.ndtr(-abs(z))) if spread > 1e-6 or abs(z) > 1 else 1.0
    return TextFit(
        min(1.0, 3 * min(p_places, p_log_prob)),
        float(said_T.mean()),
        float(mean_T.mean()),
        len(said_T),
        int(np.isneginf(log_prob_T).sum()),
        [values_T7[:, 4] for values_T7 in values],
    )


def parting(target: PreTrainedModel, exact: Response, served: Response, inputs: str) -> tuple[float, float]:
    """Where a greedy text leaves the target's: (gap from the largest logit to the lower one of the two tokens, standard deviation of what
    the engine's arithmetic, `computing_as`, does to the difference of two logits there) in nats; SelfCheckError if it is not that.
    """
    place = first_difference(exact, served)
    exact_V = next_logits(target, exact, place)
    with computing_as(target, inputs):
        served_V = next_logits(target, exact, place)
    gap = float(exact_V.max() - exact_V[[exact.response_ids[place], served.response_ids[place]]].min())
    moved = float((served_V - exact_V)[exact_V.isfinite()].std()) * 2**0.5
    if not gap <= STOP_AT * moved:
        what = f"a gap of {gap:.2g} nats, which inputs in {inputs} move by {moved:.2g}"
        raise SelfCheckError(f"prompt {exact.key!r} differs at token {place} after {what}")
    return gap, moved


@dataclass(frozen=True)
class Evidence:
    """Of one text or several. tilted_S: log of the product for each tilt. surprise: log-probabilities minus their expectations, in nats.

    log_target_probs: of each token under the settings.
    """

    tilted_S: np.ndarray
    surprise: float
    tokens: int
    log_target_probs: np.ndarray

    @property
    def against(self) -> float:
        """Log of the evidence that the target did not write the text: of the mean over all tilts."""
        return float(special.logsumexp(self.tilted_S) - np.log(len(self.tilted_S)))


def evidence_of(target: PreTrainedModel, texts: Sequence[StoredText], settings: SamplingSettings) -> list[Evidence]:
    """Of each text, in order. At temperature 0 more than one token in 50 that is not the most probable is evidence.

    Raises UserError: the target returns NaN.
    """

    def columns(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        token_R1 = token_ids_R.unsqueeze(-1)
        if settings.greedy:
            other_R = logits_RV.gather(-1, token_R1).squeeze(-1) < logits_RV.amax(-1) - TIE
            return other_R.double().unsqueeze(-1)
        logs_RV = logits_to_probs(logits_RV, settings).double().log()
        expected_R = torch.where(logs_RV > -torch.inf, logs_RV.exp() * logs_RV, 0.0).sum(-1)
        norms = [((1 - tilt) * logs_RV).logsumexp(-1) for tilt in TILTS]
        return torch.stack([logs_RV.gather(-1, token_R1).squeeze(-1), expected_R, *norms], 1)

    evidence = []
    for values_TK in values_by_text(target, texts, columns, 1 if settings.greedy else 2 + len(TILTS), "target"):
        tokens = len(values_TK)
        if settings.greedy:
            others = int(values_TK.sum())
            chance = special.bdtrc(others - 1, tokens, MOST_OTHERS) if others else 1.0
            evidence.append(Evidence(-np.log([max(chance, 1e-300)]), -float(others), tokens, np.zeros(tokens)))
            continue
        log_probs_T = np.maximum(values_TK[:, 0], IMPOSSIBLE)
        tilted_S = -np.array(TILTS) * log_probs_T.sum() - values_TK[:, 2:].sum(0)
        surprise = float((log_probs_T - values_TK[:, 1]).sum())
        evidence.append(Evidence(tilted_S, surprise, tokens, log_probs_T))
    return evidence
