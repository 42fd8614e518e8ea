"""Step costs on this CPU, eager and compiled, small and large models, and the predicted speed-up of stored acceptance rates.

    python bench/large_steps.py --out bench/results/large_steps_cpu.json                 # published layouts, random weights
    python bench/large_steps.py --target DIR --draft DIR --layouts '' --dtypes float32   # your own pair

A speed-up is tau / (gamma c + v), where c is a draft step and v a call of gamma + 1 tokens, both in plain steps. A small model's
step is limited by arithmetic, so v grows with gamma; a large one's is limited by reading weights, so v stays near 1. Costs are
measured in the real block loop. Weights can be random, because they do not affect the time of a step. tau comes from stored
results, by replay of trained pairs. Every speed-up is therefore a prediction and marked as such.

`read`: one pass over as many bytes as the target's weights, the minimum time of a step. Timings alternate within a repeat.
"""

from distill.faults import run_script

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from distill.models.load import load_model
from distill.run.provenance import describe_run
from result_file import ROOT, write_result
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.engine.cached_model import CachedModel
from speculative.engine.models import evaluating, vocab_rows
from speculative.engine.runners import COMPILED, EAGER
from speculative.measure.cost import StepCosts, measure_costs
from speculative.rules.sampling import GREEDY

QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": True}
LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, "tie_word_embeddings": True}
# Of the targets as their own config.json give them; the drafts have their targets' vocabulary.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-0.6B": (
        QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        QWEN3 | {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    ),
    "Llama-3.2-1B": (
        LLAMA3 | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
        LLAMA3 | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64},
    ),
}  # fmt: skip
# tau by gamma of trained pairs, by replay on held-out prompts: file and keys.
ACCEPTANCE = {
    "wikisql, carved draft": ("yardstick_wikisql_carved_cpu.json", ("runs", 0, "tau")),
    "wikisql, small draft": ("yardstick_wikisql_draft_cpu.json", ("runs", 0, "tau")),
    "code, 4 of 32 layers": ("parallel_carved4_5_cpu.json", ("cells", 0, "taus_ar")),
}
GAMMAS = (1, 3, 5, 8)


