"""Our decoder compared with OpenVINO GenAI, llama.cpp and transformers on this CPU: same weights, same prompts, one run.

    make peers                                                             # the environments of the other engines
    python bench/peers.py --target DIR --draft DIR --prompts FILE --chat --out bench/results/peers.json

Greedy, token ids in and out, float32 weights; `--weights bfloat16` is f16 in llama.cpp, and `int8` (weights alone, each
output a scale; what is no matrix product in bfloat16) Q8_0. Texts may part at near-ties there. A prompt is used only if the
target's answer has `--max-tokens` tokens without an end token, so all engines generate the same number. Engines take turns
prompt by prompt, or chunk by chunk if several prompts are decoded at once, in another order each time, because machine speed
drifts. A rate is the tokens divided by the sum of each prompt's median seconds over the rounds; `best` uses each prompt's
least. Seconds run from call to return in the engine, prompt included.
"""

from __future__ import annotations

from distill.faults import run_script

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from distill.models.load import load_model, load_tokenizer
from distill.run.prompts import render_rows
from distill.run.provenance import describe_run
from peer_workers.child import OURS, WORKERS, Child, Contestant, Ours
from peer_workers.worker import Setting
from prompt_options import MessagesColumn, PromptColumn, load_rows
from result_file import write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY

console = Console(width=150)
READS = 60  # reads of the weights of which the fastest counts


@dataclass
class Score:
    """Results of one contestant in a cell: its texts, and the seconds of each chunk by round."""

    texts: dict[int, list[list[int]]] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def rate(self, best: bool) -> float:
        """Tokens per second over all chunks, with the minimum or median seconds of each."""
        tokens = sum(len(ids) for texts in self.texts.values() for ids in texts)
        return tokens / sum(min(each) if best else float(np.median(each)) for each in self.seconds.values())

    def equal(self, other: Score) -> int:
        """Number of texts equal to the other's, token by token."""
        return sum(
            one == two for key, texts in self.texts.items() for one, two in zip(texts, other.texts[key], strict=True)
        )


def chosen_prompts(target: Any, prompts: Sequence[list[int]], count: int, max_tokens: int) -> list[list[int]]:
    """The first `count` prompts whose greedy answer does not end within max_tokens.

    Raises:
        UserError: there are fewer.
    """
    settings = DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens, end_token_ids(target))
    found: list[list[int]] = []
    for start in range(0, len(prompts), 64):
        chunk = [(str(number), ids) for number, ids in enumerate(prompts[start : start + 64])]
        responses, _ = decode(target, None, chunk, settings, batch_size=64)
        found += [response.prompt_ids for response in responses if not response.finished]
        if len(found) >= count:
            return found[:count]
    raise UserError(
        f"--prompts: only {len(found)} of {len(prompts)} answers have {max_tokens} tokens before they end; "
        "give more prompts, or a smaller --count or --max-tokens"
    )


