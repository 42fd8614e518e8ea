"""Memory of a training step: at real shapes without a GPU, and of adapters on a CPU.

    python bench/memory.py --out bench/results/memory.json
    python bench/memory.py --adapters --out bench/results/adapter_memory_cpu.json

Target and draft have their published shapes and no weights. Forward, loss and backward of the trainer's own module run under torch's
FakeTensorMode (bf16 autocast, an online teacher in bfloat16, the head in chunks), and the bytes of all live storages are
summed. A line is fitted through two micro-batches. `states`: AdamW's moments, which this step does not make, 8 bytes
per draft weight; with several ranks 4 bytes more for the copy of the gradients. Not included: fragmentation, library
workspaces, the judge's caches.

`--adapters`: a draft of ADAPTED's shape is loaded from its directory and takes STEPS real steps of AdamW in float32, by
each of CELLS in a process
of its own. The product dequantises a quantised base; KEPT shows what it would need otherwise. `loaded_mb`: peak resident memory while the
draft is loaded, `steps_mb`: during the steps, both without the imports.
"""

from distill.faults import run_script

import gc
import json
import re
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data.batches.collate import Batch
from data.signals.signal import DenseSignal
from distill.config.sections import LoraConfig, LossConfig, OptimConfig, StudentConfig
from distill.loss import chunk_heads
from distill.loss.definitions import Objective
from distill.models.heads import SplitModel
from distill.models.load import EMBEDDED, load_model
from distill.models.student import add_lora, make_student, with_adapters
from distill.models.target import load_target_side
from distill.training.module import DraftModule
from distill.training.optim import make_optimizers
from result_file import write_result

GB = 1e9
# Shapes as the models' own config.json give them.
QWEN3 = {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}
LLAMA3 = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}


def _shape(family: dict[str, Any], width: int, mlp: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers}
    return family | sizes | {"num_attention_heads": heads, "tie_word_embeddings": tied}


SHAPES = {
    "Qwen3-0.6B": _shape(QWEN3, 1024, 3072, 28, 16, True),
    "Qwen3-4B": _shape(QWEN3, 2560, 9728, 36, 32, True),
    "Qwen3-32B": _shape(QWEN3, 5120, 25_600, 64, 64, False),
    "Llama-3.2-1B": _shape(LLAMA3, 2048, 8192, 16, 32, True),
    "Llama-3.1-8B": _shape(LLAMA3, 4096, 14_336, 32, 32, False),
}
PAIRS = (("Qwen3-4B", "Qwen3-0.6B"), ("Llama-3.1-8B", "Llama-3.2-1B"), ("Qwen3-32B", "Qwen3-0.6B"))
DEVICE_GB, SHARE = 80, 0.9
# 126 million weights in the layers, with the vocabulary of the embedded target.
ADAPTED: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
PLAIN, INT8, KEPT = "plain", "int8", "LoRA, base kept in int8"
CELLS = {"all weights": PLAIN, "LoRA": PLAIN, "LoRA, int8 base": INT8, KEPT: INT8}
STEPS, SEQUENCES, TOKENS = 3, 2, 256


