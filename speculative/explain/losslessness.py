"""The losslessness check: is speculative text the target's own? Greedy text must be equal, sampled text must have the same
distribution. Both are tested.

Three tests, of which a decoder that is lossless fails any at most about once in `1 / LEVEL` uses (each has its share of
it; "about", because at finite sample sizes the two chi-square tests keep their level only nearly):

permutation  Responses sampled with and without the draft, other seeds. If the two distributions are one, then within a
             prompt the labels "with" and "without" are exchangeable, so the share of relabelled data with a statistic as
             large is a p-value that is valid at every sample size, for any models. The test takes the smallest p-value of
             four statistics; the relabelled data give the distribution of that minimum by chance (Westfall and Young's
             min-P).
first token  The first sampled token of each response against the target's exact probabilities by a plain forward.
every token  The same for all tokens, each given the text before it. The expected values do not use our decoder.

For a true sampler, the position of a token in its distribution is uniform on [0, 1) (Rosenblatt's transform): the mass of the
more likely tokens, plus a random share of its own.

Shapes: N responses, T tokens of one, R rows of a forward, V vocabulary, D features, B relabellings, S statistics,
K equal bins of the unit interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import sparse, special
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.drafter import Drafter
from speculative.errors import UserError
from speculative.measure.self_checks import NearTie, SelfCheckError, near_tie
from speculative.measure.token_scores import values_by_text
from speculative.rules.sampling import SamplingSettings, logits_to_probs

LEVEL = 1e-3  # False-alarm rate of the whole check.
PERMUTATIONS = 9999
PREFIX = 8  # first tokens whose agreement is compared
BINS = 16
LEAST_PER_BIN = 5  # below this expected count a chi-square's p-value is not reliable
CONTROL = 1.1  # factor on the temperature for the positive control
CHUNK = 256  # relabellings at once
SAMPLED, FIRST_TOKEN, EVERY_TOKEN = (
    "texts sampled with and without the draft",
    "first tokens and the target's probabilities",
    "tokens and the target's probabilities",
)


@dataclass(frozen=True)
class GreedyTexts:
    """Greedy text with the draft against the target's alone. Two texts may differ where the target's two best logits are equal up to
    the dtype's rounding (`self_checks.NEAR_TIE`); any other difference is in `differences`, one line each.
    """

    prompts: int
    tokens: int
    equal: int
    near_ties: list[NearTie]
    differences: list[str]


@dataclass(frozen=True)
class Uniformity:
    """Chi-square test that tokens are uniform in the target's distribution. impossible: tokens of probability 0."""

    tokens: int
    impossible: int
    bins: int
    chi_square: float
    p_value: float


@dataclass(frozen=True)
class Permutation:
    """Two samples relabelled. statistic: minus the decimal logarithm of the smallest of the features' p-values; parts: that of each."""

    statistic: float
    p_value: float
    permutations: int
    parts: dict[str, float]


@dataclass(frozen=True)
class SampledTexts:
    """Every test of sampled text. tokens: of one sample. judged_every: False where half precision meets top-p, top-k or min-p:
    rounding moves tokens over their edge, so `every_token` is not judged there.
    """

    prompts: int
    samples: int
    tokens: int
    permutation: Permutation
    first_token: Uniformity
    every_token: Uniformity
    judged_every: bool

    @property
    def p_values(self) -> dict[str, float]:
        """p-value of every test, in the order of the sentence."""
        return {
            SAMPLED: self.permutation.p_value,
            FIRST_TOKEN: self.first_token.p_value,
            EVERY_TOKEN: self.every_token.p_value,
        }

    @property
    def failed(self) -> list[str]:
        """The tests with a p-value below their share of the level."""
        judged = [name for name in self.p_values if self.judged_every or name != EVERY_TOKEN]
        return [name for name in judged if self.p_values[name] < LEVEL / len(judged)]


