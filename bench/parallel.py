"""Compare two drafts trained for equal time from one start: one drafts token by token, one a block in one pass. Which is faster?

    python bench/parallel.py --target DIR --draft DIR --prompts FILE.jsonl --minutes 5 --out FILE
    python bench/parallel.py --target DIR --layers 0,3,-1 --first 5 ...      # carved; both continue from 5 minutes of token by token

The target answers every prompt once (temperature 1, kept in --cache), and the held-out prompts greedily too. Both drafts learn from the
same responses with the yardstick's recipe. Each is judged at its own best gamma, by replay of all held-out prompts and step costs. Then
both drafts and the target alone decode held-out prompts in turn, one response each. `ratio`: tokens/s of the parallel draft divided by
those of the other, pooled over all held-out prompts, with its 95 % interval. `crossing_c`: the cost ratio of a draft call above which
one pass per block is faster, at this tau and verify cost. `tau_parallel_by_token`: tau of the parallel draft token by token.

With --cpu-minutes, minutes are CPU time of the process, which is reproducible on a shared machine; use one thread then.
"""

from __future__ import annotations

from distill.faults import run_script

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from distill.config.sections import JudgeConfig
from distill.config.target import TargetConfig
from distill.models.carving.layers import carve
from distill.models.draft import load_draft
from distill.models.mask_token import give_mask_token
from distill.models.target import Target
from distill.run.prompts import asked_rows, render_rows
from distill.run.provenance import describe_run
from distill.verdict.contest import hold
from distill.verdict.field import draft_way, step_costs, typical_length
from distill.verdict.question import Question
from result_file import write_result
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft, Drafting
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.cost import StepCosts
from speculative.measure.metrics import alpha_with_interval
from speculative.measure.replay import expected_blocks_of, survival_of
from speculative.measure.token_scores import TokenScores, score_tokens, scored_gammas
from speculative.rules.sampling import SamplingSettings
from yardstick import Recipe, examples_of, respond, train_ours

KINDS: tuple[Drafting, ...] = ("autoregressive", "parallel")
MODES = {"greedy": SamplingSettings(0.0), "sample": SamplingSettings(1.0)}


def split(prompts: Sequence[list[int]], heldout: int, most: int) -> tuple[list[list[int]], list[list[int]]]:
    """(training prompts, held-out ones), each once; prompts at a fixed interval are held out."""
    distinct = [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in prompts)][:most]
    if len(distinct) < 2 * heldout:
        raise UserError(
            f"--prompts: {len(distinct)} different prompts; give at least {2 * heldout}, or a lower --heldout"
        )
    chosen = set(np.linspace(0, len(distinct) - 1, heldout).astype(int).tolist())
    return [ids for n, ids in enumerate(distinct) if n not in chosen], [distinct[n] for n in sorted(chosen)]


def taus_of(scores: Sequence[TokenScores], law: str, costs: StepCosts) -> dict[int, float]:
    """tau at every scored gamma whose costs were measured or interpolated."""
    gammas = scored_gammas(scores, range(1, max(costs.verify_seconds) + 1))
    tokens = sum(map(len, scores))
    return dict(zip(gammas, (tokens / expected_blocks_of(scores, law, gammas).sum(0)).tolist(), strict=True))


def crossing(by_token: Mapping[int, float], by_block: Mapping[int, float], verify: Mapping[int, float]) -> float | None:
    """The c of a draft call from which one call a block beats a call a token, each at its best gamma; None: at none up to 4."""

    def gain(c: float) -> float:
        token = max(tau / (gamma * c + verify[gamma]) for gamma, tau in by_token.items())
        block = max(tau / (c + verify[gamma]) for gamma, tau in by_block.items())
        return block - max(token, 1.0)

    low, high = 0.0, 4.0
    # Where nothing pays, nothing crosses.
    usable = [c for c in np.linspace(low, high, 401).tolist() if gain(c) > 0.0]
    return min(usable, default=None)


