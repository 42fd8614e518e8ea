"""Alpha after equal training time on the same responses: our default, forward KL, and TRL's GKD. Three seeds, with intervals.

    python bench/alpha_race.py --minutes 2.5 --out bench/results/alpha_race.json
    python bench/alpha_race.py --compare store --steps 300 --out bench/results/alpha_store.json    # top-k store against online teacher

The pair is the embedded target and a draft carved from it, on function heads of the standard library. The target's responses are
generated once, before timing, and shared. Each contestant has --minutes of wall clock for everything else. Alpha is measured on
held-out responses: `sampled` is 1 - TV at temperature 1, `greedy` the share of greedy tokens that are the draft's argmax.

ours         yardstick.py's `Recipe`, changed by `key=value` arguments
forward_kl   the plain loop: AdamW 1e-3, batches of 32, online teacher, no schedule
trl_gkd      TRL's GKDTrainer at its defaults: learning rate 2e-5, batches of 8, JSD, half of the steps on its own samples
trl_gkd_lr   the same with the learning rate and batch size of forward_kl

TRL's linear schedule needs a number of steps, which a short trial before timing estimates. TRL runs in float32 like
the others, not in its default bfloat16, which is slower on a CPU.
"""

from __future__ import annotations

from distill.faults import run_script

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import trl_peer
from data.batches.collate import Example
from data.prompts import stdlib
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.run.provenance import describe_run
from result_file import write_result
from speculative.evaluate import HeldoutResponse
from yardstick import (
    PLAIN,
    Recipe,
    examples_of,
    greedy_agreement,
    interval,
    measure,
    respond,
    train_ours,
    train_plain,
)

CONTESTANTS = ("ours", "forward_kl", "trl_gkd", "trl_gkd_lr")
TRIAL_STEPS = 8  # at most, and at most a quarter of the time


def head_prompts(tokenizer: Any, heldout: bool, most_tokens: int, count: int) -> list[list[int]]:
    """Function heads of one side of the standard library, in a fixed shuffled order."""
    heads = [head for _, head in stdlib.function_head_rows(heldout)]
    random.Random(0).shuffle(heads)
    rows = (tokenizer(head, verbose=False).input_ids for head in heads)
    prompts = [row for row in rows if len(row) <= most_tokens]
    return prompts[:count]


def trl_run(
    draft: Any,
    target: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    seconds: float,
    peer: trl_peer.Peer,
    batch: int,
    most: int,
) -> dict[str, Any]:
    """Train with TRL for the given seconds, after a trial on a copy that estimates the steps of its schedule."""

    def trainer(learner: Any, steps: int) -> Any:
        random.seed(peer.seed)
        return trl_peer.make_trainer(
            peer, learner, target, tokenizer, examples, batch_size=batch, max_new_tokens=most, max_steps=steps
        )

    trial = trl_peer.train_for(trainer(copy.deepcopy(draft), TRIAL_STEPS), seconds / 4)
    steps = max(1, round(seconds / trial["seconds"] * trial["steps"]))
    return trl_peer.train_for(trainer(draft, steps), seconds) | {"planned_steps": steps}


def train(
    name: str,
    draft: Any,
    target: Any,
    tokenizer: Any,
    examples: list[Example],
    recipe: Recipe,
    seconds: float,
    seed: int,
    most: int,
) -> tuple[Any, dict[str, Any]]:
    """(trained draft, time and steps used)."""
    if name == "ours":
        spent = train_ours(draft, target, examples, recipe, seconds, seed)
        return spent.pop("student"), spent
    if name == "forward_kl":
        return draft, train_plain(draft, target, examples, seconds, seed)
    peer = trl_peer.Peer(
        "gkd", temperature=None, defaults=True, seed=seed, lr=PLAIN.lr if name == "trl_gkd_lr" else None
    )
    batch = PLAIN.batch if name == "trl_gkd_lr" else 8
    return draft, trl_run(draft, target, tokenizer, examples, seconds, peer, batch, most)


def judge(
    target: Any, draft: Any, sampled: Sequence[HeldoutResponse], greedy: Sequence[HeldoutResponse]
) -> dict[str, Any]:
    """{sampled: alpha, greedy: alpha, ...}."""
    numbers = measure(target, draft, sampled)
    return {"sampled": numbers["alpha"], "greedy": greedy_agreement(draft, greedy), "measured": numbers}


