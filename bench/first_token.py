"""Time to the first token when the draft reads the prompt before it, after it, or not at all.

    python bench/first_token.py --out bench/results/first_token_cpu.json

The embedded target and its first layer as the draft, sampled at temperature 0.7. The three ways take turns on the same prompts (the first
160 tokens of held-out modules), each prompt once for every way, with one request at a time and then with 8 that arrive together.
`tokens_per_second` is of whole responses, prefill included. `first_token_ms` and `per_token_ms` are percentiles over requests.
"""

from distill.faults import run_script

from pathlib import Path
from typing import Annotated

import torch
import typer

from data.prompts.stdlib import corpus_documents
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.run.provenance import describe_run
from result_file import write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.drafter import ModelDrafter
from speculative.measure.metrics import waits_of
from speculative.rules.sampling import SamplingSettings

WAYS = {"target alone": (0, False), "draft reads first": (2, False), "draft reads late": (2, True)}  # gamma, late


def main(
    out: Path = Path("first_token.json"),
    prompts: Annotated[int, typer.Option(help="prompts of each load")] = 48,
    max_tokens: Annotated[int, typer.Option(help="tokens of a response")] = 32,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 1,
) -> None:
    """Measure and write the result."""
    torch.set_num_threads(threads)
    target, tokenizer = load_model("target", "embedded"), load_tokenizer("embedded")
    draft = carve(target, (0,))
    texts = [tokenizer(text).input_ids[:160] for text in corpus_documents(True)]
    texts = [ids for ids in texts if len(ids) == 160][:prompts]
    rows = []
    for load in (1, 8):
        groups = [texts[start : start + load] for start in range(0, len(texts) - load + 1, load)]
        seen: dict[str, tuple[list[Response], list[float]]] = {way: ([], []) for way in WAYS}
        for number, group in enumerate([groups[0], *groups]):  # the first turn is a warm-up
            asked = [(f"{number} {place}", ids) for place, ids in enumerate(group)]
            order = list(WAYS)[number % 3 :] + list(WAYS)[: number % 3]
            for way in order:
                gamma, late = WAYS[way]
                settings = DecodeSettings(SamplingSettings(0.7), gamma, "sample", max_tokens)
                drafter = ModelDrafter(draft) if gamma else None
                found, timing = decode(target, drafter, asked, settings, batch_size=load, draft_reads_late=late)
                if number:
                    seen[way][0].extend(found)
                    seen[way][1].append(timing.total_seconds)
        for way, (responses, seconds) in seen.items():
            tokens = sum(len(one.response_ids) for one in responses)
            rows.append(
                {"load": load, "way": way, "requests": len(responses), "tokens_per_second": tokens / sum(seconds)}
                | {name: waits for name, waits in waits_of(responses).items() if name != "stages_ms"}
            )
            first, per_token = rows[-1]["first_token_ms"], rows[-1]["per_token_ms"]
            print(f"{load} {way:18} first {first} per token {per_token} {tokens / sum(seconds):.0f} tokens/s")
    write_result(out, {"threads": threads, "rows": rows, "machine": describe_run(0)})


if __name__ == "__main__":
    run_script(main)
