"""Costs of the stages of a run: responses, a training step, a judgement, a token of a served signal. Each is compared with the plain way.

    python bench/pipeline.py --out bench/results/pipeline.json            # embedded target, on any device
    python bench/pipeline.py --target DIR --prompts 64 --max-tokens 96

Ratios come from one run with alternating contestants, because machines are noisy.
"""

from __future__ import annotations

from distill.faults import run_script

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from data.batches.collate import Batch, Example, collate
from data.prompts import stdlib
from data.responses.prompt_logprobs import read_topk
from data.responses.rendered import RenderedPrompt
from data.responses.respond import ResponsePlan, row_of
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.models.load import dtype_of, load_model, load_tokenizer
from distill.run.provenance import describe_run
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from result_file import write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.engine.models import end_token_ids
from speculative.evaluate import HeldoutResponse, judge, judge_frozen
from speculative.rules.sampling import SamplingSettings


def alternate(contestants: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of each contestant's results over repeats, after one warm-up call each."""
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, run in contestants.items():
            value = run()
            if repeat:
                seen[name].append(value)
    return {name: statistics.median(values) for name, values in seen.items()}


def wait(device: torch.device) -> None:
    """Wait for the device before the clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bench_responses(target: Any, prompts: list[RenderedPrompt], max_tokens: int, batch_size: int, repeats: int) -> dict:
    """Tokens/s of batched responses: our plain decoder against transformers' generate (left padding), sampled."""
    sampling = SamplingSettings(temperature=0.8)
    settings = DecodeSettings(sampling, 0, "sample", max_tokens, end_token_ids(target))
    plan = ResponsePlan(prompts, 1, 64)
    jobs = [plan.job(number) for number in range(len(prompts))]

    def ours() -> float:
        started = time.perf_counter()
        keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt, _ in jobs]
        responses, _ = decode(target, None, keyed, settings, batch_size=batch_size)
        return sum(len(response.response_ids) for response in responses) / (time.perf_counter() - started)

    def theirs() -> float:
        started, tokens = time.perf_counter(), 0
        for start in range(0, len(jobs), batch_size):
            rows = [list(prompt.prompt_ids) for prompt, _ in jobs[start : start + batch_size]]
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=target.device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=target.device)
            torch.manual_seed(start)
            out = target.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=0.8,
                top_k=0,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            eos = torch.tensor(settings.eos_ids, device=out.device)
            ended = torch.isin(out[:, width:], eos).cumsum(1)
            tokens += int((ended == 0).sum() + (ended.amax(1) > 0).sum())
        wait(target.device)
        return tokens / (time.perf_counter() - started)

    rates = alternate({"ours": ours, "transformers": theirs}, repeats)
    return {"tokens_per_second": rates, "ratio": rates["ours"] / rates["transformers"], "batch_size": batch_size}


def naive_step(module: DraftModule, teacher: Teacher, batch: Batch) -> torch.Tensor:
    """Forward KL with all logits of both models at once: as in a simple trainer."""
    student: Any = module.student
    with torch.no_grad():
        target_logits = teacher.split.model(input_ids=batch.input_ids_BT, use_cache=False).logits
    student_logits = student(input_ids=batch.input_ids_BT, use_cache=False).logits
    rows = batch.rows_R
    target_log_probs = target_logits.flatten(0, 1).log_softmax(-1)[rows]
    student_log_probs = student_logits.flatten(0, 1).log_softmax(-1)[rows]
    return (target_log_probs.exp() * (target_log_probs - student_log_probs)).sum()


def bench_step(target: Any, examples: list[Example], layers: tuple[int, ...], repeats: int) -> dict:
    """Response tokens/s of one forward and backward: chunked and fused against all logits at once."""
    batch = collate(examples, 0).to(target.device)
    teacher = Teacher(target)
    module = DraftModule(carve(target, layers), Objective({"forward_kl": 1.0})).to(target.device).train()

    def chunked() -> float:
        started = time.perf_counter()
        loss, _, _ = module(batch, teacher.signal(batch))
        loss.backward()
        wait(target.device)
        return batch.labels_R.numel() / (time.perf_counter() - started)

    def naive() -> float:
        started = time.perf_counter()
        naive_step(module, teacher, batch).backward()
        wait(target.device)
        return batch.labels_R.numel() / (time.perf_counter() - started)

    rates = alternate({"chunked": chunked, "all_logits": naive}, repeats)
    shape = list(batch.input_ids_BT.shape)
    return {"tokens_per_second": rates, "ratio": rates["chunked"] / rates["all_logits"], "batch": shape}


def bench_judge(target: Any, draft: Any, heldout: list[HeldoutResponse], max_tokens: int, repeats: int) -> dict:
    """Seconds to judge a checkpoint: replay of frozen text alone, and with live decoding."""
    settings = DecodeSettings(SamplingSettings(temperature=0.8), 4, "sample", max_tokens, end_token_ids(target))

    def frozen() -> float:
        started = time.perf_counter()
        judge_frozen(Draft(draft), heldout, settings)
        return time.perf_counter() - started

    def live() -> float:
        started = time.perf_counter()
        judge(target, Draft(draft), heldout, settings, batch_size=32)
        return time.perf_counter() - started

    seconds = alternate({"replay": frozen, "replay_and_live": live}, repeats)
    return {"seconds": seconds, "ratio": seconds["replay_and_live"] / seconds["replay"], "prompts": len(heldout)}


