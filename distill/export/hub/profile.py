"""speculation_profile.json: how a draft is accepted by position and domain, in the format that NVIDIA's Model-Optimizer proposes.

Two rates of a position are kept apart: marginal, the share of blocks whose tokens up to it are all accepted, and conditional, the same
among the blocks whose tokens before it were accepted.
"""

from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from distill.run.verdict_record import Verdict
from speculative.errors import UserError
from speculative.measure.record import VERSION, Record

SPECULATION_PROFILE, SCHEMA = "speculation_profile.json", "1.0"
FOLLOWS = "NVIDIA/Model-Optimizer pull requests 2247, 2313, 2315, 2316 (open), schema 1.0"
TOLERANCE = 0.02  # of rates and mean lengths that must agree, as in the proposal
Rates = list[Annotated[float, Field(ge=0, le=1)]]


class Acceptance(Record):
    """Rates by position, from the first drafted token, and the mean number of tokens that a block emits. Null: not known."""

    conditional_accept_rates: Rates | None = None
    marginal_accept_rates: Rates | None = None
    mean_accept_length: float | None = Field(None, ge=1)

    def fault(self) -> str | None:
        """What contradicts itself, in words; None: nothing."""
        marginal, mean = self.marginal_accept_rates or [], self.mean_accept_length
        products = list(accumulate(self.conditional_accept_rates or [], mul))
        if any(after > before + 1e-9 for before, after in pairwise(marginal)):
            return "marginal_accept_rates increase"
        if marginal and products and not _close(marginal, products):
            return "marginal_accept_rates are not the products of conditional_accept_rates"
        if marginal and mean and not _close([1.0 + sum(marginal)], [mean]):
            other = f"1 + the sum of marginal_accept_rates is {1 + sum(marginal):.3f}"
            return f"mean_accept_length is {mean:.3f}, but {other}"
        return None


class SpeculationProfile(Acceptance):
    """The file. Keys of other producers are kept."""

    schema_version: str
    measured: bool
    num_speculative_tokens: int = Field(ge=1)
    method: str | None = None
    per_category: dict[str, Acceptance] | None = None
    measurement_conditions: dict[str, Any] | None = None


def read_profile(path: Path) -> SpeculationProfile:
    """A profile that anybody wrote: the file, or a directory with it.

    Raises UserError: not there, another schema, rates that contradict themselves, or a key that is missing or has an invalid value.
    """
    path = path / SPECULATION_PROFILE if path.is_dir() else path
    found, known = SpeculationProfile.read(path, "correct it or measure again"), SCHEMA.partition(".")[0]
    odd = found.schema_version.partition(".")[0] != known and f"schema_version is {found.schema_version}, not {known}.x"
    if fault := odd or found.fault():
        raise UserError(f"{path}: {fault}; measure again")
    return found


def profile_of(verdict: Verdict | None, gamma: int, target: str, draft: str, data: list[str]) -> SpeculationProfile:
    """The profile of a run's judged draft; without a verdict, one that says so. gamma: of a draft that was not measured."""
    keys: dict[str, Any] = {"schema_version": SCHEMA, "measured": verdict is not None, "method": "draft_model"}
    keys |= {"draft_checkpoint": {"id": draft}, "target_model": {"id": target}, "num_speculative_tokens": gamma}
    if verdict is None:
        return SpeculationProfile(**keys)
    own, block = verdict.drafts[-1], verdict.rule == "block"
    row = verdict.judged(own.way)
    # Block verification decides about tokens jointly, so rates by position would not describe it.
    rates = _rates(verdict.survival) if verdict.survival and not block else Acceptance()
    mean = rates.mean_accept_length or (row.tau if row else None)
    domains = next((one.domains for one in verdict.checkpoints if one.step == own.step and not block), {})
    keys |= rates.record() | {
        "num_speculative_tokens": verdict.gamma, "mean_accept_length": mean, "verification_method": "block" if block else "longest_prefix",
        "accept_length_model": "measured_per_k" if block or own.drafting == "parallel" else "chain_analytic",
        "accept_length_by_k": {str(verdict.gamma): mean}, "block_size": None, "acceptance_length_histogram": None,
        "max_supported_k": verdict.gamma if own.drafting == "parallel" else max(verdict.replay, default=verdict.gamma),
        "per_category": {name: _rates(one.survival) for name, one in domains.items() if one.survival},
        "measurement_conditions": {
            "engine": f"understudy {VERSION}", "dataset": data, "num_samples": verdict.prompts, "rule": verdict.rule,
            "obtained": row.how.get("tau") if row else None, "per_category_obtained": "replay", "follows": FOLLOWS,
        },
    }  # fmt: skip
    return SpeculationProfile(**keys)


def _rates(survival: list[float]) -> Acceptance:
    """Rates from the shares of blocks whose first j tokens are all accepted, j from 1, among the blocks that drafted j."""
    # Last blocks of responses draft less, so a share of fewer blocks may be above the one before by chance.
    marginal = list(accumulate(survival, min))
    return Acceptance(
        conditional_accept_rates=[round(b / a, 6) if a else 0.0 for a, b in pairwise([1.0, *marginal])],
        marginal_accept_rates=[round(kept, 6) for kept in marginal],
        mean_accept_length=round(1.0 + sum(marginal), 6),
    )


def _close(some: list[float], others: list[float]) -> bool:
    return len(some) == len(others) and all(abs(a - b) <= TOLERANCE for a, b in zip(some, others, strict=True))
