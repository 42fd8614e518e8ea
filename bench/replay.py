"""Check the verdict: replay against live decoding, its cost, the coverage of its intervals, and predicted speed.

    python bench/replay.py --out bench/results/replay.json
    python bench/replay.py --quick --out quick.json          # seconds, tiny sizes: checks that it runs, not the result
    python bench/replay.py --pair DIR --out FILE             # DIR has two model folders, *target and *draft
    python bench/replay.py --parts matched --device cuda --batch 512 --cell-seconds 60 --out FILE     # adds to an existing FILE

tau_error_max    over every rule and gamma: tau counted live divided by tau predicted by replay of the same text, minus 1. Sampled
                 rules run until the standard error of the random draws is small enough or their time is over; each cell has both
cost_ratio       seconds x variance of tau over prompts, live decoding divided by one draft pass: the cost of an interval of equal
                 width. For one gamma; `curve`: for gammas 1 to 16 at once; `paired`: for the difference between two drafts.
                 The text is stored, and its generation is not included in either
coverage         share of 95 % intervals that contain the true value. The pool of all prompts is the population, and its value is
                 the truth; held-out sets are drawn from it
speedup_error_max  predicted (`StepCosts.speed_up`) divided by measured at batch 1, minus 1; contestants alternate on each prompt
"""

from __future__ import annotations

from distill.faults import run_script

