"""`make target`: train the embedded target from scratch on Python source that is available on every machine with this package.

python bench/train_target.py [--to FOLDER] [--run FOLDER] [--steps N] ...

It trains the tokenizer, builds the corpus, runs a plain Accelerate loop on one device, and writes bf16 weights with
card.json and README.md.
The same command resumes a killed run from its last checkpoint. The corpus differs between Python versions and package releases, and
floating-point sums differ between machines, so the weights are similar but not identical.
"""

from distill.faults import run_script

import copy
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, get_linear_schedule_with_warmup

from data.files import open_modes, write_json
from data.prompts import stdlib
from distill.models.load import EMBEDDED_FOLDER, model_fingerprint

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
# Packages that ours are built on, under the BSD and MIT licences, written like the library itself: more text to learn from.
NEIGHBOURS = frozenset({"click", "fsspec", "jinja2", "networkx", "rich", "urllib3"})
SEED = 0
BATCH, MICRO_BATCH = 16, 16  # windows of a step, and of a forward
# Muon for the layers' matrices, AdamW for embeddings and vectors, at one learning rate; linear warm-up, then straight down to
# zero, which beats a cosine that ends above it (2502.15938).
LR, BETAS, WEIGHT_DECAY, WARMUP_RATIO, MAX_GRAD_NORM = 2e-3, (0.9, 0.95), 0.1, 0.03, 1.0
HELDOUT_WINDOWS = 128
PROGRESS = "progress.json"
PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "numpy")


def neighbours() -> Iterator[str]:
    """Source text of every module of the installed NEIGHBOURS; one that is not installed has none."""
    for package in sorted(NEIGHBOURS):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                if stdlib.EXCLUDED_FOLDERS & set(path.relative_to(folder).parts):
                    continue
                if source := path.read_text(encoding="utf-8").strip():
                    yield source + "\n"


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (GPT-2 style: any text is representable) with pad, bos, eos as ids 0, 1, 2.

    ``max_length`` is the context in tokens that the model of this tokenizer will have. Text is encoded with a leading bos.
    """
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: with a small vocabulary, numbers are otherwise spelled in arbitrary lumps.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def architecture(width: int, layers: int, window: int) -> dict[str, Any]:
    """Fields of the Llama; deep rather than wide: depth is what a draft saves."""
    return {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": width * 7 // 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": window,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


def grown(start: Path, layers: int, window: int) -> LlamaForCausalLM:
    """The model of a folder with layers put in between, evenly, that change nothing yet (block expansion, 2401.02415).

    A new layer is a copy of the one before it whose two projections into the residual stream are zero. First and last layer
    stay the first and the last. In float32.
    """
    old = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    config = copy.deepcopy(old.config)
    config.num_hidden_layers, config.max_position_embeddings, config.dtype = layers, window, torch.float32
    new, count = LlamaForCausalLM(config), old.config.num_hidden_layers
    # Spread evenly over the places between two old layers; some get more than one where there are fewer.
    behind = [int((index + 0.5) * (count - 1) / (layers - count)) for index in range(layers - count)]
    new.model.embed_tokens.load_state_dict(old.model.embed_tokens.state_dict())
    new.model.norm.load_state_dict(old.model.norm.state_dict())
    place = 0
    for index, layer in enumerate(old.model.layers):
        new.model.layers[place].load_state_dict(layer.state_dict())
        place += 1
        for _ in range(behind.count(index)):
            new.model.layers[place].load_state_dict(layer.state_dict())
            for projection in (new.model.layers[place].self_attn.o_proj, new.model.layers[place].mlp.down_proj):
                torch.nn.init.zeros_(projection.weight)
            place += 1
    assert place == layers, (place, layers)
    return new


def with_wide_heads(model: LlamaForCausalLM, width: int) -> LlamaForCausalLM:
    """The same function with attention heads of `width` dimensions, a multiple of 2 and no less than they have; in float32.

    The new dimensions are zero. Rotary pairs stay pairs, and turn as before: with theta' = theta^(width / old) their frequencies
    theta'^(-2i / width) are the old theta^(-2i / old). Queries make up for the softmax scale width^-1/2.
    """
    config: Any = copy.deepcopy(model.config)
    old, groups = config.head_dim, (config.num_attention_heads, config.num_key_value_heads)
    config.head_dim, config.dtype = width, torch.float32
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_theta": config.rope_parameters["rope_theta"] ** (width / old),
    }
    wide = LlamaForCausalLM(config)
    halves = torch.cat((torch.arange(old // 2), width // 2 + torch.arange(old // 2)))
    weights = {name: weight.float() for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        part = name.split(".")[-2]
        if part not in ("q_proj", "k_proj", "v_proj", "o_proj"):
            continue
        heads = groups[0] if part in ("q_proj", "o_proj") else groups[1]
        rows_HDI = (weight.T if part == "o_proj" else weight).reshape(heads, old, -1)
        wider_HDI = rows_HDI.new_zeros((heads, width, rows_HDI.shape[-1]))
        wider_HDI[:, halves] = rows_HDI * (width / old) ** 0.5 if part == "q_proj" else rows_HDI
        wider = wider_HDI.reshape(heads * width, -1)
        weights[name] = wider.T.contiguous() if part == "o_proj" else wider
    wide.load_state_dict(weights)
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide


def make_optimizers(model: torch.nn.Module, lr: float = LR) -> list[torch.optim.Optimizer]:
    """Muon, its updates scaled to AdamW's size so that one learning rate serves both, and AdamW; vectors do not decay."""
    tables = [m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)]  # the head is tied to it
    matrices = [p for p in model.parameters() if p.dim() == 2 and all(p is not table for table in tables)]
    groups = [
        {"params": tables, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True),
        torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
    ]