def judged(
    target: Target, drafts: Mapping[Drafting, Any], heldout: Sequence[HeldoutResponse], mode: str, seconds: float
) -> dict[str, Any]:
    """One cell: both kinds in one mode."""
    law = "greedy" if mode == "greedy" else "sample"
    settings = DecodeSettings(
        MODES[mode], 4, law, max(len(one.response_ids) for one in heldout), end_token_ids(target.model)
    )
    judging = JudgeConfig(speed_prompts=len(heldout), speed_seconds=seconds, speed_threads=1)
    context, entrants, cell, costs, taus = target.facts.context_length or 4096, [], {"mode": mode}, {}, {}
    question = Question(judging, settings, {settings.rule: list(heldout)}, context)
    for kind, draft in drafts.items():
        costs[kind] = step_costs(
            judging, settings, target.model, Draft(draft, kind), context, typical_length(list(heldout))
        )
        scores = score_tokens(draft, heldout, settings.sampling, offsets=16 if kind == "parallel" else None)
        taus[kind] = taus_of(scores, law, costs[kind])
        entrant = draft_way(question, kind, kind, Draft(draft, kind).drafter, scores, costs[kind])
        entrants.append(entrant)
        short = "ar" if kind == "autoregressive" else kind
        alpha, interval = alpha_with_interval(
            [own.accept_probs(law) for own in scores], [one.prompt for one in heldout]
        )
        cell |= {
            f"gamma_{short}": entrant.gamma,
            f"tau_{short}": taus[kind][entrant.gamma],
            f"alpha_{short}": alpha,
            f"alpha_{short}_ci": interval,
            f"taus_{short}": taus[kind],
            f"c_{short}": costs[kind].cost_ratio,
            f"block_{short}": entrant.gamma * costs[kind].cost_ratio_at(entrant.gamma),
            f"survival_{short}": survival_of(scores, law, 8),
        }
        if kind == "parallel":
            alone = score_tokens(draft, heldout, settings.sampling)
            cell["tau_parallel_by_token"] = taus_of(alone, law, costs["autoregressive"])[cell["gamma_ar"]]
    contest = hold(question, target.model, entrants, "parallel")
    ratio, interval = contest.against("parallel", "autoregressive")
    verify = {gamma: costs["parallel"].verify_ratio(gamma) for gamma in taus["autoregressive"]}
    return cell | {
        "ratio": ratio,
        "ratio_ci": interval,
        "speed_up_ar": contest.speed("autoregressive").speed_up,
        "speed_up_parallel": contest.speed("parallel").speed_up,
        "verify": verify,
        "crossing_c": crossing(taus["autoregressive"], taus["parallel"], verify),
        "predicted": {
            kind: max(
                t / (g * costs[kind].cost_ratio_at(g) + costs[kind].verify_ratio(g)) for g, t in taus[kind].items()
            )
            for kind in KINDS
        },
    }


