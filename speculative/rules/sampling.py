"""Logits to probabilities, and probabilities to tokens: the only place where either happens.

Shapes: R rows (any leading dimensions), V vocabulary, L response positions.
"""

import hashlib
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from speculative.errors import UserError

# Columns of `row_uniforms`.
DRAFT_UNIFORM, ACCEPTANCE_COIN, RESIDUAL_UNIFORM = 0, 1, 2

FEW_ROWS = 64  # Up to here a loop in numpy beats one operation of torch on all rows.
# A power of two that divides the vocabularies of most models, and near enough to their square root.
PIECE = 128
# Number of columns for adding masses by key: with one column all small probabilities would contend for one address.
LANES = 32
# Number of steps of at most 12 bits to find a key of at most 48 bits.
KEY_STEPS = 4
PROB_BITS = 30  # Of a float32 from 0 to 1.
LEAST_TEMPERATURE = 1e-30  # Logits divided by a smaller one are infinite in float32.
# How far two ways to the same float32 sum, or probability, may differ.
MASS_ROUNDING, PROB_ROUNDING = 3e-5, 1.0 - 1e-6


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of the target. `temperature` 0 is greedy and ignores the rest; `top_k` 0 is off. Raises UserError for a value out
    of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0.0 or LEAST_TEMPERATURE <= self.temperature < float("inf")):
            raise UserError(
                f"temperature = {self.temperature}: must be 0 (greedy) or a number of at least {LEAST_TEMPERATURE}"
            )
        if self.top_k < 0:
            raise UserError(f"top_k = {self.top_k}: must be 0 (off) or a positive number of tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p = {self.top_p}: must be above 0 and at most 1 (1 = off)")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p = {self.min_p}: must be between 0 (off) and 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p exclude tokens."""
        return self != SamplingSettings(self.temperature)

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


GREEDY = SamplingSettings(temperature=0.0)


def one_hot(ids_R: torch.Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of probability 1 at `ids_R`; shape (*R, V)."""
    probs_RV = torch.zeros((*ids_R.shape, vocab_size), dtype=dtype, device=ids_R.device)
    return probs_RV.scatter_(-1, ids_R.unsqueeze(-1), 1.0)


def most_likely(scores_RV: torch.Tensor) -> torch.Tensor:
    """argmax over the vocabulary, ids (*R,); of equal scores the first. NaN wins, as in torch."""
    return most_likely_and_peak(scores_RV)[0]


