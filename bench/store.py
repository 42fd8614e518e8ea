"""Cost of a stored top-k signal: bytes per token, writing, reading in training order, and the time that a step waits for it.

    python bench/store.py --out bench/results/store_cpu.json

Examples have 500 response tokens with the top 64 of random distributions, at a large vocabulary and at the embedded target's. They are
written as training captures them, micro-batch by micro-batch, and read in batches of 32 random examples, as in
an epoch. `read_seconds_a_step`: one such batch, read in the thread that works a step ahead; `waited_seconds_a_step`: the time that the
step itself waited for it, while it computed for `step_seconds`.
"""

from distill.faults import run_script

import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from data.batches.collate import Batch, Example, collate
from data.signals.signal import TopKSignal
from data.signals.store import SignalStore, signal_manifest
from distill.run.provenance import describe_run
from distill.training.teacher import StoredTeacher
from result_file import write_result

EXAMPLES, TOKENS, K, BATCH, MICRO_BATCH = 256, 500, 64, 32, 8
STEP_SECONDS = 0.5
VOCABULARIES = {"large": 151_936, "embedded": 4096}


def random_topk(generator: torch.Generator, vocab_rows: int) -> TopKSignal:
    """The top entries of random distributions, without the full distributions."""
    ids_RK = torch.rand(TOKENS, vocab_rows, generator=generator).topk(K).indices
    log_probs_RV = (torch.randn(TOKENS, K + 1, generator=generator) * 5).sort(descending=True).values.log_softmax(-1)
    return TopKSignal(ids_RK, log_probs_RV[:, :K], log_probs_RV[:, K])


def opened(folder: str, vocab_rows: int) -> SignalStore:
    """The store of all examples."""
    store = SignalStore(Path(folder))
    manifest = signal_manifest(
        "topk", K, temperature=1.0, vocab_rows=vocab_rows, target="random", target_dtype="float32", seed=0
    )
    store.open(manifest, np.full(EXAMPLES, TOKENS))
    return store


def write(store: SignalStore, signals: list[TopKSignal]) -> None:
    """Every example, in micro-batches."""
    for start in range(0, EXAMPLES, MICRO_BATCH):
        numbers = range(start, start + MICRO_BATCH)
        store.write({number: signals[number] for number in numbers})


def waited(store: SignalStore, batches: list[Batch]) -> float:
    """Seconds a step that training spends on the signal when a thread reads a step ahead."""
    teacher, spent = StoredTeacher(store), 0.0
    teacher.read_ahead(batches[:1])
    matrix = torch.randn(512, 512)
    for now, following in itertools.pairwise(batches):
        ahead = threading.Thread(target=teacher.read_ahead, args=([now, following],))
        began = time.perf_counter()
        teacher.signal(now)
        spent += time.perf_counter() - began
        ahead.start()
        while time.perf_counter() - began < STEP_SECONDS:
            matrix @ matrix
        joining = time.perf_counter()
        ahead.join()
        spent += time.perf_counter() - joining
    return spent / (len(batches) - 1)


def measured(vocab_rows: int) -> dict[str, float]:
    """One vocabulary."""
    generator = torch.Generator().manual_seed(0)
    signals = [random_topk(generator, vocab_rows) for _ in range(EXAMPLES)]
    order = np.random.default_rng(0).permutation(EXAMPLES).reshape(-1, BATCH)
    example = Example(np.arange(TOKENS + 1, dtype=np.int32), np.arange(TOKENS + 1) > 0)
    with tempfile.TemporaryDirectory(prefix="store-") as folder:
        began = time.perf_counter()
        store = opened(folder, vocab_rows)
        write(store, signals)
        written = time.perf_counter() - began
        store.close()
        began = time.perf_counter()
        store = opened(folder, vocab_rows)
        opening = time.perf_counter() - began
        seconds = []
        for numbers in [*order, *order, *order]:
            began = time.perf_counter()
            store.read(numbers.tolist())
            seconds.append(time.perf_counter() - began)
        batches = [collate([example] * BATCH, 0, numbers.tolist()) for numbers in order]
        waiting = waited(store, batches)
        on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        store.close()
    count = EXAMPLES * TOKENS
    return {
        "bytes_per_token": on_disk / count,
        "written_tokens_per_second": count / written,
        "opening_seconds": opening,
        "read_tokens_per_second": BATCH * TOKENS / float(np.median(seconds)),
        "read_seconds_a_step": float(np.median(seconds)),
        "waited_seconds_a_step": waiting,
    }


def main(out: Annotated[Path, typer.Option(help="JSON")] = Path("bench/results/store_cpu.json")) -> None:
    """Bytes a token, speeds and waits of the stored top-k."""
    found: dict[str, Any] = {
        "machine": describe_run(0),
        "tokens_of_an_example": TOKENS,
        "k": K,
        "step_seconds": STEP_SECONDS,
    }
    found |= {name: {"vocab_rows": rows, **measured(rows)} for name, rows in VOCABULARIES.items()}
    print(found)
    write_result(out, found)


if __name__ == "__main__":
    run_script(main)