def random_model(layout: dict[str, Any]) -> PreTrainedModel:
    """A model of this layout in bfloat16 whose weights are small random numbers."""
    config = AutoConfig.for_model(**{"max_position_embeddings": 4096, **layout})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0), dtype=torch.float32).mul_(0.02).bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            flat = weight.view(-1)
            flat.copy_(
                noise.repeat(-(-flat.numel() // len(noise)))[: flat.numel()] if weight.dim() > 1 else torch.ones(1)
            )
    fresh = type(model.base_model.rotary_emb)(config)  # its table is not a weight
    model.base_model.rotary_emb = fresh
    model.tie_weights()
    return model.eval()


def in_dtype(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    """The model in float32, bfloat16, or bfloat16 with 8-bit matrices."""
    if dtype == "float32":
        return model.float()
    model = model.bfloat16()
    if dtype == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        head: Any = model.lm_head  # with rows of its own, where the embedding has them in bfloat16
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        quantize_(model, Int8WeightOnlyConfig(version=2))
    return model


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of what a step reads: all matrices once; of the embedding a row, unless it is the head too."""
    embedding = model.get_input_embeddings().weight
    weights = {id(weight): weight for weight in model.parameters()}
    if model.lm_head.weight is not embedding:
        weights.pop(id(embedding), None)
    return sum(weight.qdata.nbytes if hasattr(weight, "qdata") else weight.nbytes for weight in weights.values())


def best_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The fastest of as many calls as fit, after a warm-up. Other load on the machine only adds time, so the minimum is best."""
    call()
    best, began = np.inf, time.perf_counter()
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return float(best)


def step_of(model: PreTrainedModel, runner: str, context: int) -> Callable[[], torch.Tensor]:
    """A plain step after the given number of tokens."""
    cached = CachedModel(model, "target", 1, context + 1, runner)
    ids = torch.randint(0, vocab_rows(model), (1, context), generator=torch.Generator().manual_seed(0))
    cached.prefill(ids.numpy(), [0], np.array([context]))
    return lambda: cached.feed(ids[:, :1], np.array([context]), 1)


def predictions(costs: StepCosts) -> list[dict[str, Any]]:
    """The best gamma of each stored acceptance at these costs."""
    rows = []
    for name, (file, keys) in ACCEPTANCE.items():
        found: Any = json.loads((ROOT / "bench/results" / file).read_text(encoding="utf-8"))
        for key in keys:
            found = found[key]
        taus = {int(gamma): tau for gamma, tau in found.items() if int(gamma) <= max(GAMMAS)}
        speed_ups = {gamma: tau / costs.block_price(gamma) for gamma, tau in taus.items()}
        gamma = max(speed_ups, key=speed_ups.__getitem__)
        rows.append(
            {"acceptance": name, "gamma": gamma, "tau": taus[gamma], "speed_up": speed_ups[gamma], "how": "predicted"}
        )
    return rows


def measure(
    name: str, target: PreTrainedModel, draft: PreTrainedModel, dtype: str, seconds: float, context: int
) -> dict[str, Any]:
    """Measure one pair in one dtype, with the current number of threads."""
    read = torch.zeros(weight_bytes(target) // 4)
    with evaluating(target, draft):
        plain = {runner: best_seconds(step_of(target, runner, context), seconds) for runner in (COMPILED, EAGER)}
        read_seconds = best_seconds(read.sum, seconds / 2)
    settings = DecodeSettings(GREEDY, 0, "greedy")
    costs = measure_costs(target, Draft(draft), settings, gammas=GAMMAS, context=context, seconds=4 * seconds)
    return {
        "pair": name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "target_megabytes": weight_bytes(target) / 1e6,
        "draft_megabytes": weight_bytes(draft) / 1e6,
        "step_ms": 1e3 * plain[COMPILED],
        "eager_step_ms": 1e3 * plain[EAGER],
        "read_ms": 1e3 * read_seconds,
        "share_of_read": read_seconds / plain[COMPILED],
        "c": costs.cost_ratio,
        "v": {str(gamma): costs.verify_ratio(gamma) for gamma in GAMMAS},
        "speed_ups": predictions(costs),
    }


def main(
    layouts: Annotated[str, typer.Option(help="published layouts, by commas: " + ", ".join(LAYOUTS))] = ",".join(
        LAYOUTS
    ),
    target: Annotated[str, typer.Option(help="directory of a target of yours, or `embedded`")] = "",
    draft: Annotated[str, typer.Option(help="directory of its draft")] = "",
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, int8; by commas")] = "bfloat16,int8",
    threads: Annotated[str, typer.Option(help="numbers of threads, by commas")] = "1,2",
    context: Annotated[int, typer.Option(help="tokens of the text before a block", min=8)] = 128,
    seconds: Annotated[float, typer.Option(help="seconds a timing may take")] = 4.0,
    out: Annotated[Path | None, typer.Option(help="write the result here as JSON")] = None,
) -> None:
    """Time the steps of each pair and predict the speed-up of stored acceptance rates."""
    named = [(name, *map(random_model, LAYOUTS[name])) for name in filter(None, layouts.split(","))]
    if target:
        named.append((Path(target).name, load_model("target", target), load_model("draft", draft)))
    table = Table(
        "pair",
        "dtype",
        "threads",
        "step, ms",
        "eager",
        "read",
        "c",
        "v(1)",
        "v(3)",
        "v(5)",
        "v(8)",
        "predicted speed-ups",
    )
    rows = []
    for name, large, small in named:
        for dtype in track(dtypes.split(","), name):
            pair = in_dtype(large, dtype), in_dtype(small, dtype)
            for count in map(int, threads.split(",")):
                torch.set_num_threads(count)
                row = measure(name, *pair, dtype, seconds, context)
                rows.append(row)
                found = ", ".join(f"{one['speed_up']:.2f}x ({one['gamma']})" for one in row["speed_ups"])
                numbers = [row["step_ms"], row["eager_step_ms"], row["read_ms"], row["c"], *row["v"].values()]
                table.add_row(name, dtype, str(count), *(f"{number:.3g}" for number in numbers), found)
    Console(width=170).print(table)
    if out is not None:
        machine = describe_run(0) | {"argv": None, "dtype": dtypes}
        write_result(out, {"machine": machine, "context": context, "rows": rows})


if __name__ == "__main__":
    run_script(main)