def main(
    recipe: Annotated[list[str] | None, typer.Argument(help="key=value of the yardstick's recipe")] = None,
    target: Annotated[str, typer.Option(help="directory or hub id")] = "embedded",
    draft: Annotated[str | None, typer.Option(help="directory or hub id where both begin")] = None,
    layers: Annotated[str, typer.Option(help="of the target, for a carved start where no --draft is given")] = "0,-1",
    prompts: Annotated[str, typer.Option(help="file or directory of prompts")] = "",
    prompt_column: Annotated[str, typer.Option(help="its column of text")] = "",
    chat: Annotated[bool, typer.Option(help="bare prompts through the chat template")] = False,
    minutes: Annotated[float, typer.Option(help="of training, for each kind", min=0.01)] = 5.0,
    first: Annotated[float, typer.Option(help="minutes of token by token before, from which both go on", min=0)] = 0.0,
    cpu_minutes: Annotated[bool, typer.Option(help="minutes of CPU time, not of the clock")] = False,
    tokens: Annotated[int, typer.Option(help="largest offset learnt in parallel", min=2, max=16)] = 8,
    retain: Annotated[float, typer.Option(help="conditional drop", min=0.05, max=1)] = 0.7,
    heldout: Annotated[int, typer.Option(help="prompts that judge", min=2)] = 128,
    most_prompts: Annotated[int, typer.Option(min=4)] = 1600,
    max_tokens: Annotated[int, typer.Option(help="of a response", min=2)] = 96,
    max_prompt_tokens: Annotated[int, typer.Option(help="longer prompts are left out", min=1)] = 384,
    speed_seconds: Annotated[float, typer.Option(help="of timing in each mode", min=1)] = 60.0,
    seed: int = 0,
    cache: Annotated[Path, typer.Option(help="where responses are kept")] = Path("runs/parallel"),
    out: Annotated[Path, typer.Option(help="JSON to write")] = Path("bench/results/parallel.json"),
) -> None:
    """Trains both kinds and judges them side by side."""
    console, place = Console(width=120), torch.device("cpu")
    now = time.process_time if cpu_minutes else time.perf_counter
    opened = Target(TargetConfig(path=target), place)
    rows, _ = asked_rows(prompts, prompt_column)
    rendered = [list(ids) for _, ids in render_rows(rows, opened.tokenizer, chat) if len(ids) <= max_prompt_tokens]
    learnt_from, held = split(rendered, heldout, most_prompts)
    answered = respond(opened.model, learnt_from, max_tokens, 0, False, cache)
    judging = {mode: respond(opened.model, held, max_tokens, 1, mode == "greedy", cache) for mode in MODES}
    start = load_draft(draft, opened) if draft else carve(opened.model, [int(layer) for layer in layers.split(",")])
    texts = [[*one.prompt_ids, *one.response_ids] for one in answered]
    mask = give_mask_token(start, "auto", opened.tokenizer, texts)
    chosen, drafts, trained = Recipe.parse(recipe or []), dict[Drafting, Any](), {}

    def train(model: Any, asked: Sequence[str], length: float) -> tuple[Any, dict[str, Any]]:
        model = copy.deepcopy(model).float().requires_grad_(True)
        own = Recipe.parse([*(recipe or []), *asked])
        spent = train_ours(model, opened.model, examples_of(answered), own, 60 * length, seed, now=now)
        student = spent.pop("student")
        return student.requires_grad_(False).eval(), spent

    if first:
        start, trained["first"] = train(start, [], first)
    for kind in KINDS:
        asked = [f"parallel={tokens}", f"retain={retain}"] if kind == "parallel" else []
        drafts[kind], trained[kind] = train(start, asked, minutes)
        console.print({kind: trained[kind]})
    facts = describe_run(seed)
    result: dict[str, Any] = {
        "machine": {key: value for key, value in facts.items() if key not in ("uncommitted_changes", "argv")},
        "start": Path(draft).name if draft else f"carved {layers}",
        "minutes": minutes,
        "first": first,
        "cpu_minutes": cpu_minutes,
        "tokens": tokens,
        "retain": retain,
        "mask": mask,
        "recipe": chosen.__dict__,
        "trained": trained,
        "responses": len(answered),
        "heldout": len(held),
        "cells": [],
    }
    for mode, text in judging.items():
        with torch.no_grad():
            result["cells"].append(judged(opened, drafts, text, mode, speed_seconds))
        write_result(out, result)
    console.print(table_of(result))


def table_of(result: dict[str, Any]) -> Table:
    """One line a mode."""
    table = Table(
        "mode", "gamma", "tau", "c of a call", "block", "speed", "parallel over it", "crossing c", title=result["start"]
    )
    for cell in result["cells"]:
        ends = cell["ratio_ci"]
        for short, kind in (("ar", "token by token"), ("parallel", "one pass a block")):
            over = (
                "" if short == "ar" else f"{cell['ratio']:.2f}x" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else "")
            )
            table.add_row(
                f"{cell['mode']}, {kind}",
                str(cell[f"gamma_{short}"]),
                f"{cell[f'tau_{short}']:.2f}",
                f"{cell[f'c_{short}']:.3f}",
                f"{cell[f'block_{short}']:.3f}",
                f"{cell[f'speed_up_{short}']:.2f}x",
                over,
                "" if short == "ar" or cell["crossing_c"] is None else f"{cell['crossing_c']:.2f}",
            )
    return table


if __name__ == "__main__":
    run_script(main)