def most_likely_and_peak(scores_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`most_likely` and the scores there (*R,): NaN or infinite if any logit of the row is."""
    if scores_RV.device.type == "cpu" and scores_RV.dtype in (torch.float32, torch.float64):
        # numpy's argmax is vectorised on a CPU: a tenth of torch's time.
        flat = scores_RV.detach().numpy().reshape(-1, scores_RV.shape[-1])
        ids, shape = flat.argmax(-1), scores_RV.shape[:-1]
        peaks = flat[np.arange(len(ids)), ids]
        return torch.from_numpy(ids).view(shape), torch.from_numpy(peaks).view(shape)
    peaks_R, ids_R = scores_RV.max(-1)
    return ids_R, peaks_R


def logits_to_probs(logits_RV: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Probabilities (*R, V) under the serving settings: float32, or float64 when the logits are float64. Order and ties as in
    transformers' warpers: temperature, top-k (ties of the k-th stay), top-p (the smallest set whose mass reaches top_p), min-p (relative
    to the most likely token left), softmax. Greedy rows are one-hot at the argmax.
    """
    scores_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    if settings.greedy:
        return one_hot(most_likely(scores_RV), scores_RV.shape[-1], scores_RV.dtype)
    if settings.temperature != 1.0:
        scores_RV = scores_RV / settings.temperature
    if 0 < settings.top_k < scores_RV.shape[-1]:
        kth_R1 = scores_RV.topk(settings.top_k, dim=-1).values[..., -1:]
        scores_RV = scores_RV.masked_fill(scores_RV < kth_R1, -torch.inf)
    if settings.top_p < 1.0:
        scores_RV = nucleus(scores_RV, settings.top_p)
    probs_RV = scores_RV.softmax(-1)
    if settings.min_p > 0.0:
        scores_RV = scores_RV.masked_fill(probs_RV < settings.min_p * probs_RV.amax(-1, keepdim=True), -torch.inf)
        probs_RV = scores_RV.softmax(-1)
    return probs_RV


def nucleus(scores_RV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Scores (*R, V) with -inf outside the smallest set of tokens whose mass reaches `top_p`, without sorting the vocabulary: on a CPU
    with the result of `nucleus_by_sorting`, on an accelerator by `nucleus_by_search`, except for a single row, where a sort takes few
    kernels.
    """
    if scores_RV.device.type != "cpu" and scores_RV.dtype == torch.float32 and scores_RV[..., 0].numel() > 1:
        return nucleus_by_search(scores_RV, top_p)
    if scores_RV.device.type != "cpu" or scores_RV.requires_grad:
        return nucleus_by_sorting(scores_RV, top_p)
    vocab = scores_RV.shape[-1]
    probs_RV = scores_RV.softmax(-1)
    rows_RV, totals_R = probs_RV.numpy().reshape(-1, vocab), probs_RV.sum(-1, dtype=torch.float64).view(-1).tolist()
    least = [_least_of_nucleus(row_V, total, top_p) for row_V, total in zip(rows_RV, totals_R, strict=True)]
    outside_RV = rows_RV < np.array(least, dtype=rows_RV.dtype)[:, None]
    scores = scores_RV.numpy().reshape(-1, vocab)
    kept_RV = torch.from_numpy(np.where(outside_RV, scores.dtype.type(-np.inf), scores))
    for row, least_prob in enumerate(least):
        if least_prob == 0.0:
            kept_RV[row] = nucleus_by_sorting(torch.from_numpy(scores[row]), top_p)
    return kept_RV.view(scores_RV.shape)


def nucleus_by_sorting(scores_RV: torch.Tensor, top_p: float) -> torch.Tensor:
    """`nucleus` as in transformers' warper: the reference for the fast versions."""
    ascending_RV, order_RV = scores_RV.sort(dim=-1)
    removed_RV = ascending_RV.softmax(-1).cumsum(-1) <= 1.0 - top_p
    removed_RV[..., -1] = False
    return scores_RV.masked_fill(removed_RV.scatter(-1, order_RV, removed_RV), -torch.inf)


def nucleus_by_search(scores_RV: torch.Tensor, top_p: float) -> torch.Tensor:
    """`nucleus` of float32 scores on an accelerator, where a sort takes the rows one after another, ten kernels each.

    A token's key is its probability's bit pattern, then its id: all different, in the order of a stable sort by probability. The least key
    that stays is found 12 bits at a time, from the mass below each of 4,096 keys: some 250 bytes a token and 45 kernels, however many
    rows. Masses are float64 sums, so the set is that of `nucleus_by_sorting` unless rounding decides. The most likely token always stays.
    Fixed shapes, nothing read by the host.
    """
    vocab, rows = scores_RV.shape[-1], scores_RV.shape[:-1]
    probs_RWC = _in_columns(scores_RV.detach().softmax(-1), LANES)
    probs_RV, weights_RWC = probs_RWC.flatten(-2), probs_RWC.double()
    ids_V = torch.arange(probs_RV.shape[-1], device=probs_RV.device)
    id_bits = len(ids_V).bit_length()
    keys_RV = torch.add(ids_V, probs_RV.view(torch.int32), alpha=1 << id_bits)
    width = -(-(PROB_BITS + id_bits) // KEY_STEPS)
    steps_T = torch.arange(1, 1 << width, device=probs_RV.device)
    border_R1 = torch.full((*rows, 1), float(np.float32(1.0 - top_p)), dtype=torch.float64, device=probs_RV.device)
    least_R1 = torch.zeros_like(border_R1, dtype=torch.int64)
    for shift in range((KEY_STEPS - 1) * width, -1, -width):
        bounds_RT = torch.add(least_R1, steps_T, alpha=1 << shift)
        bins_RWC = torch.searchsorted(bounds_RT, keys_RV, right=True).view_as(weights_RWC)
        masses_RTC = torch.zeros((*rows, 1 << width, LANES), dtype=torch.float64, device=probs_RV.device)
        masses_RT = masses_RTC.scatter_add_(-2, bins_RWC, weights_RWC).sum(-1).cumsum(-1)
        least_R1 = torch.add(least_R1, torch.searchsorted(masses_RT, border_R1, right=True), alpha=1 << shift)
        del bins_RWC, masses_RTC  # The next ones are as large.
    # A sum may stay below the border to its end: 1.0 - top_p is then above the rounded mass of the whole row.
    least_R1 = torch.minimum(least_R1, keys_RV.amax(-1, keepdim=True))
    return scores_RV.masked_fill(keys_RV[..., :vocab] < least_R1, -torch.inf)


def _least_of_nucleus(probs_V: np.ndarray, total: float, top_p: float) -> float:
    """The smallest probability in a row's nucleus; 0.0 where only `nucleus_by_sorting` can tell: the next smaller one is as large, or a
    sum is so close to the border that its rounding decides.
    """
    border = 1.0 - top_p
    # Tokens of at most border / V together have at most the border's mass: all go, and need no order.
    ascending = np.sort(probs_V[probs_V > border / len(probs_V)])
    mass = ascending.cumsum(dtype=np.float64)
    if not len(mass):
        return 0.0
    mass += total - mass[-1]
    first = int(mass.searchsorted(border))
    rounding = MASS_ROUNDING * border
    if first == len(mass) or mass[first] - border < rounding or border - (mass[first] - ascending[first]) < rounding:
        return 0.0
    if first > 0 and ascending[first - 1] > PROB_ROUNDING * ascending[first]:
        return 0.0
    return float(ascending[first])


def sample(probs_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Ids (*R,) by inverse transform: the first token whose cumulative probability exceeds the uniform in [0, 1)."""
    return sample_at(probs_RV, uniforms_R.unsqueeze(-1)).squeeze(-1)


def sample_at(probs_RV: torch.Tensor, points_RN: torch.Tensor) -> torch.Tensor:
    """Ids (*R, N): at each of a row's points in [0, 1) the first token whose cumulative probability exceeds it. Rows are scaled by their
    mass; a token of probability 0 is never returned if there is any. The sum runs in float64: in float32 it is off by more than the tail
    of a large vocabulary.
    """
    if probs_RV.device.type != "cpu":
        return sample_by_pieces(probs_RV, points_RN)
    cumulative_RV = probs_RV.detach().cumsum(-1, dtype=torch.float64)
    # A subclass, such as a fake tensor, has no numpy.
    if points_RN[..., 0].numel() > FEW_ROWS or type(cumulative_RV) is not torch.Tensor:
        return search(cumulative_RV, points_RN)
    return _search_rows(cumulative_RV, points_RN)


def sample_by_pieces(probs_RV: torch.Tensor, points_RN: torch.Tensor) -> torch.Tensor:
    """`sample_at` on an accelerator, where one thread block scans a whole row: first a piece is drawn, then a token of it.

    Both sums are scans of about the root of V numbers, in float64, so that the id is another one than that of a single
    scan only where the rounding of such a sum decides. A token of probability 0 is never returned as long as the row has
    any mass, however a parallel scan rounds; a row of NaN gives some legal id. Fixed shapes, nothing read by the host.
    """
    vocab = probs_RV.shape[-1]
    probs_RKP = _in_columns(probs_RV.detach().double(), PIECE)
    sums_RK = probs_RKP.sum(-1)
    running_RK = sums_RK.cumsum(-1)
    points_RN = points_RN * running_RK[..., -1:]
    begin_RN, piece_RN = _interval(running_RK, sums_RK, points_RN)
    inside_RNP = probs_RKP.gather(-2, piece_RN.unsqueeze(-1).expand(*piece_RN.shape, PIECE))
    _, place_RN1 = _interval(inside_RNP.cumsum(-1), inside_RNP, (points_RN - begin_RN).unsqueeze(-1))
    ids_RN = torch.add(place_RN1.squeeze(-1), piece_RN, alpha=PIECE)
    return ids_RN.clamp_max_(vocab - 1) if vocab % PIECE else ids_RN


def _in_columns(values_RV: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of V as rows of a table (*R, V / columns, columns), filled up with zeros."""
    missing = -values_RV.shape[-1] % columns
    values_RV = pad(values_RV, (0, missing)) if missing else values_RV
    return values_RV.view(*values_RV.shape[:-1], values_RV.shape[-1] // columns, columns)


def _interval(
    ends_RM: torch.Tensor, weights_RM: torch.Tensor, points_RN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(where it begins, its index), both (*R, N), of the one of M intervals, laid end to end, that a point >= 0 lies in.

    It is the last one with a weight that begins at or before the point: there always is one, as the first begins at 0.
    """
    begins_RM = (ends_RM - weights_RM).masked_fill_(weights_RM <= 0, torch.inf).unsqueeze(-2)
    found = begins_RM.masked_fill(begins_RM > points_RN.unsqueeze(-1), -1.0).max(-1)
    return found.values, found.indices


def search(cumulative_RV: torch.Tensor, points_RN: torch.Tensor) -> torch.Tensor:
    """Ids (*R, N) of the first entries of running sums above each point times the row's mass."""
    # One rounding below the mass, so that no point under 1 reaches it.
    below_mass_R1 = cumulative_RV[..., -1:] * (1.0 - 2.0**-52)
    # The running sum only rises at a token with probability, so the first entry above the threshold is one.
    ids_RN = torch.searchsorted(cumulative_RV, points_RN * below_mass_R1, right=True)
    # A row of NaN finds nothing; its id is not used, but must be one.
    return ids_RN.clamp_max_(cumulative_RV.shape[-1] - 1)


def _search_rows(cumulative_RV: torch.Tensor, points_RN: torch.Tensor) -> torch.Tensor:
    """`search` row by row in numpy: for few rows it takes a third of the time of many small torch operations."""
    vocab, shape = cumulative_RV.shape[-1], points_RN.shape
    rows_RV, rows_RN = cumulative_RV.numpy().reshape(-1, vocab), points_RN.numpy().reshape(-1, shape[-1])
    ids_RN = np.empty(rows_RN.shape, dtype=np.int64)
    for row, (sums_V, points_N) in enumerate(zip(rows_RV, rows_RN, strict=True)):
        ids_RN[row] = sums_V.searchsorted(points_N * (sums_V[-1] * (1.0 - 2.0**-52)), side="right")
    return torch.from_numpy(np.minimum(ids_RN, vocab - 1, out=ids_RN)).view(shape)


def row_uniforms(seed: int, key: str, length: int, columns: int = 3, purpose: str = "") -> torch.Tensor:
    """Uniforms (L, columns) in float64 for one response; by default draft draw, acceptance coin, residual or bonus draw.

    They depend on (seed, key, purpose) and the position only, so a response is the same whatever batch it is decoded in, and a longer
    stream begins with the shorter one.
    """
    name = f"{seed}\x00{key}" + (f"\x00{purpose}" if purpose else "")
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.random((length, columns)))


def block_uniforms(seed: int, key: str, length: int, places: int, columns: int = 3) -> torch.Tensor:
    """Uniforms (L, places, columns) of one response: what the block whose first token is at position l draws at each of its places.

    At most one block begins at a position, so every number is used once. How wide a block is, how long it takes and how much of it is kept
    may depend on drafted tokens that are discarded, and decide how later blocks are drafted: with numbers of their own these follow the
    target's distribution whatever decided. The first place has the numbers of `row_uniforms`: a target that decodes alone uses no others.
    """
    further = row_uniforms(seed, key, length, places * columns - 3, "block")
    return torch.cat((row_uniforms(seed, key, length), further), 1).view(length, places, columns)