def read_seconds(weights: int, threads: int) -> float:
    """Seconds of the fastest of many reads of as many float32 weights, by a sum and by a product with a vector."""
    torch.set_num_threads(threads)
    rows = torch.ones(-(-weights // 1024), 1024)
    vector, seconds = torch.ones(1024), []
    for read in [rows.sum, lambda: rows.mv(vector)] * READS:
        began = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def compete(
    contestants: dict[str, Contestant], setting: Setting, prompts: list[list[int]], rounds: int
) -> dict[str, Score]:
    """Run each contestant on every chunk in turn, after a warm-up. One that fails is left out, and the reason is printed."""
    scores: dict[str, Score] = {}
    chunks = [prompts[start : start + setting.batch] for start in range(0, len(prompts), setting.batch)]
    for name, one in contestants.items():
        try:
            one.open(setting)
            one.decode(chunks[0])
            scores[name] = Score()
        except UserError as error:
            leave_out(one, error)
    for turn in range(rounds * len(chunks)):
        number = turn % len(chunks)
        order = list(scores)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            try:
                texts, seconds = contestants[name].decode(chunks[number])
            except UserError as error:
                leave_out(contestants[name], error)
                del scores[name]
                continue
            scores[name].texts[number] = texts
            scores[name].seconds.setdefault(number, []).append(seconds)
    for name in scores:
        contestants[name].close()
    return scores


def leave_out(one: Contestant, error: UserError) -> None:
    """Print why a contestant is left out of a cell, and stop it."""
    console.print(f"left out: {error}", markup=False, soft_wrap=True)
    with suppress(UserError):
        one.close()


def cells_of(scores: dict[str, Score], setting: Setting, draft: str) -> list[dict[str, Any]]:
    """The result's rows of one cell, ours first."""
    ours = scores[OURS]
    return [
        {
            "peer": name,
            "mode": setting.mode,
            "batch": setting.batch,
            "threads": setting.threads,
            "draft": None if setting.draft is None else draft,
            "tokens_per_second": score.rate(best=False),
            "best_tokens_per_second": score.rate(best=True),
            "ours_over_peer": ours.rate(best=False) / score.rate(best=False),
            "best_ours_over_peer": ours.rate(best=True) / score.rate(best=True),
            "texts_equal": score.equal(ours),
        }
        for name, score in scores.items()
    ]


def settings_of(base: Setting, threads: Sequence[int], gamma: int, at_once: int, drafted: int) -> Iterator[Setting]:
    """The cells: alone, to the first token and with the draft at batch 1, alone and (drafted > 0) with the draft on several at once."""
    for count in threads:
        one = replace(base, threads=count)
        alone = replace(one, draft=None, gamma=0)
        yield alone
        yield replace(alone, max_tokens=1)
        yield replace(one, gamma=gamma)
        if at_once:
            yield replace(alone, batch=at_once)
        if drafted:
            yield replace(one, gamma=gamma, batch=drafted)


def contestants_of(
    stack: ExitStack, names: Sequence[str], ours: Ours, work: Path, weights: str
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Ours and each peer that can be started, and the peers' versions. Their models lie in `work`."""
    folders = {"target": work / "target", "draft": work / "draft"}
    found, versions = {OURS: ours}, {}
    for name in names:
        try:
            child = Child(name, work, folders, weights, stack)
            versions |= child.versions()
        except UserError as error:
            console.print(f"left out: {error}", markup=False, soft_wrap=True)
        else:
            found[name] = child
    return found, versions


def main(
    target: Annotated[str, typer.Option(help="directory of the target")],
    draft: Annotated[str, typer.Option(help="directory of the draft")],
    prompts: Annotated[str, typer.Option(help="file (jsonl, json, csv, parquet, txt; .gz), directory or hub id")],
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
    prompt_column: PromptColumn = "",
    messages_column: MessagesColumn = "",
    chat: Annotated[bool, typer.Option(help="wrap each prompt in the target's chat template")] = False,
    peers: Annotated[str, typer.Option(help="contestants, comma-separated")] = ",".join(WORKERS),
    count: Annotated[int, typer.Option(help="prompts", min=1)] = 48,
    max_tokens: Annotated[int, typer.Option(help="tokens of every response", min=2)] = 48,
    longest: Annotated[int, typer.Option(help="leave out prompts with more tokens")] = 192,
    gamma: Annotated[int, typer.Option(help="drafted tokens per block", min=1)] = 4,
    threads: Annotated[str, typer.Option(help="CPU threads, comma-separated")] = "1,2",
    at_once: Annotated[int, typer.Option(help="prompts at once of the batched part; 0 = leave it out", min=0)] = 48,
    drafted: Annotated[int, typer.Option(help="also this number of prompts at once with the draft; 0 = no", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="rounds over the prompts", min=1)] = 3,
    runner: Annotated[str, typer.Option(help="of our model calls: auto, eager, compile")] = "auto",
    weights: Annotated[str, typer.Option(help="type of the weights: float32, bfloat16, int8")] = "float32",
) -> None:
    """Compare the decoder with other engines on this CPU."""
    widths = [int(part) for part in threads.split(",")]
    names = [name for name in peers.split(",") if name]
    if unknown := set(names) - set(WORKERS):
        raise UserError(f"--peers {', '.join(sorted(unknown))}: known are {', '.join(WORKERS)}")
    if weights not in ("float32", "bfloat16", "int8"):
        raise UserError(f"--weights {weights}: known are float32, bfloat16, int8")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    models = {role: load_model(role, path, dtype=dtype).eval() for role, path in [("target", target), ("draft", draft)]}
    tokenizer = load_tokenizer(target)
    rows = load_rows(prompts, prompt_column, messages_column)
    fitting = [list(ids) for _, ids in render_rows(rows, tokenizer, chat) if 4 <= len(ids) <= longest]
    taken = chosen_prompts(models["target"], fitting, count, max_tokens)
    numbers = {role: sum(weight.numel() for weight in model.parameters()) for role, model in models.items()}
    context, eos_ids = max(map(len, taken)) + max_tokens, end_token_ids(models["target"])
    base = Setting("target", "draft", 0, 1, 1, max_tokens, context, eos_ids, weights)
    cells: list[dict[str, Any]] = []
    reads: dict[str, float] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for role, model in models.items():
            model.save_pretrained(work / role)
            tokenizer.save_pretrained(work / role)
        if weights == "int8":
            for model in models.values():
                quantize_(model, Int8WeightOnlyConfig())
        ours = Ours(models["target"], models["draft"], runner)
        contestants, versions = contestants_of(stack, names, ours, work, weights)
        for setting in settings_of(base, widths, gamma, at_once, drafted):
            read = 1e3 * read_seconds(numbers["target"], setting.threads)
            reads[str(setting.threads)] = min(read, reads.get(str(setting.threads), read))
            scores = compete(contestants, setting, taken, rounds)
            cells += cells_of(scores, setting, Path(draft).name)
            show(cells[-len(scores) :], count)
    console.print(
        "one read of the target's weights in float32, ms by threads:",
        str({key: round(ms, 2) for key, ms in reads.items()}),
    )
    if out is not None:
        result = {
            "machine": describe_run(0) | {"argv": None, "dtype": weights},
            "peer_versions": versions,
            "target": Path(target).name,
            "draft": Path(draft).name,
            "target_weights": numbers["target"],
            "draft_weights": numbers["draft"],
            "runner": runner,
            "gamma": gamma,
            "prompts": count,
            "prompt_tokens": sum(map(len, taken)),
            "max_tokens": max_tokens,
            "rounds": rounds,
            "weights_read_ms": reads,
            "cells": cells,
        }
        write_result(out, result)
        console.print(f"written to {out}")


def show(cells: list[dict[str, Any]], texts: int) -> None:
    """A table of one cell. texts: how many could be equal."""
    first = cells[0]
    title = f"{first['mode']}, batch {first['batch']}, threads {first['threads']}"
    table = Table("", "tokens/s", "best", "ours over it", "best", f"texts equal of {texts}", title=title)
    for row in cells:
        figures = ("tokens_per_second", "best_tokens_per_second", "ours_over_peer", "best_ours_over_peer")
        table.add_row(row["peer"], *(f"{row[name]:.4g}" for name in figures), str(row["texts_equal"]))
    console.print(table)


if __name__ == "__main__":
    run_script(main)