def plain_topk(content: bytes, k: int) -> torch.Tensor:
    """The k best of each place, entry by entry into tensors: as in a simple client."""
    places = json.loads(content)["choices"][0]["prompt_logprobs"][1:]
    ids_RK, logs_RK = torch.zeros((len(places), k), dtype=torch.int64), torch.full((len(places), k), -torch.inf)
    for row, place in enumerate(places):
        pairs = [(int(token), float(entry["logprob"])) for token, entry in place.items()]
        for column, (token, log_prob) in enumerate(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k]):
            ids_RK[row, column], logs_RK[row, column] = token, log_prob
    return logs_RK


def bench_topk(tokens: int, k: int, repeats: int) -> dict:
    """Microseconds of CPU a token to read a server's top-k: at once, entry by entry."""
    rng, vocab_rows = np.random.default_rng(0), 150_000
    ids_RK = rng.choice(vocab_rows, (tokens, k), replace=False)
    logs_RK = np.sort(np.log(rng.dirichlet(np.full(k + 1, 0.2), len(ids_RK))[:, 1:] + 1e-12))[:, ::-1]
    places = [None] + [
        {
            str(i): {"logprob": x, "rank": n, "decoded_token": f" w{n}"}
            for n, (i, x) in enumerate(zip(*row, strict=True), 1)
        }
        for row in zip(ids_RK.tolist(), logs_RK.tolist(), strict=True)
    ]
    content, total = json.dumps({"choices": [{"prompt_logprobs": places}]}).encode(), len(places)

    def cost(read: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            started = time.process_time()
            read()
            return (time.process_time() - started) / (total - 1) * 1e6

        return run

    micros = alternate(
        {
            "arrays": cost(lambda: read_topk(content, 1, total, k, vocab_rows)),
            "plain": cost(lambda: plain_topk(content, k)),
        },
        repeats,
    )
    return {"microseconds_per_token": micros, "ratio": micros["plain"] / micros["arrays"], "k": k}


def main(
    out: Annotated[Path, typer.Option(help="JSON to write")] = Path("bench/results/pipeline.json"),
    target: Annotated[str, typer.Option(help="directory, hub id or `embedded`")] = "embedded",
    prompts: Annotated[int, typer.Option(help="held-out function heads", min=2)] = 64,
    max_tokens: Annotated[int, typer.Option(help="tokens of a response at most", min=2)] = 64,
    batch_size: Annotated[int, typer.Option(help="prompts decoded at once", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="counted runs of each contestant", min=1)] = 3,
) -> None:
    """Times the three stages of a run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model("target", target, dtype=dtype_of("auto", device)).to(device)  # type: ignore[arg-type]
    tokenizer = load_tokenizer(target)
    heads = [head for _, head in stdlib.function_head_rows(True)]
    ids = [tokenizer(head, verbose=False).input_ids for head in heads]
    rendered = [RenderedPrompt(str(n), "stdlib", tuple(row)) for n, row in enumerate(ids) if len(row) <= 128][:prompts]
    depth = model.config.get_text_config().num_hidden_layers
    draft = carve(model, (0, depth - 1)).to(device=device, dtype=model.dtype)  # type: ignore[call-overload]
    settings = DecodeSettings(SamplingSettings(temperature=0.8), 0, "sample", max_tokens, end_token_ids(model))
    responses, _ = decode(model, None, [(p.prompt_id, p.prompt_ids) for p in rendered], settings, batch_size=batch_size)
    examples = [row_of(p, 0, r).example() for p, r in zip(rendered, responses, strict=True)]
    heldout = [HeldoutResponse(r.key, "stdlib", r.prompt_ids, r.response_ids, r.log_target_probs) for r in responses]
    result = {
        "machine": describe_run(0) | {"argv": None},
        "target": target,
        "parameters": {"target": model.num_parameters(), "draft": draft.num_parameters()},
        "responses": bench_responses(model, rendered, max_tokens, batch_size, repeats),
        "step": bench_step(model, examples[:32], (0, depth - 1), repeats),
        "judge": bench_judge(model, draft, heldout, max_tokens, repeats),
        "topk": bench_topk(1000, 64, repeats),
    }
    write_result(out, result)
    table = Table(title=f"{target}, {result['machine']['device']}, {result['machine']['threads']} threads")
    for column in ("stage", "ours", "plain way", "ratio"):
        table.add_column(column)
    rates, step, judged = result["responses"], result["step"], result["judge"]
    both = rates["tokens_per_second"]
    table.add_row(
        "responses, tokens/s",
        f"{both['ours']:.0f}",
        f"transformers {both['transformers']:.0f}",
        f"{rates['ratio']:.2f}",
    )
    both = step["tokens_per_second"]
    table.add_row(
        "training step, tokens/s",
        f"{both['chunked']:.0f}",
        f"all logits {both['all_logits']:.0f}",
        f"{step['ratio']:.2f}",
    )
    both = judged["seconds"]
    both = result["topk"]["microseconds_per_token"]
    table.add_row(
        "a server's top-k, us/token",
        f"{both['arrays']:.1f}",
        f"entry by entry {both['plain']:.0f}",
        f"{result['topk']['ratio']:.1f}",
    )
    table.add_row(
        "judgement, s", f"{both['replay_and_live']:.2f}", f"replay alone {both['replay']:.2f}", f"{judged['ratio']:.2f}"
    )
    Console().print(table)


if __name__ == "__main__":
    run_script(main)