import copy
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from data.prompts import stdlib
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.run.provenance import describe_run
from result_file import command_line, write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.draft import Draft
from speculative.drafters.drafter import ModelDrafter
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.measure.cost import measure_costs, predicted_speed_up
from speculative.measure.effects import Gain, paired_gains
from speculative.measure.intervals import intervals_of_sums
from speculative.measure.replay import agreement_of, block_variance, expected_blocks_of, texts_of
from speculative.measure.token_scores import accepted_sums, score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
DOMAINS = {"wikisql/train": "question", "nl2bash/nl2bash": "nl", "gsm8k/train": "question"}
RULES = ("sample", "block", "greedy-draft", "greedy")
OTHER_DRAFT_NOISE = (
    0.1  # Of the spread of each weight: as far from the draft as checkpoints are, a point or two of alpha.
)


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `standard_error`: relative, of tau counted live, at which a cell is done."""

    prompts: int = 900
    max_tokens: int = 96
    longest_prompt: int = 128
    batch: int = 64
    gammas: tuple[int, ...] = tuple(range(1, 17))
    standard_error: float = 0.003
    cell_seconds: float = 10.0
    cost_prompts: int = 192
    simulations: int = 2000
    heldout: tuple[int, ...] = (30, 64, 200)
    speed_prompts: int = 48
    speed_gammas: tuple[int, ...] = tuple(range(1, 9))


QUICK = Sizes(24, 12, 64, 12, (1, 4), 0.1, 0.0, 12, 20, (8, 16), 2, (1, 3))
PARTS = ("coverage", "cost", "speed", "matched")


@dataclass(frozen=True)
class Bench:
    """A pair, prompts, and the settings that all parts share."""

    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[Prompt]
    sizes: Sizes
    eos_ids: tuple[int, ...]

    def settings(self, rule: str, gamma: int, seed: int = 0) -> DecodeSettings:
        sampling = GREEDY if rule == "greedy" else SamplingSettings(1.0)
        return DecodeSettings(sampling, gamma, Rule.named(rule), self.sizes.max_tokens, self.eos_ids, seed)

    def live(self, prompts: Sequence[Prompt], settings: DecodeSettings) -> tuple[list[Response], float]:
        drafter = ModelDrafter(self.draft) if settings.gamma else None
        began = time.perf_counter()
        responses, _ = decode(self.target, drafter, prompts, settings, batch_size=self.sizes.batch)
        return responses, time.perf_counter() - began


def load_pair(folder: Path | None) -> tuple[str, PreTrainedModel, PreTrainedModel, Any]:
    """(name, target, draft, tokenizer): the two model folders, or the embedded target with a draft carved from it."""
    if folder is None:
        target = load_model("target", "embedded")
        return "embedded, carved", target, carve(target, [0, -1]), load_tokenizer("embedded")
    found = {kind: sorted(folder.glob(f"*{kind}")) for kind in ("target", "draft")}
    for kind, paths in found.items():
        if len(paths) != 1:
            raise UserError(f"--pair {folder}: needs one model folder whose name ends in {kind}")
    paths = [str(found[kind][0]) for kind in ("target", "draft")]
    return folder.name, load_model("target", paths[0]), load_model("draft", paths[1]), load_tokenizer(paths[0])


def load_prompts(tokenizer: Any, chat: bool, count: int, longest: int) -> list[Prompt]:
    """Real questions of three domains in equal shares for a chat pair; otherwise function heads of the held-out library."""
    folder = SHARED / "data"
    texts: list[str] = []
    if chat and folder.is_dir():
        for name, field in DOMAINS.items():
            with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
                rows = [json.loads(line)[field] for _, line in zip(range(4 * count), file, strict=False)]
            random.Random(0).shuffle(rows)
            texts += rows[: count // len(DOMAINS) * 2]
    else:
        texts = [head for _, head in stdlib.function_head_rows(heldout=True)]
    random.Random(1).shuffle(texts)
    rows_of_ids = []
    for text in dict.fromkeys(texts):
        if chat and tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        rows_of_ids.append(tokenizer(text, add_special_tokens=not chat, verbose=False).input_ids)
    return [(f"prompt {row}", ids) for row, ids in enumerate(rows_of_ids) if 2 <= len(ids) <= longest][:count]


def matched_text(bench: Bench, rule: str, gamma: int) -> dict[str, Any]:
    """One cell: blocks counted live against replay of the same text, round after round until the random draws average out."""
    sizes, sampled = bench.sizes, Rule.named(rule).draws
    tokens = counted = rounds = 0
    expected = variance = seconds = 0.0
    while True:
        settings = bench.settings(rule, gamma, seed=rounds)
        first = rounds * 2 * sizes.batch % len(bench.prompts)
        chosen = (bench.prompts + bench.prompts)[first : first + 2 * sizes.batch]
        responses, spent = bench.live([(f"{key}, {row}", ids) for row, (key, ids) in enumerate(chosen)], settings)
        scores = score_tokens(bench.draft, responses, settings.sampling)
        check = agreement_of(scores, settings.rule, [response.blocks for response in responses], gamma)
        tokens += sum(len(response.response_ids) for response in responses)
        counted += check.live_blocks
        expected += check.predicted_blocks
        variance += block_variance(texts_of(scores, settings.rule), gamma).sum()
        seconds += spent
        rounds += 1
        error = variance**0.5 / expected
        if not sampled or error <= sizes.standard_error or seconds > sizes.cell_seconds:
            break
    return {
        "rule": rule,
        "gamma": gamma,
        "tau_live": tokens / counted,
        "tau_replay": tokens / expected,
        "tau_error": expected / counted - 1.0,
        "standard_error": error,
        "z": (counted - expected) / variance**0.5 if variance > 1e-9 else None,
        "blocks": counted,
        "tokens": tokens,
        "seconds": seconds,
    }


def noisy_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The draft with a little noise on every weight: another checkpoint to compare with."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=generator).to(weight.device)
            weight += OTHER_DRAFT_NOISE * weight.std() * noise
    return other


def _spread(tokens_P: np.ndarray, blocks_P: np.ndarray) -> np.ndarray:
    """What each prompt adds to tau, linearised: the variance of tau over P prompts is that of these over P."""
    return (tokens_P - blocks_P * tokens_P.sum() / blocks_P.sum()) / blocks_P.mean()


def equal_width(bench: Bench, texts: Sequence[Response], other: PreTrainedModel) -> dict[str, Any]:
    """Seconds x variance over prompts: live decoding of these prompts against one draft pass over stored text of them."""
    sizes, gamma, rule = bench.sizes, bench.sizes.gammas[len(bench.sizes.gammas) // 3], "sample"
    prompts = bench.prompts[: len(texts)]
    sampling = bench.settings(rule, gamma).sampling

    def replayed(gammas: Sequence[int], draft: PreTrainedModel) -> tuple[np.ndarray, float]:
        began = time.perf_counter()
        blocks_NK = expected_blocks_of(score_tokens(draft, texts, sampling), Rule.named(rule), gammas)
        return blocks_NK, time.perf_counter() - began

    tokens_P = np.array([len(text.response_ids) for text in texts])
    replayed((gamma,), bench.draft)  # Warm-up, not counted.
    replay_seconds = statistics.median(replayed((gamma,), bench.draft)[1] for _ in range(3))
    curve_seconds = statistics.median(replayed(sizes.gammas, bench.draft)[1] for _ in range(3))
    blocks_PK, _ = replayed(sizes.gammas, bench.draft)
    other_PK, _ = replayed(sizes.gammas, other)
    work: dict[int, float] = {}
    spreads: dict[int, tuple[float, float]] = {}
    for column, own in enumerate(sizes.gammas):
        if own != gamma and column % 4:
            continue  # The curve's cost is interpolated between these.
        responses, seconds = bench.live(prompts, bench.settings(rule, own, seed=7))
        live_tokens_P = np.array([len(response.response_ids) for response in responses])
        spread = float(np.var(_spread(live_tokens_P, np.array([response.blocks for response in responses])), ddof=1))
        spreads[own] = spread, seconds
        work[own] = seconds * spread / float(np.var(_spread(tokens_P, blocks_PK[:, column]), ddof=1))
    column = sizes.gammas.index(gamma)
    difference = _spread(tokens_P, blocks_PK[:, column]) - _spread(tokens_P, other_PK[:, column])
    live_spread, live_seconds = spreads[gamma]
    curve_work = float(np.interp(sizes.gammas, sorted(work), [work[own] for own in sorted(work)]).sum())
    return {
        "rule": rule,
        "gamma": gamma,
        "prompts": len(texts),
        "live_seconds": live_seconds,
        "replay_seconds": replay_seconds,
        "variance_ratio": work[gamma] / live_seconds,
        "one_gamma": work[gamma] / replay_seconds,
        "curve": curve_work / curve_seconds,
        # Two live runs are independent: their variances add. Each side is two runs or two passes.
        "paired": live_seconds * 2.0 * live_spread / (replay_seconds * float(np.var(difference, ddof=1))),
    }


def coverage(bench: Bench, texts: Sequence[Response], other: PreTrainedModel, gamma: int = 5) -> dict[str, Any]:
    """Share of intervals that contain the pool's value, by number and number of prompts."""
    settings = bench.settings("sample", gamma)
    tokens_N = np.array([len(text.response_ids) for text in texts], dtype=np.float64)
    sides = []
    for draft in (bench.draft, other):
        scores = score_tokens(draft, texts, settings.sampling)
        rule = Rule.named("sample")
        sides.append((accepted_sums(scores, rule), expected_blocks_of(scores, rule, (gamma,))[:, 0]))
    pool_N3 = np.stack((tokens_N, *sides[0]), 1)

    def numbers_of(sums_C: np.ndarray) -> np.ndarray:
        return np.stack((sums_C[..., 1] / sums_C[..., 0], sums_C[..., 0] / sums_C[..., 2]), -1)

    def gains(rows: np.ndarray) -> dict[str, Gain]:
        drawn = {
            name: [own_N[rows] for own_N in pair]
            for name, pair in zip(("alpha", "tau"), zip(*sides, strict=True), strict=True)
        }
        found = paired_gains(range(len(rows)), tokens_N[rows], drawn)
        return {"alpha gain": found["alpha"], "tau gain": found["tau"]}

    truth = dict(zip(("alpha", "tau"), numbers_of(pool_N3.sum(0)).tolist(), strict=True))
    truth |= {name: own.gain for name, own in gains(np.arange(len(texts))).items()}
    rng = np.random.default_rng(0)
    shares: dict[str, dict[str, float]] = {name: {} for name in truth}
    for prompts in bench.sizes.heldout:
        held = dict.fromkeys(truth, 0)
        for simulation in range(bench.sizes.simulations):
            rows = rng.integers(0, len(texts), prompts)
            found = dict(
                zip(("alpha", "tau"), intervals_of_sums(pool_N3[rows], numbers_of, seed=simulation), strict=True)
            )
            found |= {name: own.ci for name, own in gains(rows).items()}
            for name, (low, high) in found.items():
                held[name] += low <= truth[name] <= high
        for name, count in held.items():
            shares[name][str(prompts)] = count / bench.sizes.simulations
    every = [share for own in shares.values() for share in own.values()]
    return {"truth": truth, "shares": shares, "lowest": min(every), "highest": max(every), "pool": len(texts)}