class Alive(TorchDispatchMode):
    """Bytes of all live storages, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return result


def config_of(name: str) -> Any:
    """A published shape, as transformers wants it."""
    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape, max_position_embeddings=40_960)


def model_of(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def shaped(name: str) -> PreTrainedModel:
    """A model whose tensors have shapes and no data."""
    with torch.device("meta"):
        return model_of(config_of(name), torch.float32)


def step_bytes(target: Any, draft: Any, sequences: int, tokens: int, objective: str = "lk_hybrid") -> tuple[int, int]:
    """(bytes of both models' weights, bytes alive at the highest point of a step); target and draft: their configs."""
    # The check compares numbers, which these tensors do not have. The loss would take their class for that of packed weights.
    plain = mock.patch.object(chunk_heads, "_is_linear", return_value=True)
    with mock.patch.object(SplitModel, "_check"), plain, FakeTensorMode(), Alive() as alive:
        teacher, student = model_of(target, torch.bfloat16), model_of(draft, torch.float32)
        weights = alive.now
        module = DraftModule(student, Objective({objective: 1.0}, chunk_tokens=LossConfig().chunk_tokens))
        ids = torch.zeros((sequences, tokens), dtype=torch.int64)
        rows = torch.arange(sequences * tokens - 1)
        with torch.no_grad():
            hidden = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
        signal = DenseSignal(hidden.reshape(-1, hidden.shape[-1])[rows], teacher.get_output_embeddings())
        del hidden
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, _, _ = module(Batch(ids, rows, torch.zeros_like(rows)), signal)
        loss.backward()
    return weights, alive.peak


def write_bases(folder: Path) -> None:
    """One random draft, plain and with int8 layers, with the embedded target's tokenizer."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    side = load_target_side(EMBEDDED)
    config = AutoConfig.for_model("qwen3", **ADAPTED, vocab_size=side.config.vocab_size, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / PLAIN)
    int8: dict[str, Any] = {"dtype": torch.float32, "quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}
    AutoModelForCausalLM.from_pretrained(folder / PLAIN, **int8).save_pretrained(folder / INT8)
    for name in (PLAIN, INT8):
        side.tokenizer.save_pretrained(folder / name)


def peak_mb(again: bool = False) -> float:
    """Peak resident memory of this process, in megabytes; `again` starts it anew from here."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if again:
        Path("/proc/self/clear_refs").write_text("5")
    return int(found.group(1)) * 1024 / 1e6 if found else 0.0


def take_steps(cell: str, path: Path) -> dict[str, float]:
    """Load a draft and train it, with adapters or whole; megabytes above what the process had."""
    side = load_target_side(EMBEDDED)
    peak_mb(again=True)
    before = peak_mb()
    lora = LoraConfig() if "LoRA" in cell else None
    if cell == KEPT and lora is not None:
        student = add_lora(load_model(KEPT, str(path)), lora.rank, lora.alpha, lora.target_modules)
    else:
        config = StudentConfig(init="pretrained", path=str(path), lora=lora)
        student = with_adapters(make_student(config, side, side.tokenizer), lora)
    module = DraftModule(student, Objective({"ce": 1.0})).train()
    gc.collect()  # the quantised model that the draft was made from
    loaded = peak_mb(again=True)
    optimizers = make_optimizers(module, OptimConfig())
    ids = torch.randint(side.config.vocab_size, (SEQUENCES, TOKENS))
    rows = torch.arange(SEQUENCES * TOKENS - 1)
    for _ in range(STEPS):
        loss, _, _ = module(Batch(ids, rows, ids.flatten()[rows + 1]))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"loaded_mb": loaded - before, "steps_mb": peak_mb() - before}


def adapter_rows() -> list[dict[str, Any]]:
    """Each of CELLS in a process of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_bases(Path(folder))
        for name, base in CELLS.items():
            command = [sys.executable, __file__, "--cell", name, "--base", str(Path(folder) / base)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append({"trained": name, **json.loads(done.stdout.splitlines()[-1])})
    return rows


def main(
    out: Annotated[Path | None, typer.Option(help="JSON")] = None,
    tokens: Annotated[int, typer.Option(help="tokens of a sequence")] = 1536,
    adapters: Annotated[bool, typer.Option("--adapters", help="measure adapters instead")] = False,
    cell: Annotated[str | None, typer.Option(hidden=True)] = None,
    base: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Peak memory of a training step, pair by pair, or with adapters."""
    if cell is not None and base is not None:
        return print(json.dumps(take_steps(cell, base)))
    if adapters:
        measured = adapter_rows()
        side = Table("trained", "loading", "steps", title="MB")
        for row in measured:
            side.add_row(row["trained"], *(f"{row[name]:.0f}" for name in ("loaded_mb", "steps_mb")))
        Console().print(side)
        if out is not None:
            write_result(out, {"torch": torch.__version__, "adapters": measured})
        return None
    table = Table("target", "draft", "weights", "+ states", "peak at 1", "each more", f"fit {DEVICE_GB} GB", title="GB")
    rows = []
    for target, draft in track(PAIRS, "steps", transient=True):
        configs = config_of(target), config_of(draft)
        weights, one = step_bytes(*configs, 1, tokens)
        each = step_bytes(*configs, 2, tokens)[1] - one
        states = 8 * sum(parameter.numel() for parameter in shaped(draft).parameters())
        fit = max(0, int((SHARE * DEVICE_GB * GB - states - one) // each) + 1)
        rows.append(
            {
                "target": target,
                "draft": draft,
                "tokens": tokens,
                "weights_gb": weights / GB,
                "states_gb": states / GB,
                "peak_gb_at_1": one / GB,
                "gb_each_more": each / GB,
                "fit": fit,
                "fit_with_bytes": DEVICE_GB * GB * SHARE,
            }
        )
        table.add_row(target, draft, *(f"{value / GB:.1f}" for value in (weights, states, one, each)), str(fit))
    Console().print(table)
    if out is not None:
        write_result(out, {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    run_script(main)