def batch_indices(step: int, windows: int) -> np.ndarray:
    """The windows (BATCH,) of a step: each epoch in another order, without the remainder."""
    steps_of_epoch = max(1, windows // BATCH)
    order = np.random.default_rng([SEED, step // steps_of_epoch]).permutation(windows)
    place = step % steps_of_epoch * BATCH
    return np.resize(order, max(windows, BATCH))[place : place + BATCH]


def mean_loss(model: torch.nn.Module, windows: np.ndarray, accelerator: Accelerator) -> float:
    """Nats a token over all windows (N, T), every token but the first of a window predicted."""
    total = 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(windows), MICRO_BATCH):
            ids_BT = torch.from_numpy(windows[start : start + MICRO_BATCH]).long().to(accelerator.device)
            total += float(model(input_ids=ids_BT, labels=ids_BT).loss) * len(ids_BT)
    model.train()
    return total / len(windows)


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run, the oldest first."""
    return sorted(run.glob("step-*"))


def save_checkpoint(run: Path, accelerator: Accelerator, progress: dict[str, Any]) -> None:
    """Write everything that resuming needs, atomically, then keep only the judged checkpoints and the newest."""
    temporary = run / ".writing"
    shutil.rmtree(temporary, ignore_errors=True)
    accelerator.save_state(str(temporary))
    write_json(temporary / PROGRESS, progress)
    os.replace(temporary, run / f"step-{progress['step']:06}")
    judged = {f"step-{row['step']:06}" for row in progress["judged"]}
    for folder in checkpoints(run)[:-1]:
        if folder.name not in judged:
            shutil.rmtree(folder)


def fit(
    model: LlamaForCausalLM,
    windows: np.ndarray,
    heldout: np.ndarray,
    run: Path,
    steps: int,
    judge_every: int,
    save_every: int,
    lr: float = LR,
) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Train from the last checkpoint: (the model with the lowest held-out loss, a log)."""
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=BATCH // MICRO_BATCH)
    optimizers = make_optimizers(model, lr)
    wrapped, *optimizers = accelerator.prepare(model, *optimizers)
    schedules = [
        get_linear_schedule_with_warmup(
            optimizer.optimizer, num_warmup_steps=round(WARMUP_RATIO * steps), num_training_steps=steps
        )
        for optimizer in optimizers
    ]
    accelerator.register_for_checkpointing(*schedules)
    progress: dict[str, Any] = {"step": 0, "judged": [], "seconds": 0.0}
    if found := checkpoints(run):
        accelerator.load_state(str(found[-1]))
        progress = json.loads((found[-1] / PROGRESS).read_text(encoding="utf-8"))
    while True:
        step = progress["step"]
        if (step % judge_every == 0 or step == steps) and all(row["step"] != step for row in progress["judged"]):
            loss, tokens = mean_loss(wrapped, heldout, accelerator), step * BATCH * (windows.shape[1] - 1)
            progress["judged"].append({"step": step, "tokens": tokens, "heldout_loss": loss})
            save_checkpoint(run, accelerator, progress)
            accelerator.print(f"step {step:>6}  held-out loss {loss:.4f} nats  perplexity {math.exp(loss):.2f}")
        elif step % save_every == 0 and not (run / f"step-{step:06}").exists():
            save_checkpoint(run, accelerator, progress)
        if step == steps:
            break
        started = time.perf_counter()
        for indices in np.split(batch_indices(step, len(windows)), BATCH // MICRO_BATCH):
            ids_BT = torch.from_numpy(windows[indices]).long().to(accelerator.device)
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(input_ids=ids_BT, labels=ids_BT).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), MAX_GRAD_NORM)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        progress = progress | {"step": step + 1, "seconds": progress["seconds"] + time.perf_counter() - started}
    best = min(progress["judged"], key=lambda row: row["heldout_loss"])
    accelerator.load_state(str(run / f"step-{best['step']:06}"))
    return accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False), progress


