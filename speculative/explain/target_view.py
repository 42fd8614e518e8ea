"""A model's entropy and most probable next tokens at each token of stored text.

Shapes: T tokens of one response, R rows of a chunk, V vocabulary, K tokens asked for.
"""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.measure.token_scores import StoredText, values_by_text
from speculative.rules.sampling import SamplingSettings, logits_to_probs


def target_entropies(target: PreTrainedModel, texts: Sequence[StoredText]) -> list[np.ndarray]:
    """Entropy (T,) in nats of the target's own distribution, temperature 1 and nothing cut, before each response token. A token with logit
    minus infinity (a padded vocabulary row) adds 0. Raises UserError when the model returns NaN or infinite logits.
    """

    def entropy(logits_RV: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.special.entr(logits_RV.float().softmax(-1)).sum(-1, keepdim=True, dtype=torch.float64)

    return [values_T1[:, 0] for values_T1 in values_by_text(target, texts, entropy, 1, "model")]


def top_tokens(
    model: PreTrainedModel, texts: Sequence[StoredText], count: int = 5, sampling: SamplingSettings | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The `count` most probable tokens before each response token: (ids (T, K) int64, probabilities (T, K)) per text, most probable first;
    K = count, or the whole vocabulary when that is smaller. Probabilities are at temperature 1; with sampling settings that are not greedy
    under those, 0 for tokens they cut. Raises UserError when the model returns NaN or infinite logits.
    """
    settings = SamplingSettings() if sampling is None or sampling.greedy else sampling
    width = min(count, model.config.get_text_config(decoder=True).vocab_size)

    def most_probable(logits_RV: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        # By logits, not by probabilities: among the cut tokens, all 0, the order stays the model's.
        ids_RK = logits_RV.float().topk(width, dim=-1).indices
        probs_RK = logits_to_probs(logits_RV, settings).gather(-1, ids_RK)
        return torch.cat((ids_RK.double(), probs_RK.double()), -1)

    return [
        (values_TK[:, :width].astype(np.int64), values_TK[:, width:])
        for values_TK in values_by_text(model, texts, most_probable, 2 * width, "model")
    ]
