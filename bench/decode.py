"""Our decoder compared with transformers' and with a lower time limit from bare model calls. Ratios come from one run.

    python bench/decode.py --out bench/results/decode.json                 # embedded target and a carved draft, code
    python bench/decode.py --target DIR --draft DIR --prompts FILE         # any pair

The limit of a block is gamma bare one-token draft calls and one bare (gamma + 1)-token target call with transformers'
own cache, alternating as in a block. `floor_share` is our tokens per second after the prefill, divided by
tau / limit seconds. Contestants alternate prompt by prompt, because machine speed drifts.
"""

from __future__ import annotations

from distill.faults import run_script

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache, GenerationConfig

from data.prompts import stdlib
from data.prompts.columns import prompt_row
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.run.prompts import render_rows
from distill.run.provenance import describe_run
from prompt_options import MessagesColumn, PromptColumn, load_rows
from result_file import write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt
from speculative.drafters.drafter import Drafter, ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.gamma import AdaptiveGamma, GammaPolicy
from speculative.drafters.lookup import Lookahead, PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

console = Console(width=150)
Contestant = Callable[[Prompt], tuple[int, float, float]]  # tokens, seconds, seconds after the prefill


@dataclass
class Score:
    """Results of one contestant over all prompts."""

    tokens: int = 0
    seconds: float = 0.0
    decode_seconds: float = 0.0
    blocks: int = 0
    least_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Bench:
    """One pair, its prompts by kind, and the contestants."""

    def __init__(self, target: Any, draft: Any, max_tokens: int):
        self.target, self.draft, self.max_tokens = target, draft, max_tokens
        self.kinds: dict[str, list[Prompt]] = {}
        self.stores: dict[str, ResponseIndex] = {}
        self.eos_ids = end_token_ids(target)
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    def settings(self, mode: str, gamma: int) -> DecodeSettings:
        sampling = GREEDY if mode == "greedy" else SamplingSettings(1.0)
        rule = Rule.usual(sampling.temperature)
        return DecodeSettings(sampling, gamma, rule, self.max_tokens, self.eos_ids)

    def ours(
        self, mode: str, gamma: int, drafter: Drafter | None, score: Score, policy: GammaPolicy | None = None
    ) -> Contestant:
        """Our decoder at batch 1. A drafter or a policy keeps its state from one prompt to the next."""

        def run(prompt: Prompt) -> tuple[int, float, float]:
            responses, timing = decode(self.target, drafter, [prompt], self.settings(mode, gamma), policy=policy)
            score.blocks += timing.target_calls
            tokens = len(responses[0].response_ids)
            return tokens, timing.total_seconds, timing.total_seconds - timing.prefill_seconds

        return run

    def transformers(self, mode: str, gamma: int) -> Contestant:
        """transformers' generate, assisted by the draft when gamma > 0."""
        greedy = mode == "greedy"
        sampling = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        pad = self.eos_ids[0] if self.eos_ids else -1
        config = GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=self.max_tokens,
            eos_token_id=list(self.eos_ids) or None,
            pad_token_id=pad,
            **sampling,
        )

        def run(prompt: Prompt) -> tuple[int, float, float]:
            self.draft.generation_config.num_assistant_tokens = gamma
            assistant = {"assistant_model": self.draft} if gamma else {}
            ids = torch.tensor([list(prompt[1])], device=self.target.device)
            torch.manual_seed(len(prompt[1]))
            wait(self.target.device)
            began = time.perf_counter()
            with torch.no_grad():
                out = self.target.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **assistant
                )
            wait(self.target.device)
            seconds = time.perf_counter() - began
            return out.shape[1] - ids.shape[1], seconds, seconds

        return run

    def least_seconds(self, gamma: int, prompt: Prompt, length: int, blocks: int) -> float:
        """Seconds of `blocks` bare blocks in the middle of a response of this length."""
        context = len(prompt[1]) + length // 2
        ids = torch.tensor([(list(prompt[1]) * (1 + context // len(prompt[1])))[:context]], device=self.target.device)
        caches = [DynamicCache(config=model.config) for model in (self.target, self.draft)]
        with torch.no_grad():
            for model, cache in zip((self.target, self.draft), caches, strict=True):
                model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            wait(self.target.device)
            began = time.perf_counter()
            for _ in range(blocks):
                for _ in range(gamma):
                    self.draft(input_ids=ids[:, :1], past_key_values=caches[1], use_cache=True)
                self.target(input_ids=ids[:, : gamma + 1], past_key_values=caches[0], use_cache=True)
                caches[0].crop(-gamma - 1)
                caches[1].crop(-gamma)
            wait(self.target.device)
        return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compete(
    prompts: Sequence[Prompt], contestants: dict[str, Contestant], scores: dict[str, Score], repeats: int, label: str
) -> None:
    """Every contestant on every prompt, turn by turn; the first round of each is a warm-up."""
    for run in contestants.values():
        run(prompts[0])
    for score in scores.values():
        score.blocks, score.least_seconds = 0, 0.0
    for prompt in track(prompts, description=label, console=console, transient=True):
        for _ in range(repeats):
            for name, run in contestants.items():
                tokens, seconds, decode_seconds = run(prompt)
                score = scores[name]
                score.tokens += tokens
                score.seconds += seconds
                score.decode_seconds += decode_seconds


def bench_batch_1(bench: Bench, kind: str, mode: str, gammas: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """The draft at each gamma, compared with transformers plain and assisted, and with the lower time limit."""
    names = ["plain", "hf plain", *(f"{who} {gamma}" for gamma in gammas for who in ("ours", "hf"))]
    scores = {name: Score() for name in names}
    contestants = {
        "plain": bench.ours(mode, 0, None, scores["plain"]),
        "hf plain": bench.transformers(mode, 0),
    }
    for gamma in gammas:
        ours = bench.ours(mode, gamma, ModelDrafter(bench.draft), scores[f"ours {gamma}"])
        contestants[f"ours {gamma}"] = with_floor(bench, ours, gamma, scores[f"ours {gamma}"])
        contestants[f"hf {gamma}"] = bench.transformers(mode, gamma)
    compete(bench.kinds[kind], contestants, scores, repeats, f"batch 1 {mode} {kind}")
    cells = []
    for gamma in gammas:
        own = scores[f"ours {gamma}"]
        tau = own.tokens / own.blocks
        highest_rate = own.tokens / own.least_seconds
        cells.append(
            cell(bench, kind, 1, mode, gamma, "draft", own, tau)
            | {
                "floor_share": own.tokens / own.decode_seconds / highest_rate,
                "vs_hf_assisted": own.rate / scores[f"hf {gamma}"].rate,
                "vs_hf_plain": own.rate / scores["hf plain"].rate,
                "vs_plain": own.rate / scores["plain"].rate,
            }
        )
    return cells


def with_floor(bench: Bench, ours: Contestant, gamma: int, score: Score) -> Contestant:
    """Run the same number of bare blocks right after each of our responses, at the context of its middle."""

    def run(prompt: Prompt) -> tuple[int, float, float]:
        before = score.blocks
        result = ours(prompt)
        if score.blocks > before:
            score.least_seconds += bench.least_seconds(gamma, prompt, result[0], score.blocks - before)
        return result

    return run


def cell(
    bench: Bench, kind: str, batch: int, mode: str, gamma: int, drafter: str, score: Score, tau: float
) -> dict[str, Any]:
    return {
        "device": bench.target.device.type,
        "prompts": kind,
        "batch": batch,
        "mode": mode,
        "gamma": gamma,
        "drafter": drafter,
        "tokens_per_second": score.rate,
        "tau": tau,
        "floor_share": None,
        "vs_hf_assisted": None,
        "vs_plain": None,
    }


def bench_batched(bench: Bench, kind: str, mode: str, gamma: int, batch: int, repeats: int) -> dict[str, Any]:
    """Evaluation speed: all prompts in one call with recycled rows, compared with transformers assisted one by one."""
    own_kind = bench.kinds[kind]
    copies = -(-3 * batch // len(own_kind))  # Each row is filled three times; samples differ by their key.
    prompts = [(f"{key}/{copy}", ids) for copy in range(copies) for key, ids in own_kind]
    scores = {name: Score() for name in ("ours", "plain", "adaptive", "hf")}
    assisted = bench.transformers(mode, gamma)
    policies: dict[str, GammaPolicy | None] = {"ours": None, "plain": None, "adaptive": AdaptiveGamma(gamma)}
    for turn in range(repeats + 1):
        for name, policy in policies.items():
            drafter = None if name == "plain" else ModelDrafter(bench.draft)
            settings = bench.settings(mode, gamma if drafter is not None else 0)
            responses, timing = decode(bench.target, drafter, prompts, settings, batch_size=batch, policy=policy)
            if turn:
                scores[name].tokens += sum(len(response.response_ids) for response in responses)
                scores[name].seconds += timing.total_seconds
                scores[name].blocks += sum(response.blocks for response in responses)
        for prompt in own_kind if turn else own_kind[:1]:
            tokens, seconds, _ = assisted(prompt)
            if turn:
                scores["hf"].tokens += tokens
                scores["hf"].seconds += seconds
    own = scores["ours"]
    return cell(bench, kind, batch, mode, gamma, "draft", own, own.tokens / own.blocks) | {
        "vs_hf_assisted": own.rate / scores["hf"].rate,
        "vs_plain": own.rate / scores["plain"].rate,
        "adaptive_vs_plain": scores["adaptive"].rate / scores["plain"].rate,
        "rows_decoded": len(prompts),
    }


def bench_drafters(bench: Bench, kind: str, mode: str, gammas: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Every drafter at every gamma and with adaptive gamma, compared with plain decoding; batch 1."""
    layers = bench.target.config.get_text_config(decoder=True).num_hidden_layers
    makers: dict[str, Callable[[], Drafter]] = {
        "draft": lambda: ModelDrafter(bench.draft),
        "prompt-lookup": PromptLookup,
        "past-responses": lambda: PastResponses(bench.stores[kind]),
        "early-exit": lambda: EarlyExit(bench.target, max(1, layers // 3)),
        "lookahead": Lookahead,
        "lookup+draft": lambda: LookupDraft(PromptLookup(min_ngram=2), ModelDrafter(bench.draft)),
    }
    if kind not in bench.stores:
        del makers["past-responses"]  # There are no other prompts: it would find the very answers it is measured on.
    scores, contestants = {"plain": Score()}, {}
    contestants["plain"] = bench.ours(mode, 0, None, scores["plain"])
    for name, make in makers.items():
        for gamma in gammas:
            scores[f"{name} {gamma}"] = Score()
            contestants[f"{name} {gamma}"] = bench.ours(mode, gamma, make(), scores[f"{name} {gamma}"])
        own = scores[f"{name} adaptive"] = Score()
        contestants[f"{name} adaptive"] = bench.ours(mode, max(gammas), make(), own, AdaptiveGamma(max(gammas)))
    compete(bench.kinds[kind], contestants, scores, repeats, f"drafters {mode} {kind}")
    cells = []
    for name in makers:
        fixed = {gamma: scores[f"{name} {gamma}"] for gamma in gammas}
        best = max(score.rate for score in fixed.values())
        for gamma, own in [*fixed.items(), (0, scores[f"{name} adaptive"])]:
            cells.append(
                cell(
                    bench,
                    kind,
                    1,
                    mode,
                    gamma or max(gammas),
                    name if gamma else f"{name}, adaptive",
                    own,
                    own.tokens / own.blocks,
                )
                | {"vs_plain": own.rate / scores["plain"].rate}
                | ({} if gamma else {"vs_best_fixed": own.rate / best})
            )
    return cells


def load_pair(target: str, draft: str, dtype_name: str, device: str) -> tuple[Any, Any, Any]:
    """Target, draft and tokenizer; without a draft the target's first and last layer."""
    dtype = getattr(torch, dtype_name)
    model = load_model("target", target, dtype=dtype)
    small = load_model("draft", draft, dtype=dtype) if draft else carve(model, [0, -1]).to(dtype)  # type: ignore[call-overload]
    return model.to(device).eval(), small.to(device).eval(), load_tokenizer(target)


def load_prompts(
    path: str, tokenizer: Any, chat: bool, count: int, longest: int, prompt_column: str = "", messages_column: str = ""
) -> dict[str, list[Prompt]]:
    """Prompts by kind: of a source as a config names it, with an optional column `kind`, or the embedded code domain."""
    if path:
        rows = load_rows(path, prompt_column, messages_column, "kind")
    else:
        rows = [prompt_row(head, None, "code", "", None) for _, head in stdlib.function_head_rows(True)]
    kinds: dict[str, list[Prompt]] = {}
    for number, (row, (_, ids)) in enumerate(zip(rows, render_rows(rows, tokenizer, chat), strict=True)):
        if 4 <= len(ids) <= longest and len(kinds.setdefault(row.domain, [])) < count:
            kinds[row.domain].append((f"{row.domain}:{number}", ids))
    if not any(kinds.values()):
        raise UserError(f"--prompts {path}: none has 4 to {longest} tokens; raise --longest, or give others")
    return kinds


def with_past(bench: Bench, kinds: dict[str, list[Prompt]], count: int) -> None:
    """Fill the bench: `count` prompts a kind, datastores from the target's answers to the others, and kind `copied`:
    prompt, answer, prompt again, so that the expected continuation is in the context.
    """
    vocab = bench.target.get_output_embeddings().weight.shape[0]
    context = bench.target.config.get_text_config(decoder=True).max_position_embeddings
    copied: list[Prompt] = []
    for kind, rows in kinds.items():
        past, _ = decode(bench.target, None, rows, bench.settings("greedy", 0))
        others = [[*text.prompt_ids, *text.response_ids] for text in past[count:]]
        if others:
            bench.stores[kind] = ResponseIndex.build(others, vocab)
        bench.kinds[kind] = rows[:count]
        copied += [
            (f"copied:{text.key}", [*text.prompt_ids, *text.response_ids, *text.prompt_ids]) for text in past[:count]
        ]
    fitting = [(key, ids) for key, ids in copied if len(ids) + bench.max_tokens <= context]
    if fitting:
        bench.kinds["copied"] = fitting[:count]
        if bench.stores:
            bench.stores["copied"] = next(iter(bench.stores.values()))


def main(
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
    target: Annotated[str, typer.Option(help="directory of the target, or `embedded`")] = "embedded",
    draft: Annotated[str, typer.Option(help="directory of the draft; empty = two layers of the target")] = "",
    prompts: Annotated[
        str,
        typer.Option(help="file (jsonl, json, csv, parquet, txt; .gz), directory or hub id; optional column `kind`"),
    ] = "",
    prompt_column: PromptColumn = "",
    messages_column: MessagesColumn = "",
    chat: Annotated[bool, typer.Option(help="wrap each prompt in the target's chat template")] = False,
    gammas: Annotated[str, typer.Option(help="drafted tokens per block, comma-separated")] = "1,3,5",
    count: Annotated[int, typer.Option(help="prompts per kind", min=1)] = 12,
    max_tokens: Annotated[int, typer.Option(help="tokens of a response at most", min=8)] = 96,
    longest: Annotated[int, typer.Option(help="leave out prompts with more tokens")] = 192,
    batch: Annotated[int, typer.Option(help="rows of the batched part; 0 = leave it out")] = 16,
    drafters: Annotated[bool, typer.Option(help="also every drafter and adaptive gamma")] = True,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = torch's own")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    repeats: Annotated[int, typer.Option(help="rounds over the prompts", min=1)] = 2,
    cpu_time: Annotated[
        bool, typer.Option(help="CPU seconds of one thread: for a machine that others use too")
    ] = False,
) -> None:
    """Compare the decoder with transformers and with the lower time limit."""
    if cpu_time:
        threads = 1
        patch.object(time, "perf_counter", time.thread_time).start()
    if threads:
        torch.set_num_threads(threads)
    widths = [int(part) for part in gammas.split(",")]
    model, small, tokenizer = load_pair(target, draft, dtype, device)
    kinds = load_prompts(prompts, tokenizer, chat, 4 * count, longest, prompt_column, messages_column)
    bench = Bench(model, small, max_tokens)
    with_past(bench, kinds, count)
    cells: list[dict[str, Any]] = []
    for kind in bench.kinds:
        for mode in ("greedy", "sample"):
            cells += bench_batch_1(bench, kind, mode, widths, repeats)
            if batch:
                cells.append(bench_batched(bench, kind, mode, sorted(widths)[len(widths) // 2], batch, repeats))
            if drafters:
                cells += bench_drafters(bench, kind, mode, widths, repeats)
    result = {
        "machine": describe_run(0) | {"argv": None, "dtype": dtype},
        "clock": "CPU time of one thread" if cpu_time else "wall",
        "target": Path(target).name,
        "draft": Path(draft).name if draft else "carved 0,-1",
        "max_tokens": max_tokens,
        "cells": cells,
    }
    show(cells)
    if out is not None:
        write_result(out, result)
        console.print(f"written to {out}")


def show(cells: list[dict[str, Any]]) -> None:
    """One table of all cells."""
    columns = (
        "prompts",
        "batch",
        "mode",
        "gamma",
        "drafter",
        "tokens_per_second",
        "tau",
        "floor_share",
        "vs_hf_assisted",
        "vs_plain",
        "vs_best_fixed",
    )
    table = Table(*columns)
    for row in cells:
        values = [row.get(name) for name in columns]
        table.add_row(
            *("" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value) for value in values)
        )
    console.print(table)


if __name__ == "__main__":
    run_script(main)