def speed(bench: Bench) -> list[dict[str, Any]]:
    """Predicted against measured speed-up at batch 1 for each gamma.

    measured: tokens/s of all prompts over the target's, the contestants alternating prompt by prompt; median: of the
    prompts' own ratios. predicted: from tau by replay of the very text that was timed, so the cost model is tested, not
    the variation between texts.
    """
    sizes, rule = bench.sizes, "sample"
    sampling = bench.settings(rule, 1).sampling
    prompts = bench.prompts[: sizes.speed_prompts]
    context = round(statistics.mean(len(ids) for _, ids in prompts)) + sizes.max_tokens // 4
    contestants = {gamma: bench.settings(rule, gamma) for gamma in (0, *sizes.speed_gammas)}

    def timed_response(gamma: int, prompt: Prompt) -> tuple[Response, float]:
        drafter = ModelDrafter(bench.draft) if gamma else None
        (response,), timing = decode(bench.target, drafter, [prompt], contestants[gamma])
        return response, timing.total_seconds

    for gamma in contestants:
        timed_response(gamma, prompts[0])  # Warm-up, not counted.
    runs = [{gamma: timed_response(gamma, prompt) for gamma in contestants} for prompt in prompts]
    costs = measure_costs(
        bench.target,
        Draft(bench.draft),
        DecodeSettings(sampling),
        gammas=sizes.speed_gammas,
        context=context,
        repeats=5,
    )
    costs = costs.of_text([own[0][0] for own in runs])
    rates = {gamma: [len(own[gamma][0].response_ids) / own[gamma][1] for own in runs] for gamma in contestants}
    pooled = {
        gamma: sum(len(own[gamma][0].response_ids) for own in runs) / sum(own[gamma][1] for own in runs)
        for gamma in contestants
    }
    cells = []
    for gamma in sizes.speed_gammas:
        texts = [own[gamma][0] for own in runs]
        blocks = expected_blocks_of(score_tokens(bench.draft, texts, sampling), Rule.named(rule), (gamma,)).sum()
        tau = sum(len(text.response_ids) for text in texts) / float(blocks)
        measured = pooled[gamma] / pooled[0]
        predicted = costs.speed_up(gamma, tau)
        cells.append(
            {
                "gamma": gamma,
                "tau": tau,
                "predicted": predicted,
                "measured": measured,
                "median": statistics.median(one / alone for one, alone in zip(rates[gamma], rates[0], strict=True)),
                "error": predicted / measured - 1.0,
                "cost_ratio": costs.cost_ratio_at(gamma),
                "verify_ratio": costs.verify_ratio(gamma),
                "block_price": costs.block_price(gamma),
                "without_host_and_prompts": predicted_speed_up(
                    tau, gamma, costs.cost_ratio_at(gamma), costs.verify_ratio(gamma)
                ),
            }
        )
    return cells


