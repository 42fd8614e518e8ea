"""Whether a policy for gamma is faster if it knows the domain of a request: simulated on recorded acceptance of two domains.

    python bench/slice_prior.py --target DIR --draft DIR --draft DIR --data DIR --out bench/results/slice_prior_cpu.json

The target answers prompts of each domain at temperature 1, and replay gives the probability that each token is an accepted drafted one.
Requests of both domains then arrive in random order, --repeats times, with new coins. A block of gamma tokens takes 1 + (c + SLOPE * rows) * gamma
target steps, and choosing takes no time. Rows: each --load, which share the time of a block. Policies:

fixed          one gamma for all, the fastest of 0..MOST
by domain      the fastest fixed gamma of each domain, known beforehand (one request at a time only)
adaptive       `AdaptiveGamma`: acceptance so far, of all requests and of this one
slice          the same, with acceptance counted by domain and shrunk to that of all by SHRINK tokens
known slice    the same, with each domain's acceptance known beforehand
"""

from distill.faults import run_script

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from result_file import write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.gamma import AdaptiveGamma, FixedGamma, GammaPolicy
from speculative.engine.models import end_token_ids
from speculative.measure.intervals import ratio_interval
from speculative.measure.token_scores import score_tokens
from speculative.rules.sampling import SamplingSettings
from yardstick import domain_rows

MOST, SLOPE, SHRINK = 8, 0.05, 20.0
FIXED, BY_DOMAIN, ADAPTIVE, SLICE, KNOWN = "fixed", "by domain", "adaptive", "slice", "known slice"
Request = tuple[str, np.ndarray]  # domain, and for each token whether it is accepted if it is drafted


class Sliced(AdaptiveGamma):
    """`AdaptiveGamma` whose rates by position are those of the row's domain. arriving: domain of the request that gets a row next."""

    def __init__(self, known: dict[str, np.ndarray] | None = None):
        super().__init__(MOST)
        self.known, self.arriving = known, ""
        self._counts: dict[str, np.ndarray] = {}  # by domain: kept and tested tokens by position
        self._domains: list[str] = []

    def start(self, rows: int) -> None:
        super().start(rows)
        self._domains = [""] * rows

    def admit(self, row: int) -> None:
        super().admit(row)
        self._domains[row] = self.arriving

    def expected_tokens(self, active_R: np.ndarray, bonus: float = 0.0) -> np.ndarray:
        total = np.zeros(MOST + 1)
        for row in np.flatnonzero(active_R):
            rates, (kept, tried) = self._rates_of(self._domains[row]), self._rows_R2[row]
            first = min((kept + rates[0] * self.POOL_BLOCKS) / (tried + self.POOL_BLOCKS) + bonus, 1.0)
            further = np.minimum(rates[1:] + bonus, 1.0).cumprod()
            total += 1.0 + np.concatenate(([0.0, first], first * (1.0 + further.cumsum())))
        return total

    def _rates_of(self, domain: str) -> np.ndarray:
        if self.known is not None:
            return self.known[domain]
        kept, tested = self._counts.get(domain, np.zeros((2, MOST)))
        return (kept + SHRINK * self._rates()) / (tested + SHRINK)

    def record(
        self, width: int, active_R: np.ndarray, drafted_R: np.ndarray, accepted_R: np.ndarray, seconds: float | None
    ) -> None:
        super().record(width, active_R, drafted_R, accepted_R, seconds)
        for row in np.flatnonzero(active_R) if width else ():
            counts = self._counts.setdefault(self._domains[row], np.zeros((2, MOST)))
            counts[0, : accepted_R[row]] += 1
            counts[1, : min(accepted_R[row] + 1, drafted_R[row])] += 1


def accepted_at(coins: np.ndarray, place: int, gamma: int) -> int:
    """Tokens that a block of gamma tokens from this place keeps."""
    own = coins[place : place + gamma]
    return len(own) if own.all() else int(own.argmin())


def steps_of(
    policy: GammaPolicy,
    requests: Sequence[Request],
    order: Sequence[int],
    load: int,
    cost: float,
    chosen: Callable[[str], int] | None = None,
) -> np.ndarray:
    """Target steps of each request with `load` rows. chosen: gamma by domain, in place of the policy's choice."""
    waiting, rows, steps = list(order)[::-1], [(-1, 0)] * load, np.zeros(len(requests))
    policy.start(load)
    while True:
        for row, (index, _) in enumerate(rows):
            if index < 0 and waiting:
                rows[row] = (waiting.pop(), 0)
                if isinstance(policy, Sliced):
                    policy.arriving = requests[rows[row][0]][0]
                policy.admit(row)
        active_R = np.array([index >= 0 for index, _ in rows])
        if not active_R.any():
            return steps
        gamma = policy.choose(active_R) if chosen is None else chosen(requests[rows[0][0]][0])
        price = 1.0 + (cost + SLOPE * active_R.sum()) * gamma
        accepted_R = np.zeros(load, dtype=int)
        for row in np.flatnonzero(active_R):
            index, place = rows[row]
            coins = requests[index][1]
            accepted_R[row] = accepted_at(coins, place, gamma)
            place += accepted_R[row] + 1
            steps[index] += price / active_R.sum()
            rows[row] = (index, place) if place < len(coins) else (-1, 0)
        policy.record(gamma, active_R, np.full(load, gamma), accepted_R, price)