@dataclass(frozen=True)
class Lossless:
    """Every test of a pair under a rule. sampled: None at temperature 0. control: of the target at `CONTROL` times its temperature."""

    rule: str
    gamma: int
    dtype: str
    greedy: GreedyTexts
    sampled: SampledTexts | None = None
    control: SampledTexts | None = None

    @property
    def failed(self) -> list[str]:
        """The failed comparisons, in words."""
        greedy = ["greedy texts"] if self.greedy.differences else []
        return greedy + (self.sampled.failed if self.sampled else [])

    @property
    def sentence(self) -> str:
        """The result in words, with the failed tests or with the sensitivity of the check."""
        greedy, sampled, control = self.greedy, self.sampled, self.control
        ties = f" ({len(greedy.near_ties)} more differ after a near-tie of the target)" if greedy.near_ties else ""
        same = f"greedy text is the target's own on {greedy.equal} of {greedy.prompts} prompts{ties}"
        if sampled is None:
            return f"{'NOT lossless' if self.failed else 'Lossless'}: {same}."
        numbers = "permutation p = {:.2g}, first tokens p = {:.2g}, every token p = {:.2g}".format(
            *sampled.p_values.values()
        )
        texts = f"{sampled.prompts * sampled.samples} sampled responses ({sampled.tokens:,} tokens)"
        if self.failed:
            return f"NOT lossless: {', '.join(self.failed)} differ; {same}. {texts}: {numbers}."
        sentence = f"Lossless as far as these tests detect: {same}; {texts} do not differ detectably from the target's own ({numbers})."
        if control is None:
            return sentence
        warmer = f"the target at {CONTROL} times its temperature"
        smallest = f"p = {min(control.p_values.values()):.2g}"
        if control.failed:
            return f"{sentence} The same tests detect {warmer} ({smallest})."
        return f"{sentence} So few samples do not detect {warmer} either ({smallest}): raise --samples or --prompts."

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        failed = self.failed
        return asdict(self) | {"level": LEVEL, "failed": failed, "passed": not failed, "sentence": self.sentence}


# Per text, of each token: the target's mass on likelier tokens, and on the token.
Places = list[tuple[np.ndarray, np.ndarray]]