def timed(console: Console, what: str, measure: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    found = measure()
    console.print(f"{what}: {time.perf_counter() - began:.0f} s")
    return found


def tables(result: dict[str, Any]) -> list[Table]:
    """Print the results as tables."""
    made = []
    if "cells" in result:
        cells = Table("rule", "gamma", "tau live", "tau replay", "error", "standard error", "z", title="matched text")
        for cell in result["cells"]:
            z = "exact" if cell["z"] is None else f"{cell['z']:+.1f}"
            numbers = (f"{cell['tau_live']:.3f}", f"{cell['tau_replay']:.3f}", f"{cell['tau_error']:+.2%}")
            cells.add_row(cell["rule"], str(cell["gamma"]), *numbers, f"{cell['standard_error']:.2%}", z)
        made.append(cells)
    if "coverage" in result:
        shares = result["coverage"]["shares"]
        held = Table("prompts", *shares, title="share of 95 % intervals that contain the true value")
        for prompts in shares["alpha"]:
            held.add_row(prompts, *(f"{own[prompts]:.1%}" for own in shares.values()))
        made.append(held)
    if "speed" in result:
        speeds = Table("gamma", "tau", "predicted", "measured", "error", title="speed-up at batch 1")
        for cell in result["speed"]:
            numbers = (f"{cell['tau']:.2f}", f"{cell['predicted']:.2f}", f"{cell['measured']:.2f}")
            speeds.add_row(str(cell["gamma"]), *numbers, f"{cell['error']:+.1%}")
        made.append(speeds)
    return made


def summary(result: dict[str, Any]) -> str:
    """The main numbers in one line."""
    words = []
    if "cells" in result:
        words.append(f"|tau error| <= {result['tau_error_max']:.2%}")
    if "cost" in result:
        cost = result["cost"]
        ratios = (
            f"{cost['one_gamma']:.0f}x (one gamma), {cost['curve']:.0f}x (curve), {cost['paired']:.0f}x (a difference)"
        )
        words.append(f"equal width costs live decoding {ratios}")
    if "coverage" in result:
        words.append(f"95 % intervals cover {result['coverage']['lowest']:.1%} to {result['coverage']['highest']:.1%}")
    if "speed" in result:
        words.append(f"speed-up predicted within {result['speedup_error_max']:.1%}")
    return "; ".join(words)


def measured(
    bench: Bench, parts: Sequence[str], rules: Sequence[str], speed_threads: int, console: Console
) -> dict[str, Any]:
    """Run the requested parts."""
    result: dict[str, Any] = {}
    other = noisy_copy(bench.draft)
    texts: list[Response] = []
    if {"coverage", "cost"} & set(parts):
        plain = bench.settings("sample", 0, seed=99)
        texts, _ = timed(console, "stored text", lambda: bench.live(bench.prompts, plain))
    if "coverage" in parts:
        result["coverage"] = timed(console, "coverage", lambda: coverage(bench, texts, other))
    if "cost" in parts:
        few = texts[: bench.sizes.cost_prompts]
        result["cost"] = timed(console, "cost", lambda: equal_width(bench, few, other))
        result["cost_ratio"] = result["cost"]["one_gamma"]
    if "speed" in parts:
        before = torch.get_num_threads()
        torch.set_num_threads(speed_threads)
        result["speed"] = timed(console, "speed", lambda: speed(bench))
        torch.set_num_threads(before)
        result["speedup_error_max"] = max(abs(cell["error"]) for cell in result["speed"])
    if "matched" in parts:
        every = [(rule, gamma) for rule in rules for gamma in bench.sizes.gammas]
        result["cells"] = timed(console, "matched text", lambda: [matched_text(bench, *cell) for cell in every])
        result["tau_error_max"] = max(abs(cell["tau_error"]) for cell in result["cells"])
        result["standard_error_max"] = max(cell["standard_error"] for cell in result["cells"])
    return result


def main(
    out: Annotated[
        Path,
        typer.Option(
            help="write the result here as JSON; parts of an earlier result that are not measured now are kept"
        ),
    ],
    pair: Annotated[Path | None, typer.Option(help="folder with two model folders, *target and *draft")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes: shows that it runs")] = False,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="the embedded target and a draft carved from it")
    ] = False,
    parts: Annotated[str, typer.Option(help="what to measure, by comma")] = ",".join(PARTS),
    rules: Annotated[str, typer.Option(help="rules of the matched text, by comma")] = ",".join(RULES),
    cell_seconds: Annotated[
        float, typer.Option(help="maximum seconds of live decoding per cell; 0 = the default of the size")
    ] = 0.0,
    batch: Annotated[int, typer.Option(help="rows of a batch; 0 = the default of the size")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[int, typer.Option(help="torch's CPU threads for batches; 0 = as it is")] = 0,
    speed_threads: Annotated[int, typer.Option(help="torch's CPU threads at batch 1")] = 1,
) -> None:
    """Measure and write; see the top of this file."""
    console = Console(width=120)
    wanted = [part for part in parts.split(",") if part]
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"--parts {', '.join(sorted(unknown))}: must be of {', '.join(PARTS)}")
    torch.set_num_threads(threads or torch.get_num_threads())
    sizes = QUICK if quick else Sizes()
    sizes = replace(sizes, cell_seconds=cell_seconds or sizes.cell_seconds, batch=batch or sizes.batch)
    if pair is None and not embedded and (SHARED / "models").is_dir():
        pair = SHARED / "models"
    name, target, draft, tokenizer = load_pair(pair)
    prompts = load_prompts(
        tokenizer, pair is not None and bool(tokenizer.chat_template), sizes.prompts, sizes.longest_prompt
    )
    bench = Bench(target.to(device), draft.to(device), prompts, sizes, end_token_ids(target))  # type: ignore[arg-type]
    machine = describe_run(0) | {"argv": None}
    began = time.perf_counter()
    fresh = measured(bench, wanted, rules.split(","), speed_threads, console)
    former = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    if former and (former.get("pair"), former.get("quick")) != (name, quick):
        former = {}  # Of another pair or size: nothing of it stays.
    result = {
        **former,
        "command": command_line(former.get("command", "")),
        "machine": former.get("machine", {}) | dict.fromkeys(wanted, machine),
        "versions": machine["versions"],
        "pair": name,
        "quick": quick,
        "seconds": former.get("seconds", 0.0) + time.perf_counter() - began,
        **fresh,
    }
    write_result(out, result)
    for table in tables(fresh):
        console.print(table)
    console.print(summary(fresh))


if __name__ == "__main__":
    run_script(main)