def ship(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: dict[str, Any], to: Path) -> None:
    """Weights in bf16, tokenizer, card.json and README.md, each file whole."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".target-") as working:
        model.save_pretrained(working)
        tokenizer.save_pretrained(working)
        write_json(Path(working) / "card.json", card)
        (Path(working) / "README.md").write_text(card_text(card), encoding="utf-8")
        open_modes(Path(working))
        for file in Path(working).iterdir():
            os.replace(file, to / file.name)


def make_card(
    model: LlamaForCausalLM,
    recipe: dict[str, Any],
    fields: dict[str, Any],
    heldout: np.ndarray,
    progress: dict[str, Any],
) -> dict[str, Any]:
    """card.json: how the weights were made. recipe: the program's options."""
    best = min(progress["judged"], key=lambda row: row["heldout_loss"])
    window = heldout.shape[1]
    return {
        "data": "Python standard library source (PSF licence): every module, then every documented function by itself; every "
        f"module of {', '.join(sorted(NEIGHBOURS))} (BSD, MIT)",
        "python": platform.python_version(),
        "left_out": "tests, IDLE's tests, encodings, pydoc topics and other generated tables",
        "heldout_modules": sorted(stdlib.HELDOUT_MODULES),
        "parameters": sum(p.numel() for p in model.parameters()),
        "architecture": fields,
        **({"grown_from": _before(recipe["start"])} if recipe["start"] else {}),
        "recipe": f"{recipe['steps']} steps of {BATCH} windows of {window} tokens, cross-entropy, bf16 autocast",
        "optimizer": {
            "name": "muon",
            "lr": recipe["lr"],
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "warmup_ratio": WARMUP_RATIO,
            "schedule": "linear, to zero",
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "steps": best["step"],
        "tokens_seen": best["tokens"],
        "heldout_loss_nats": best["heldout_loss"],
        "heldout_perplexity": math.exp(best["heldout_loss"]),
        "heldout_tokens": heldout.shape[0] * (window - 1),
        "chosen_from": [
            f"step {row['step']}: {row['tokens']:,} tokens, held-out loss {row['heldout_loss']:.3f}"
            for row in progress["judged"]
        ],
        "training_seconds": round(progress["seconds"]),
        "seed": SEED,
        "fingerprint": model_fingerprint(model),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def _before(start: str) -> str:
    """The card of the weights that this training continued from."""
    path = Path(start) / "card.json"
    if not path.exists():
        return start
    card = json.loads(path.read_text(encoding="utf-8"))
    return (
        f"{card['architecture']['num_hidden_layers']} layers after {card['steps']} steps ({card['tokens_seen']:,} tokens, held-out loss "
        f"{card['heldout_loss_nats']:.3f}, fingerprint {card['fingerprint']}), the others put in between as identities"
    )


def card_text(card: dict[str, Any]) -> str:
    """The model card as Markdown."""
    rows = "\n".join(
        f"| {key.replace('_', ' ')} | {', '.join(map(str, value)) if isinstance(value, list) else value} |"
        for key, value in card.items()
        if not isinstance(value, dict)
    )
    return f"""# The embedded target

A small Llama that writes Python, so that `make demo` needs no hub, no data and no GPU. Trained by this project from nothing: its
own byte-level BPE tokenizer of 4096, then the recipe below, which `make target` (bench/train_target.py) repeats.
It is for trying the tool and for tests; it is no coding assistant.

| | |
|---|---|
{rows}

Licence: Apache-2.0 for the weights; the text they were trained on is under the Python Software Foundation, BSD and MIT licences.
"""


def windows_of(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, window: int) -> np.ndarray:
    """Documents joined by eos and cut into windows; the incomplete last window is dropped. int32 (N, window)."""
    documents_of_ids = tokenizer(list(documents), verbose=False)["input_ids"]
    joined = (token for ids in documents_of_ids for token in (*ids, int(tokenizer.eos_token_id)))
    stream = np.fromiter(joined, dtype=np.int32)
    return stream[: len(stream) // window * window].reshape(-1, window)


def train_target(
    to: Annotated[Path, typer.Option(help="folder of the weights, tokenizer and card")] = EMBEDDED_FOLDER,
    run: Annotated[Path, typer.Option(help="folder of the checkpoints")] = Path("runs/target"),
    steps: Annotated[int, typer.Option(help="optimizer steps", min=1)] = 1000,
    judge_every: Annotated[int, typer.Option(help="steps between held-out losses; the best is shipped", min=1)] = 500,
    save_every: Annotated[int, typer.Option(help="steps between checkpoints", min=1)] = 100,
    width: Annotated[int, typer.Option(help="hidden size, a multiple of 8", min=8)] = 160,
    layers: Annotated[int, typer.Option(help="decoder layers", min=1)] = 16,
    vocab_size: Annotated[int, typer.Option(help="tokens of the vocabulary", min=300)] = 4096,
    window: Annotated[int, typer.Option(help="tokens of a training sequence, and the context", min=8)] = 384,
    documents: Annotated[int, typer.Option(help="limit of documents of each side; 0 = all", min=0)] = 0,
    lr: Annotated[float, typer.Option(help="peak learning rate", min=0.0)] = LR,
    served_heads: Annotated[
        int,
        typer.Option(
            help="padded size of an attention head in the saved weights (engines have kernels for 64, not for 40); 0 = none"
        ),
    ] = 0,
    start: Annotated[
        Path | None, typer.Option(help="go on from these weights and their tokenizer, with more layers put in between")
    ] = None,
) -> None:
    """Train the embedded target: an hour or more on two cores as it is shipped."""
    recipe = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in locals().items()
        if name not in ("to", "run", "save_every")
    }
    run.mkdir(parents=True, exist_ok=True)
    noted = run / "recipe.json"
    if noted.exists() and json.loads(noted.read_text(encoding="utf-8")) != recipe:
        raise typer.BadParameter(f"{run} contains a run with other options: give another --run, or remove it")
    write_json(noted, recipe)
    train, heldout = (stdlib.corpus_documents(heldout=side)[: documents or None] for side in (False, True))
    train += itertools.islice(neighbours(), documents or None)
    modules = [text for _, text in stdlib.modules(heldout=False)][: documents or None]
    tokenizer = (
        PreTrainedTokenizerFast.from_pretrained(start) if start else train_tokenizer(modules, vocab_size, window)
    )
    windows = windows_of(train, tokenizer, window)
    judged = windows_of(heldout, tokenizer, window)
    judged = judged[np.linspace(0, len(judged) - 1, min(len(judged), HELDOUT_WINDOWS)).astype(int)]
    torch.manual_seed(SEED)
    fields = architecture(width, layers, window)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if start:
        model = grown(start, layers, window)
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ids, **fields))
    print(f"{windows.size:,} training tokens, {sum(p.numel() for p in model.parameters()):,} parameters")
    best, progress = fit(model, windows, judged, run, steps, judge_every, save_every, lr)
    if served_heads:
        best = with_wide_heads(best, served_heads)
        fields |= {name: getattr(best.config, name) for name in ("head_dim", "rope_parameters")}
    best.bfloat16()
    card = make_card(best, recipe, fields, judged, progress)
    ship(best, tokenizer, card, to)
    print(
        f"{card['parameters']:,} parameters, held-out loss {card['heldout_loss_nats']:.3f}, fingerprint {card['fingerprint']}: {to}"
    )


if __name__ == "__main__":
    run_script(train_target)