def token_places(target: PreTrainedModel, texts: Sequence[Response], sampling: SamplingSettings) -> Places:
    """Per text (likelier_T, own_T): the target's mass on tokens likelier than each token, and on it (ties included), by plain forwards
    over the whole texts; 0 own mass: the target cannot produce the token. Raises UserError when the target returns NaN.
    """

    def places(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        return torch.stack(masses(logits_to_probs(logits_RV, sampling), token_ids_R), 1)

    return [(values_T2[:, 0], values_T2[:, 1]) for values_T2 in values_by_text(target, texts, places, 2, "target")]


def masses(probs_RV: torch.Tensor, token_ids_R: torch.Tensor) -> list[torch.Tensor]:
    """[mass of more likely tokens (R,), mass of the token (R,), ties included]."""
    of_token_R1 = probs_RV.gather(-1, token_ids_R.unsqueeze(-1))
    return [
        torch.where(chosen_RV, probs_RV, 0.0).sum(-1, dtype=torch.float64)
        for chosen_RV in (probs_RV > of_token_R1, probs_RV == of_token_R1)
    ]


def uniformity(places: Places, seed: int) -> Uniformity:
    """Whether `likelier + U x own` of all tokens is uniform: under a true sampler the numbers are independent and uniform, in whatever
    text and order (Rosenblatt 1952). With few tokens there are fewer bins; with fewer than two bins the p-value is 1.
    """
    likelier_N, own_N = (np.concatenate([text[side] for text in places]) for side in (0, 1))
    bins = min(BINS, len(own_N) // LEAST_PER_BIN)
    chi_square, p_value = 0.0, 1.0
    if bins > 1:
        places_N = likelier_N + np.random.default_rng(seed).random(len(own_N)) * own_N
        counts_K = np.bincount((places_N * bins).astype(int).clip(0, bins - 1), minlength=bins)
        chi_square = ((counts_K - counts_K.mean()) ** 2).sum() / counts_K.mean()
        p_value = special.chdtrc(bins - 1, chi_square)
    return Uniformity(len(own_N), int((own_N <= 0).sum()), bins, float(chi_square), float(p_value))


def text_features(
    prompts_N: Sequence[int], ids: Sequence[Sequence[int]], places: Sequence[np.ndarray]
) -> dict[str, sparse.csr_matrix]:
    """Features (N, D) of each statistic; the statistic is the squared length of the sum with minus the sum without the draft. first
    tokens: the prompt and the first 1, 2, ..., 8 tokens, one feature per beginning. words: counts of each token over all prompts, scaled
    as in a chi-square. likelihood: the same for where its tokens lie in the target's distributions (`token_places`, bins of the middle of
    the token's mass). length: tokens of the response.
    """
    beginnings = [
        [(prompt, *text[:length]) for length in range(1, min(PREFIX, len(text)) + 1)]
        for prompt, text in zip(prompts_N, ids, strict=True)
    ]
    bins = [(np.asarray(places_T) * BINS).astype(int).clip(0, BINS - 1).tolist() for places_T in places]
    lengths_N = np.array([len(text) for text in ids], dtype=np.float64)
    return {
        "first tokens": _counts(beginnings),
        "words": _by_frequency(_counts(ids)),
        "likelihood": _by_frequency(_counts(bins)),
        "length": sparse.csr_matrix((lengths_N - lengths_N.mean())[:, None]),
    }


def _counts(things: Sequence[Sequence[Any]]) -> sparse.csr_matrix:
    """How often each text (row) has each thing (column)."""
    columns: dict[Any, int] = {}
    rows, found = [], []
    for row, own in enumerate(things):
        rows += [row] * len(own)
        found += [columns.setdefault(thing, len(columns)) for thing in own]
    return sparse.csr_matrix((np.ones(len(found)), (rows, found)), shape=(len(things), max(1, len(columns))))


def _by_frequency(counts_ND: sparse.csr_matrix) -> sparse.csr_matrix:
    """Counts over the square root of how often the thing is said at all: their squared difference is a chi-square."""
    totals_D = np.asarray(counts_ND.sum(0)).ravel()
    return sparse.csr_matrix(counts_ND.multiply(1 / np.sqrt(np.maximum(totals_D, 1.0))))


def permutation_test(
    features: Mapping[str, sparse.csr_matrix], groups: int, *, permutations: int = PERMUTATIONS, seed: int = 0
) -> Permutation:
    """Are the first halves of all groups of adjacent rows distributed as the second halves? Labels are exchanged within `groups` only. A
    feature's p-value is that of a gamma with the first two moments of the relabelled statistics; that of the smallest is by relabelling,
    so the approximation costs no validity.
    """
    rows = next(iter(features.values())).shape[0]
    assert rows % (2 * groups) == 0, "every group has as many rows with the draft as without"
    size = rows // groups
    signs_N = np.tile(np.repeat([1.0, -1.0], size // 2), groups)
    generator = np.random.default_rng(seed)
    parts = [_squared_differences(features, signs_N[None])]
    for start in range(0, permutations, CHUNK):
        count = min(CHUNK, permutations - start)
        labels = np.tile(signs_N.reshape(groups, size), (count, 1, 1))
        parts.append(_squared_differences(features, generator.permuted(labels, axis=-1).reshape(count, rows)))
    values_BS = np.concatenate(parts)  # The first row is the observed data.
    # Rounding must not separate equal values: a relabelling that changes nothing equals the observed value.
    values_BS = np.round(values_BS, 9)
    smallest_B = np.round(_log_tails(values_BS).min(1), 9)
    alone_S = (values_BS >= values_BS[0]).mean(0)
    return Permutation(
        float(-smallest_B[0] / np.log(10)),
        float((smallest_B <= smallest_B[0]).mean()),
        permutations,
        dict(zip(features, alone_S.tolist(), strict=True)),
    )


def _squared_differences(features: Mapping[str, sparse.csr_matrix], signs_BN: np.ndarray) -> np.ndarray:
    """|sum of the rows labelled + minus those labelled -|^2 of every feature matrix, (B, S)."""
    return np.stack([((features_ND.T @ signs_BN.T) ** 2).sum(0) for features_ND in features.values()], 1)


def _log_tails(values_BS: np.ndarray) -> np.ndarray:
    """Log of the upper tail of each value in a gamma of its column's mean and variance; 0 where a column is constant."""
    means_S, variances_S = values_BS.mean(0), values_BS.var(0)
    varies_S = variances_S > 1e-12 * np.maximum(means_S, 1e-300) ** 2
    tails_BS = np.zeros_like(values_BS)
    for column in np.flatnonzero(varies_S):
        shape, scale = means_S[column] ** 2 / variances_S[column], variances_S[column] / means_S[column]
        with np.errstate(divide="ignore"):  # a tail of 0
            tails_BS[:, column] = np.log(special.gammaincc(shape, values_BS[:, column] / scale))
    return tails_BS


def greedy_equality(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    batch_size: int = 32,
) -> GreedyTexts:
    """Each prompt decoded greedily with the draft and without, at the gamma and lengths of these settings."""
    greedy = settings.at_temperature_0(settings.gamma)
    plain, _ = decode(target, None, prompts, replace(greedy, gamma=0), batch_size=batch_size)
    own, _ = decode(target, drafter, prompts, greedy, batch_size=batch_size)
    near_ties, differences = [], []
    for one, other in zip(plain, own, strict=True):
        if one.response_ids == other.response_ids:
            continue
        try:
            near_ties.append(near_tie(target, one, other))
        except SelfCheckError as error:
            differences.append(str(error))
    equal = len(prompts) - len(near_ties) - len(differences)
    return GreedyTexts(len(prompts), sum(len(text.response_ids) for text in own), equal, near_ties, differences)


def sampled_texts(
    target: PreTrainedModel,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    samples: int,
    *,
    batch_size: int = 32,
) -> list[Response]:
    """`samples` responses of every prompt, prompt after prompt; without a drafter the target's alone."""
    keyed = [(f"{key}\x00{sample}", ids) for key, ids in prompts for sample in range(samples)]
    own = settings if drafter is not None else replace(settings, gamma=0)
    return decode(target, drafter, keyed, own, batch_size=batch_size)[0]


def losslessness(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    samples: int = 16,
    batch_size: int = 32,
    permutations: int = PERMUTATIONS,
    control: bool = True,
) -> Lossless:
    """Run all tests of this file on one pair under one rule; at temperature 0 only the greedy test. control: the same tests of the target
    at `CONTROL` times the temperature, without a draft: whether as many samples would detect a fault of that size. It adds half as much
    decoding.

    Raises UserError when gamma is 0, for fewer than two samples, and for everything that `decode` refuses.
    """
    if settings.gamma < 1:
        raise UserError("gamma = 0: the losslessness check needs at least one drafted token per block")
    assert (permutations + 1) * LEVEL > 3, "too few relabellings to reach a third of the level"
    if samples < 2:
        raise UserError(f"samples = {samples}: must be at least 2 per prompt, to compare distributions")
    greedy = greedy_equality(target, drafter, prompts, settings, batch_size=batch_size)
    found = Lossless(settings.rule.name, settings.gamma, str(target.dtype).removeprefix("torch."), greedy)
    sampling = settings.sampling
    if sampling.greedy:
        return found

    # A response is a function of (seed, key), so the samples need different seeds.
    def sample(number: int, proposer: Drafter | None, temperature: float) -> tuple[list[Response], Places]:
        own = replace(settings, seed=settings.seed + number, sampling=replace(sampling, temperature=temperature))
        texts = sampled_texts(target, proposer, prompts, own, samples, batch_size=batch_size)
        return texts, token_places(target, texts, sampling)

    speculative, plain = sample(1, drafter, sampling.temperature), sample(2, None, sampling.temperature)
    whole = sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0

    def tested(texts: Sequence[Response], places: Places) -> SampledTexts:
        features = _side_by_side((texts, plain[0]), (places, plain[1]), samples)
        return SampledTexts(
            len(prompts),
            samples,
            sum(len(text.response_ids) for text in texts),
            permutation_test(features, len(prompts), permutations=permutations, seed=settings.seed),
            uniformity([(likelier_T[:1], own_T[:1]) for likelier_T, own_T in places], settings.seed),
            uniformity(places, settings.seed),
            judged_every=whole or target.dtype in (torch.float32, torch.float64),
        )

    warmer = tested(*sample(3, None, sampling.temperature * CONTROL)) if control else None
    return replace(found, sampled=tested(*speculative), control=warmer)


def _side_by_side(
    sides: tuple[Sequence[Response], Sequence[Response]], places: tuple[Places, Places], samples: int
) -> dict[str, sparse.csr_matrix]:
    """`text_features` of two samples of equal size, grouped by prompt."""
    prompts = len(sides[0]) // samples
    order = [(side, prompt * samples + n) for prompt in range(prompts) for side in (0, 1) for n in range(samples)]
    middles = [likelier_T + own_T / 2 for likelier_T, own_T in (places[side][index] for side, index in order)]
    ids = [sides[side][index].response_ids for side, index in order]
    return text_features([index // samples for _, index in order], ids, middles)
