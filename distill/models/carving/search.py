"""Choose the layers of a carved draft by measuring the target without the others.

Legend: B sequences of a batch, T positions, R scored positions (rows), C rows of a chunk, D hidden width, V vocabulary.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.models.carving.layers import LayerSets, layers_only
from distill.models.heads import SplitModel
from speculative.rules.sampling import SamplingSettings, logits_to_probs

LONGEST = 512  # most tokens used per text
BATCH_TOKENS = 2048  # positions of a forward
CANDIDATES = 8  # layer sets whose hidden states are in memory at once
EXCHANGE_GAIN = 1e-4  # in alpha; a smaller gain is rounding noise


@dataclass(frozen=True)
class LayerChoice:
    """The layers to keep, and the measurements for this choice. Every alpha is before training."""

    layers: tuple[int, ...]
    alpha: float
    drop_one: tuple[float, ...]  # alpha of the target without layer i
    path: tuple[tuple[int, float], ...]  # (layer removed, alpha of what was left), one at a time
    exchanges: tuple[tuple[int, int, float], ...]  # (layer taken out, layer put in, alpha), after the path
    tokens: int  # positions scored


def sample_sequences(sequences: Sequence[Sequence[int]], tokens: int, length: int) -> list[list[int]]:
    """About `tokens` tokens of text: evenly spread sequences, each cut to `length` tokens; ValueError if none has two tokens."""
    usable = [list(sequence[:length]) for sequence in sequences if len(sequence) > 1]
    if not usable:
        raise ValueError("layers and channels are chosen on text; give sequences of at least two tokens")
    count = round(tokens * len(usable) / sum(map(len, usable)))
    count = min(max(count, 1), len(usable))
    return [usable[index * len(usable) // count] for index in range(count)]


def text_batches(sequences: Sequence[Sequence[int]], device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return batches of (ids, real positions), both (B, T), padded on the right, which a causal model ignores."""
    batches, rest = [], sorted(sequences, key=len, reverse=True)
    while rest:
        width = len(rest[0])
        batch, rest = rest[: max(1, BATCH_TOKENS // width)], rest[max(1, BATCH_TOKENS // width) :]
        # Pad with the sequence's last token, since a pad id makes some models of transformers warn.
        ids_BT = torch.tensor([[*sequence, *[sequence[-1]] * (width - len(sequence))] for sequence in batch])
        real_BT = torch.arange(width) < torch.tensor([[len(sequence)] for sequence in batch])
        batches.append((ids_BT.to(device), real_BT.to(device)))
    return batches


class LayerScorer:
    """alpha between a target and the same target with fewer layers, on fixed text."""

    def __init__(
        self,
        target: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        settings: SamplingSettings | None = None,
        chunk: int = 256,
    ) -> None:
        """``sequences``: token ids, every position is scored. ``settings``: the server's. ``chunk``: rows whose logits are in memory at once."""
        self.target, self.chunk, self.settings = target, chunk, settings or SamplingSettings()
        self.split = SplitModel(target)
        self.batches = text_batches(sequences, target.device)
        self.target_hidden_RD = self._hidden()
        self.tokens = len(self.target_hidden_RD)
        self._known: dict[tuple[int, ...], float] = {}

    @torch.no_grad()
    def _hidden(self) -> Tensor:
        return torch.cat([self.split.hidden(ids_BT)[real_BT] for ids_BT, real_BT in self.batches])

    @torch.no_grad()
    def alphas(self, candidates: Sequence[tuple[int, ...]]) -> list[float]:
        """Return the mean over positions of sum_v min(target, target with only these layers), one per candidate."""
        unknown = [kept for kept in dict.fromkeys(candidates) if kept not in self._known]
        for start in range(0, len(unknown), CANDIDATES):
            group = unknown[start : start + CANDIDATES]
            hidden = []
            for kept in group:
                with layers_only(self.target, kept), contextlib.suppress(KeyError, ValueError, TypeError):
                    hidden.append((kept, self._hidden()))
            # Layers that read what a removed one left, and fail without it, score 0.
            sums = dict.fromkeys(group, 0.0)
            for first in range(0, self.tokens, self.chunk):
                rows = slice(first, first + self.chunk)
                target_probs_CV = self._probs(self.target_hidden_RD[rows])
                for kept, hidden_RD in hidden:
                    overlap_C = torch.minimum(target_probs_CV, self._probs(hidden_RD[rows])).sum(-1)
                    # A layer set may overflow in half precision. It scores 0 there, and the search continues.
                    sums[kept] += float(overlap_C.nan_to_num(0.0).double().sum())
            self._known |= {kept: total / self.tokens for kept, total in sums.items()}
        return [self._known[kept] for kept in candidates]

    def _probs(self, hidden_CD: Tensor) -> Tensor:
        return logits_to_probs(self.split.head(hidden_CD), self.settings)


def choose_layers(
    target: PreTrainedModel,
    depth: int,
    sequences: Sequence[Sequence[int]],
    *,
    settings: SamplingSettings | None = None,
    tokens: int = 1024,
) -> LayerChoice:
    """Search greedily for the `depth` layers with the highest alpha, on a sample of the text.

    Repeatedly remove the layer whose removal costs the least alpha. A layer's value depends on the others that remain, so alphas
    with one layer dropped do not rank the layers to keep. At the end, exchange a kept layer for a removed one until no exchange
    helps. About depth^3 / 3 layer forwards in total. Deterministic.

    Raises ValueError: no text. UserError: no config describes as few layers.
    """
    sets = LayerSets(target)
    total = target.config.get_text_config().num_hidden_layers
    scorer = LayerScorer(target, sample_sequences(sequences, tokens, LONGEST), settings)
    kept = tuple(range(total))
    drop_one = scorer.alphas([_without(kept, layer) for layer in kept]) if total > 1 else [0.0]
    path: list[tuple[int, float]] = []
    while len(kept) > depth:
        alphas = scorer.alphas([_without(kept, layer) for layer in kept])
        best = max(range(len(kept)), key=alphas.__getitem__)
        path.append((kept[best], alphas[best]))
        kept = _without(kept, kept[best])
    kept = sets.closest(kept)
    alpha = scorer.alphas([kept])[0]
    exchanges: list[tuple[int, int, float]] = []
    # Every exchange raises alpha, so no set repeats; the limit bounds the time.
    while len(exchanges) < 2 * depth:
        pairs = [(out, into) for out in kept for into in range(total) if into not in kept]
        if not pairs:
            break
        others = [tuple(sorted((*_without(kept, out), into))) for out, into in pairs]
        alphas = scorer.alphas(others)
        better = [index for index in range(len(pairs)) if alphas[index] >= alpha + EXCHANGE_GAIN]
        ranked = sorted(better, key=alphas.__getitem__, reverse=True)
        fitting = next((index for index in ranked if sets.config_of(others[index]) is not None), None)
        if fitting is None:
            break
        kept, alpha = others[fitting], alphas[fitting]
        exchanges.append((*pairs[fitting], alpha))
    return LayerChoice(kept, alpha, tuple(drop_one), tuple(path), tuple(exchanges), scorer.tokens)


def _without(layers: tuple[int, ...], layer: int) -> tuple[int, ...]:
    return tuple(other for other in layers if other != layer)
