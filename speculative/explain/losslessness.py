"""Lossless, for someone who doubts it: is speculative text the target's own? Greedy text must be equal, sampled text must
have the same distribution, and both are tested.

Three tests, of which a decoder that is lossless fails any at most about once in `1 / LEVEL` uses (each has its share of
it; "about", because at finite sample sizes the two chi-square tests keep their level only nearly):

permutation  Responses sampled with and without the draft, other seeds. If the two distributions are one, then within a
             prompt the labels "with" and "without" are exchangeable, so the share of relabelled data with a statistic as
             large is a p-value that is valid at every sample size, whatever the models. Four statistics look at the
             data, the smallest of their p-values counts, and the relabelled data say how small the smallest of four is
             by chance (Westfall and Young's min-P).
first token  The first sampled token of each response against the target's exact probabilities by a plain forward.
every token  The same for all tokens, each given the text before it: no decoder of ours has a part in what is expected.

Where in its distribution a token lies is a number that is uniform on [0, 1) for a true sampler (Rosenblatt's transform):
the mass of the likelier tokens, plus a random share of its own.

Shapes: N responses, T tokens of one, R rows of a forward, V vocabulary, D features, B relabellings, S statistics,
K equal bins of the unit interval.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy import sparse, stats
from transformers import PreTrainedModel

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.drafter import Drafter, ModelDrafter
from speculative.errors import UserError
from speculative.measure.self_checks import SelfCheckError, near_tie
from speculative.measure.token_scores import values_by_text
from speculative.rules.sampling import GREEDY, SamplingSettings, logits_to_probs

LEVEL = 1e-3  # False alarms of the whole check.
PERMUTATIONS = 9999
PREFIX = 8  # first tokens whose agreement is compared
BINS = 16
LEAST_PER_BIN = 5  # expected count under which a chi-square's p-value is not to be trusted
CONTROL = 1.1  # what the temperature of the positive control is multiplied by
TESTS = {
    "greedy": "greedy texts",
    "sampled": "texts sampled with and without the draft",
    "first_token": "first tokens and the target's probabilities",
    "every_token": "tokens and the target's probabilities",
}
CHUNK = 256  # relabellings at once


# Per text, of each token: the target's mass on likelier tokens, and on the token.
Places = list[tuple[np.ndarray, np.ndarray]]


def token_places(target: PreTrainedModel, texts: Sequence[Response], sampling: SamplingSettings) -> Places:
    """Per text (likelier_T, own_T): the target's mass on tokens likelier than each token, and on it (ties included).

    By plain forwards of the target over the whole texts; 0 own mass: the target could not have said it. Raises
    UserError when the target returns NaN.
    """

    def places(logits_RV: torch.Tensor, token_ids_R: torch.Tensor) -> torch.Tensor:
        probs_RV = logits_to_probs(logits_RV, sampling)
        of_token_R1 = probs_RV.gather(-1, token_ids_R.unsqueeze(-1))
        sums = [
            torch.where(chosen_RV, probs_RV, 0.0).sum(-1, dtype=torch.float64)
            for chosen_RV in (probs_RV > of_token_R1, probs_RV == of_token_R1)
        ]
        return torch.stack(sums, 1)

    return [(values_T2[:, 0], values_T2[:, 1]) for values_T2 in values_by_text(target, texts, places, 2, "target")]


def uniformity(places: Places, seed: int) -> dict[str, Any]:
    """Chi-square test that `likelier + U x own` of all tokens is uniform: {"tokens", "impossible", "bins", "chi_square", "p_value"}.

    Under a true sampler the numbers are independent and uniform, in whatever text and order (Rosenblatt 1952). With few
    tokens there are fewer bins; under two bins' worth the p-value is 1.
    """
    likelier_N, own_N = (np.concatenate([text[side] for text in places]) for side in (0, 1))
    bins = min(BINS, len(own_N) // LEAST_PER_BIN)
    found = {"tokens": len(own_N), "impossible": int((own_N <= 0).sum()), "bins": bins}
    if bins < 2:
        return {**found, "chi_square": 0.0, "p_value": 1.0}
    places_N = likelier_N + np.random.default_rng(seed).random(len(own_N)) * own_N
    counts_K = np.bincount((places_N * bins).astype(int).clip(0, bins - 1), minlength=bins)
    chi_square, p_value = stats.chisquare(counts_K)
    return {**found, "chi_square": float(chi_square), "p_value": float(p_value)}


def text_features(
    prompts_N: Sequence[int], ids: Sequence[Sequence[int]], places: Sequence[np.ndarray]
) -> dict[str, sparse.csr_matrix]:
    """What each statistic looks at, a matrix (N, D) each; the statistic is the squared length of with minus without.

    first tokens: the prompt and the first 1, 2, ..., 8 tokens, one feature per beginning. words: how often each token is
    said, over all prompts, scaled as in a chi-square. likelihood: the same for where its tokens lie in the target's
    distributions (`token_places`, bins of the middle of the token's mass). length: tokens of the response.
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
) -> dict[str, Any]:
    """Are the first halves of all groups of rows distributed as the second halves?

    The rows of each of `groups` equally large groups stand together; labels are exchanged within groups only.
    {"statistic", "p_value_permutation", "permutations", "parts": {feature: p-value of it alone}}. `statistic` is minus
    the decimal logarithm of the smallest of the features' p-values, as a gamma with the first two moments of the
    relabelled statistics gives them; its own p-value is by relabelling, so that approximation costs no validity.
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
    values_BS = np.concatenate(parts)  # The first row is what was observed.
    # Rounding must not tell equal values apart: a relabelling that changes nothing is as large as the observed.
    values_BS = np.round(values_BS, 9)
    smallest_B = np.round(_log_tails(values_BS).min(1), 9)
    alone_S = (values_BS >= values_BS[0]).mean(0)
    return {
        "statistic": float(-smallest_B[0] / np.log(10)),
        "p_value_permutation": float((smallest_B <= smallest_B[0]).mean()),
        "permutations": permutations,
        "parts": dict(zip(features, alone_S.tolist(), strict=True)),
    }


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
        tails_BS[:, column] = stats.gamma.logsf(values_BS[:, column], shape, scale=scale)
    return tails_BS


def greedy_equality(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    batch_size: int = 32,
) -> dict[str, Any]:
    """Greedy text with the draft against the target's alone: {"prompts", "tokens", "equal", "near_ties", "differences"}.

    Two texts may part where the target's two best logits are equal up to the dtype's rounding (`self_checks.NEAR_TIE`);
    any other difference is in `differences`, one line each.
    """
    greedy = DecodeSettings(GREEDY, settings.gamma, "greedy", settings.max_tokens, settings.eos_ids, settings.seed)
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
    return {
        "prompts": len(prompts),
        "tokens": sum(len(text.response_ids) for text in own),
        "equal": len(prompts) - len(near_ties) - len(differences),
        "near_ties": near_ties,
        "differences": differences,
        "passed": not differences,
    }


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


def compare_samples(
    first: Sequence[Response],
    second: Sequence[Response],
    places: tuple[Places, Places],
    prompts: int,
    *,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> dict[str, Any]:
    """`permutation_test` of two equally large samples of the same prompts, prompt after prompt; `places` of each."""
    samples = len(first) // prompts
    sides = (first, second)
    order = [(side, prompt * samples + n) for prompt in range(prompts) for side in (0, 1) for n in range(samples)]
    middles = [likelier_T + own_T / 2 for likelier_T, own_T in (places[side][index] for side, index in order)]
    features = text_features(
        [index // samples for _, index in order], [sides[side][index].response_ids for side, index in order], middles
    )
    tokens = [sum(len(text.response_ids) for text in side) for side in sides]
    return {
        "prompts": prompts,
        "samples": samples,
        "tokens": tokens[0],
        "tokens_alone": tokens[1],
        **permutation_test(features, prompts, permutations=permutations, seed=seed),
    }


def losslessness(
    target: PreTrainedModel,
    draft: PreTrainedModel | Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    samples: int = 16,
    batch_size: int = 32,
    permutations: int = PERMUTATIONS,
    control: bool = True,
) -> dict[str, Any]:
    """Every test of this file on one pair under one rule; `passed` and `sentence` are the answer.

    {"rule", "gamma", "level", "greedy": `greedy_equality`, "sampled": `compare_samples`, "first_token", "every_token":
    `uniformity`, "control", "passed", "sentence"}. At temperature 0 there is nothing to sample: the middle ones are None.
    `every_token` is not judged where half precision meets top-p, top-k or min-p: rounding moves tokens over their edge.
    control: the same tests of the target at `CONTROL` times the temperature, without a draft: whether a fault of that size
    would have been seen with as many samples. It costs half as much decoding again.

    Raises UserError when gamma is 0, for fewer than two samples, and whatever `decode` refuses.
    """
    if settings.gamma < 1:
        raise UserError("gamma = 0: there is nothing to doubt without at least one drafted token per block")
    assert (permutations + 1) * LEVEL > 3, "too few relabellings to reach a third of the level"
    if samples < 2:
        raise UserError(f"samples = {samples}: give at least 2 of each prompt, to compare distributions")
    drafter: Any = draft if hasattr(draft, "propose") else ModelDrafter(draft)  # type: ignore[arg-type]
    result: dict[str, Any] = {
        "rule": settings.rule, "gamma": settings.gamma, "level": LEVEL,
        "greedy": greedy_equality(target, drafter, prompts, settings, batch_size=batch_size),
        "sampled": None, "first_token": None, "every_token": None, "control": None,
    }  # fmt: skip
    if not settings.sampling.greedy:
        result |= _sampled_tests(target, drafter, prompts, settings, samples, batch_size, permutations, control)
    judged = [result[name] for name in TESTS if result[name] is not None]
    result["passed"] = all(test["passed"] for test in judged)
    result["sentence"] = sentence_of(result)
    return result


def _sampled_tests(
    target: PreTrainedModel,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    samples: int,
    batch_size: int,
    permutations: int,
    control: bool,
) -> dict[str, Any]:
    # A response is a function of (seed, key): the samples must not share their coins.
    def sample(number: int, proposer: Drafter | None, sampling: SamplingSettings) -> tuple[list[Response], Places]:
        own = replace(settings, seed=settings.seed + number, sampling=sampling)
        texts = sampled_texts(target, proposer, prompts, own, samples, batch_size=batch_size)
        return texts, token_places(target, texts, settings.sampling)

    speculative, plain = sample(1, drafter, settings.sampling), sample(2, None, settings.sampling)
    sampling = settings.sampling
    whole = sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0
    judge_every = whole or target.dtype in (torch.float32, torch.float64)
    level = LEVEL / (3 if judge_every else 2)

    def tests_of(texts: tuple[list[Response], Places]) -> dict[str, Any]:
        tests = {
            "sampled": compare_samples(
                texts[0], plain[0], (texts[1], plain[1]), len(prompts), permutations=permutations, seed=settings.seed
            ),
            "first_token": uniformity([(likelier_T[:1], own_T[:1]) for likelier_T, own_T in texts[1]], settings.seed),
            "every_token": uniformity(texts[1], settings.seed),
        }
        for name, test in tests.items():
            test["judged"] = judge_every or name != "every_token"
            test["passed"] = not test["judged"] or _p_value(test) >= level
        return tests

    found: dict[str, Any] = {**tests_of(speculative), "control": None}
    if control:
        warmer = replace(settings.sampling, temperature=settings.sampling.temperature * CONTROL)
        tests = tests_of(sample(3, None, warmer))
        found["control"] = {
            "temperature": warmer.temperature,
            "p_values": {name: _p_value(test) for name, test in tests.items()},
            "seen": not all(test["passed"] for test in tests.values()),
        }
    return found


def _p_value(test: dict[str, Any]) -> float:
    return test["p_value_permutation"] if "p_value_permutation" in test else test["p_value"]


def sentence_of(result: dict[str, Any]) -> str:
    """The answer in words, with what failed or with what the check could have seen."""
    greedy, sampled, control = result["greedy"], result["sampled"], result["control"]
    ties = f" ({len(greedy['near_ties'])} more part at a near-tie of the target)" if greedy["near_ties"] else ""
    same = f"greedy text is the target's own on {greedy['equal']} of {greedy['prompts']} prompts{ties}"
    if sampled is None:
        return f"{'Lossless' if result['passed'] else 'NOT lossless'}: {same}."
    numbers = (
        f"permutation p = {sampled['p_value_permutation']:.2g}, first tokens p = {result['first_token']['p_value']:.2g}, "
        f"every token p = {result['every_token']['p_value']:.2g}"
    )
    texts = f"{sampled['prompts'] * sampled['samples']} sampled responses ({sampled['tokens']:,} tokens)"
    if not result["passed"]:
        failed = ", ".join(name for test, name in TESTS.items() if not result[test]["passed"])
        return f"NOT lossless: {failed} differ; {same}; of {texts}: {numbers}."
    sentence = f"Lossless as far as can be seen: {same}; {texts} cannot be told from the target's own ({numbers})."
    if control is None:
        return sentence
    warmer = f"the target at {CONTROL} times its temperature"
    smallest = f"p = {min(control['p_values'].values()):.2g}"
    if control["seen"]:
        return f"{sentence} The same tests tell {warmer} from it ({smallest})."
    return (
        f"{sentence} So few samples could not tell {warmer} from it either ({smallest}): raise --samples or --prompts."
    )