def summary(runs: list[dict[str, Any]], reference: str) -> dict[str, Any]:
    """Mean and half width of the 95 % t-interval by contestant and rule; gains of the reference are paired by seed."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    table: dict[str, Any] = {}
    for name in names:
        table[name] = {}
        for rule in ("sampled", "greedy"):
            values = {run["seed"]: run[rule] for run in runs if run["name"] == name}
            mean, half = interval(list(values.values()))
            table[name][rule] = {"mean": mean, "half_width": half}
            if name != reference:
                base = {run["seed"]: run[rule] for run in runs if run["name"] == reference}
                gain, gain_half = interval([base[seed] - value for seed, value in values.items()])
                table[name][rule] |= {"reference_gain": gain, "reference_gain_half_width": gain_half}
    return table


def main(
    recipe: Annotated[list[str] | None, typer.Argument(help="key=value of the recipe of `ours`")] = None,
    out: Annotated[Path, typer.Option(help="JSON to write")] = Path("bench/results/alpha_race.json"),
    minutes: Annotated[float, typer.Option(help="of training of each contestant and seed", min=0.001)] = 2.5,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    contestants: Annotated[str, typer.Option(help="comma-separated")] = ",".join(CONTESTANTS),
    compare: Annotated[
        str, typer.Option(help="minutes: the race; store: top-k store against online teacher")
    ] = "minutes",
    steps: Annotated[int, typer.Option(help="of --compare store", min=1)] = 300,
    target: Annotated[str, typer.Option(help="directory, hub id or `embedded`")] = "embedded",
    train_prompts: Annotated[int, typer.Option(min=1)] = 1500,
    heldout_prompts: Annotated[int, typer.Option(min=2)] = 200,
    max_tokens: Annotated[int, typer.Option(help="of a response", min=1)] = 96,
    max_prompt_tokens: Annotated[int, typer.Option(min=1)] = 160,
    cache: Annotated[Path, typer.Option(help="where responses are kept")] = Path("runs/alpha_race"),
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = torch's own choice", min=0)] = 0,
) -> None:
    """Races and judges."""
    if threads:
        torch.set_num_threads(threads)
    chosen, console = Recipe.parse(recipe or []), Console(width=120)
    model, tokenizer = load_model("target", target), load_tokenizer(target)
    prompts = [
        head_prompts(tokenizer, side, max_prompt_tokens, n)
        for side, n in ((False, train_prompts), (True, heldout_prompts))
    ]
    examples = examples_of(respond(model, prompts[0], max_tokens, 0, False, cache))
    sampled = respond(model, prompts[1], max_tokens, 1, False, cache)
    greedy = respond(model, prompts[1], max_tokens, 1, True, cache)
    layers = [int(layer) for layer in chosen.layers.split(",")]
    before = judge(model, carve(model, layers), sampled, greedy)
    runs: list[dict[str, Any]] = []
    if compare == "store":
        names, seconds, reference = ["online", "store"], math.inf, "online"
    else:
        names, seconds, reference = contestants.split(","), 60 * minutes, contestants.split(",")[0]
        if trl_peer.version() is None:
            names = [name for name in names if not name.startswith("trl")]
    for seed in range(seeds):
        for name in names:
            draft = carve(model, layers).requires_grad_(True)
            if compare == "store":
                signal = "online" if name == "online" else "capture"
                spent = train_ours(draft, model, examples, replace(chosen, signal=signal), seconds, seed, steps)
                draft = spent.pop("student")
            else:
                draft, spent = train(name, draft, model, tokenizer, examples, chosen, seconds, seed, max_tokens)
            runs.append({"name": name, "seed": seed} | spent | judge(model, draft, sampled, greedy))
            console.print({key: runs[-1][key] for key in ("name", "seed", "seconds", "steps", "sampled", "greedy")})
    facts = describe_run(0)
    facts["versions"] |= {"trl": trl_peer.version()}
    result = {
        "machine": {key: value for key, value in facts.items() if key not in ("uncommitted_changes", "argv")},
        "compare": compare,
        "minutes": minutes if compare != "store" else None,
        "steps": steps if compare == "store" else None,
        "recipe": asdict(chosen),
        "train_responses": len(examples),
        "before": before,
        "summary": summary(runs, reference),
        "runs": runs,
    }
    write_result(out, result)
    console.print(table_of(result, reference))


def table_of(result: dict[str, Any], reference: str) -> Table:
    """Mean and interval of each contestant, and the gain of the reference."""
    how = f"{result['steps']} steps" if result["compare"] == "store" else f"{result['minutes']:g} minutes"
    table = Table(
        "draft", "alpha, sampled", f"{reference} has more", "alpha, greedy", f"{reference} has more", title=how
    )

    def cell(mean: float, half: float | None) -> str:
        return f"{mean:.4f}" + (f" ± {half:.4f}" if half is not None else "")

    table.add_row("before", cell(result["before"]["sampled"], None), "", cell(result["before"]["greedy"], None), "")
    for name, rules in result["summary"].items():
        cells = []
        for rule in ("sampled", "greedy"):
            value = rules[rule]
            gain = (
                cell(value["reference_gain"], value["reference_gain_half_width"]) if "reference_gain" in value else ""
            )
            cells += [cell(value["mean"], value["half_width"]), gain]
        table.add_row(name, *cells)
    return table


if __name__ == "__main__":
    run_script(main)