def rates_of(requests: Sequence[Request], domain: str) -> np.ndarray:
    """Acceptance by position in blocks of MOST tokens of a domain."""
    counts = np.ones((2, MOST)) * [[1.0], [2.0]]
    for _, coins in (one for one in requests if one[0] == domain):
        place = 0
        while place < len(coins):
            kept = accepted_at(coins, place, MOST)
            counts[0, :kept] += 1
            counts[1, : kept + 1] += 1
            place += kept + 1
    return counts[0] / counts[1]


def compare(probs: dict[str, list[np.ndarray]], cost: float, load: int, repeats: int) -> dict[str, Any]:
    """One cell: the speed of every policy over the best fixed gamma and over `adaptive`, with intervals over prompts."""
    texts = [(domain, own) for domain in sorted(probs) for own in probs[domain]]
    generator, spent = np.random.default_rng(0), dict[Any, np.ndarray]()
    for _ in range(repeats):
        requests = [(domain, generator.random(len(own)) < own) for domain, own in texts]
        order = generator.permutation(len(requests)).tolist()
        domains_N = np.array([domain for domain, _ in requests])
        found: dict[Any, np.ndarray] = {
            gamma: steps_of(FixedGamma(gamma), requests, order, load, cost) for gamma in range(MOST + 1)
        }
        if load == 1:
            best = {one: min(range(MOST + 1), key=lambda g: found[g][domains_N == one].sum()) for one in probs}
            found[BY_DOMAIN] = steps_of(FixedGamma(MOST), requests, order, load, cost, best.__getitem__)
        known = {domain: rates_of(requests, domain) for domain in probs}
        for name, policy in ((ADAPTIVE, AdaptiveGamma(MOST)), (SLICE, Sliced()), (KNOWN, Sliced(known))):
            found[name] = steps_of(policy, requests, order, load, cost)
        for name, own in found.items():
            spent[name] = spent.get(name, 0.0) + own
    best_gamma = min(range(MOST + 1), key=lambda gamma: spent[gamma].sum())
    ways = {}
    for name in (one for one in (BY_DOMAIN, ADAPTIVE, SLICE, KNOWN) if one in spent):
        over = {"fixed": spent[best_gamma], "adaptive": spent[ADAPTIVE]}
        ways[name] = {
            f"over_{what}": [float(own.sum() / spent[name].sum()), *ratio_interval(own, spent[name])]
            for what, own in over.items()
        }
    return {"c": cost, "load": load, "best_gamma": best_gamma, "ways": ways}


def recorded(target: Any, drafts: Sequence[Any], tokenizer: Any, folder: Path, prompts: int) -> list[list[np.ndarray]]:
    """For each draft: acceptance probabilities of the tokens of one response to each prompt of a domain."""
    settings = DecodeSettings(SamplingSettings(1.0), 0, "sample", 96, end_token_ids(target))
    asked = [(str(index), ids) for index, (_, ids) in enumerate(domain_rows(folder, tokenizer, 200, prompts))]
    responses = decode(target, None, asked, replace(settings, fit_context=True), batch_size=50)[0]
    scores = (score_tokens(draft, responses, settings.sampling) for draft in drafts)
    return [[np.asarray(one.accept_probs("sample")) for one in own if len(one)] for own in scores]


def main(
    target: Annotated[str, typer.Option(help="directory of the target")],
    draft: Annotated[list[str], typer.Option(help="directory of a draft; may be repeated")],
    data: Annotated[Path, typer.Option(help="folder of the domains")],
    domains: Annotated[str, typer.Option(help="subfolders of --data")] = "wikisql,sgd",
    prompts: Annotated[int, typer.Option(help="of each domain")] = 130,
    repeats: Annotated[int, typer.Option(help="orders of arrival")] = 3,
    loads: Annotated[str, typer.Option(help="requests at once")] = "1,4",
    out: Annotated[Path | None, typer.Option(help="JSON")] = None,
) -> None:
    """Simulate policies for gamma on two domains."""
    first, *models = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (target, *draft)
    )
    tokenizer, names = AutoTokenizer.from_pretrained(target), domains.split(",")
    found = [recorded(first, models, tokenizer, data / one, prompts) for one in names]
    probs = {
        Path(path).name: dict(zip(names, own, strict=True))
        for path, own in zip(draft, zip(*found, strict=True), strict=True)
    }
    cells = [(one, cost, int(load)) for one in probs for load in loads.split(",") for cost in (0.05, 0.15, 0.3)]
    rows = [
        {"draft": one, **compare(probs[one], cost, load, repeats)}
        for one, cost, load in track(cells, "cells", transient=True)
    ]
    table = Table("draft", "c", "requests", "best gamma", "policy", "over the best fixed gamma", "over adaptive")
    for row in rows:
        for name, own in row["ways"].items():
            told = ("{:.3f} [{:.3f}, {:.3f}]".format(*own[f"over_{what}"]) for what in ("fixed", "adaptive"))
            table.add_row(row["draft"], str(row["c"]), str(row["load"]), str(row["best_gamma"]), name, *told)
    Console().print(table)
    if out is not None:
        alpha = {
            one: {name: float(np.concatenate(texts).mean()) for name, texts in own.items()}
            for one, own in probs.items()
        }
        write_result(out, {"alpha": alpha, "prompts": prompts, "rows": rows})


if __name__ == "__main__":
    run_script(main)
