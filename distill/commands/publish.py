"""Puts a pre-trained run where the package ships its embedded target: bf16 weights and a card with how they came to be."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from data.files import write_json
from data.prompts import stdlib
from distill.config.load import load_config
from distill.models.draft import cast_weights
from distill.models.load import load_model, load_tokenizer, model_fingerprint
from distill.run import checkpoint
from distill.run.folder import JUDGEMENT, PROGRESS, step_folder
from speculative.errors import UserError

MAX_BYTES = 16_000_000
CARD = "card.json"


def publish_target(run: Path, to: Path) -> dict[str, Any]:
    """Writes the best checkpoint of a pre-training run to ``to`` with card.json and README.md; returns the card.

    Raises:
        UserError: the run has no best checkpoint, or its weights are larger than may be shipped.
    """
    if not (run / "best").exists():
        raise UserError(f"{run}: no best checkpoint; run `make target` first")
    folder = (run / "best").resolve()
    config = load_config(run / "config.yaml")
    model = load_model("best checkpoint", str(folder / "student"))
    cast_weights(model, torch.bfloat16)
    size = sum(p.numel() for p in model.parameters()) * 2
    if size > MAX_BYTES:
        raise UserError(f"{run}: {size:,} bytes of weights are more than the {MAX_BYTES:,} that may be shipped")
    tokenizer = load_tokenizer(str(folder / "student"))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".target-") as working:
        model.save_pretrained(working)
        tokenizer.save_pretrained(working)
        to.mkdir(exist_ok=True)
        for file in Path(working).iterdir():
            os.replace(file, to / file.name)
    judgement = json.loads((folder / JUDGEMENT).read_text(encoding="utf-8"))
    progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    provenance = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    card = {
        "data": "Python standard library source (PSF licence): every module, then every documented function by itself",
        "python": provenance["python"],
        "left_out": "tests, IDLE's tests, encodings, pydoc topics and other generated tables",
        "heldout_modules": sorted(stdlib.HELDOUT_MODULES),
        "parameters": sum(p.numel() for p in model.parameters()),
        "architecture": config.student.architecture,
        "recipe": "configs/target.yaml",
        "optimizer": config.optim.model_dump(mode="json"),
        "steps": progress["step"],
        "tokens_seen": progress["tokens_seen"],
        "heldout_loss_nats": judgement["heldout_loss"],
        "heldout_perplexity": judgement["perplexity"],
        "heldout_tokens": judgement["heldout_tokens"],
        "chosen_from": _judged_checkpoints(run),
        "training_seconds": round(progress["seconds"].get("train", 0.0)),
        "seed": config.seed,
        "fingerprint": model_fingerprint(model),
        "versions": provenance["versions"],
    }
    write_json(to / CARD, card)
    (to / "README.md").write_text(card_text(card), encoding="utf-8")
    return card


def _judged_checkpoints(run: Path) -> list[str]:
    """Every checkpoint of the run with its tokens and held-out loss: the shipped one has the lowest."""
    rows = []
    for step, score in checkpoint.judged_scores(run):
        progress = json.loads((step_folder(run, step) / PROGRESS).read_text(encoding="utf-8"))
        rows.append(f"step {step}: {progress['tokens_seen']:,} tokens, held-out loss {-score:.3f}")
    return rows


def card_text(card: dict[str, Any]) -> str:
    """The card for people."""
    rows = "\n".join(
        f"| {key.replace('_', ' ')} | {', '.join(map(str, value)) if isinstance(value, list) else value} |"
        for key, value in card.items()
        if not isinstance(value, dict)
    )
    return f"""# The embedded target

A small Llama that writes Python, so that `make demo` needs no hub, no data and no GPU. Trained by this project from nothing with
`make target`: its own byte-level BPE tokenizer of 4096 and `configs/target.yaml`, through the same loop that distils drafts.
It is for trying the tool and for tests; it is no coding assistant.

| | |
|---|---|
{rows}

Licence: Apache-2.0 for the weights; the text they were trained on is under the Python Software Foundation licence.
"""
