"""What a run is going to do: prompts, answers, steps, memory and disk, as lines; and one prompt as the target sees it."""

import contextlib
import math
import shutil
from typing import Any

import torch
from rich.filesize import decimal

from data.responses.rendered import RenderedPrompt, prompt_lengths
from data.responses.store import TOKEN_BYTES
from data.signals.columns import bytes_per_token
from distill.config.run import RunConfig
from distill.models.student import outlined_student
from distill.models.target import Target
from distill.models.text_model import without_weights
from distill.run.logged import logged_answers
from distill.run.prompts import PromptSets
from distill.training.micro_batch import state_bytes
from distill.training.optim import default_lr
from speculative.engine.memory import cache_bytes_per_request, free_bytes
from speculative.errors import UserError
from speculative.explain.token_class import token_pieces, token_text

SHOWN_TOKENS = 20  # at each end of a prompt
STATES = 2  # checkpoints that keep what a resumed run needs


def plan_lines(config: RunConfig, target: Target, prompts: PromptSets, device: torch.device, ranks: int) -> list[str]:
    """The plan of a run whose length is settled (`RunConfig.settled`); needs no weights. Raises UserError: as `outlined_student`."""
    draft = outlined_student(config.student, target.side.config, config.target.trust_remote_code)
    train, serving, lengths = config.train, config.serving, prompt_lengths(prompts.train)
    answers, logs = len(prompts.train) * serving.samples_per_prompt, config.data.responses == "logged"
    logged = (
        f", up to {len(logged_answers(prompts.train, config.data.logged_share)):,} of them from logs" if logs else ""
    )
    tokens, most = int(lengths.sum()), answers * serving.max_tokens
    epochs, lr = config.sequences(train.steps) / answers, config.optim.lr
    objective = " + ".join(
        f"{weight:g} {name}" if weight != 1 else name for name, weight in config.loss_weights().items()
    )
    checkpoints = 1 + -(-train.steps // config.judge.every)
    memory, disk = _memory(config, target, draft, int(lengths.max()), ranks), _disk(config, target, draft, tokens, most)
    free, there = free_bytes(device), next(path for path in config.folder.absolute().parents if path.exists())
    rate = f"{lr or default_lr(draft):g} ({'optim.lr' if lr else 'by the size of the draft'})"
    lines = [
        f"  prompts        {len(prompts.train):,} to train on ({tokens:,} tokens), {len(prompts.heldout):,} held out",
        f"  answers        {answers:,} of up to {serving.max_tokens} tokens each: at most {most:,} tokens{logged}",
        f"  training       {train.steps:,} steps of {train.batch_size} sequences = {epochs:.3g} epochs; {checkpoints} checkpoints",
        f"  learning rate  {rate}, {config.optim.name}, {objective}",
        f"  memory         {_sizes(memory)}; {'' if free is None else f'{decimal(free)} free on {device}; '}activations come on top",
        f"  disk           {_sizes(disk)}; {decimal(shutil.disk_usage(there).free)} free",
    ]
    if (trained := round(config.sequences(train.steps))) < answers:
        enough = math.ceil(answers / config.sequences(1))
        lines.append(
            f"warning: {answers - trained:,} of {answers:,} answers are never trained on; raise train.steps to {enough:,} or more, set "
            "train.epochs instead, or read fewer prompts (limit)"
        )
    return lines


def prompt_lines(prompt: RenderedPrompt, tokenizer: Any) -> list[str]:
    """A prompt as the target sees it: its first and last tokens with their ids."""
    ids, special = list(prompt.prompt_ids), set(tokenizer.all_special_ids)
    texts = zip(ids, token_pieces(tokenizer, ids), strict=True)
    pieces = [f"{token_text(tokenizer, one) if one in special else piece!r} {one}" for one, piece in texts]
    between = [f"... {len(ids) - 2 * SHOWN_TOKENS:,} tokens ..."]
    parts = (pieces[:SHOWN_TOKENS], between, pieces[-SHOWN_TOKENS:]) if len(ids) > 2 * SHOWN_TOKENS else (pieces,)
    rows = ["  " + "  ".join(part[start : start + 5]) for part in parts for start in range(0, len(part), 5)]
    return [f"a prompt as the target sees it, {len(ids):,} tokens, text and id of each:", *rows]


def _memory(config: RunConfig, target: Target, draft: Any, longest: int, ranks: int) -> dict[str, float]:
    """Bytes on one device, by part."""
    facts, there = target.facts, not config.target.at_server and config.signal.source != "store"
    sizes = [(weight.numel(), weight.requires_grad) for weight in draft.parameters()]
    parts: dict[str, float] = {}
    if there:
        whole, dtype = without_weights(target.side.config, config.target.trust_remote_code), target.dtype
        parts[f"target {facts.dtype}"] = facts.parameters * dtype.itemsize / (ranks if config.target.shard else 1)
        with contextlib.suppress(UserError, RuntimeError):  # No such cache, or code that asks for values.
            each = cache_bytes_per_request(whole, dtype, longest + config.serving.max_tokens)
            parts[f"cache of {config.serving.batch_size} answers"] = config.serving.batch_size * each
    parts["draft float32"] = 4.0 * sum(size for size, _ in sizes)
    parts["gradients"] = 4.0 * sum(size for size, trained in sizes if trained)
    parts[config.optim.name] = state_bytes(draft, config.optim, ranks)
    return parts


def _disk(config: RunConfig, target: Target, draft: Any, tokens: int, most: int) -> dict[str, float]:
    """Bytes at most, by part."""
    weights = 4.0 * sum(weight.numel() for weight in draft.parameters())
    checkpoints = 1 + -(-config.train.steps // config.judge.every)
    parts = {
        f"{checkpoints} checkpoints": checkpoints * weights + STATES * (weights + state_bytes(draft, config.optim, 1)),
        "answers": TOKEN_BYTES * (config.serving.samples_per_prompt * tokens + most),
    }
    if config.signal.source != "online":
        learned = most + (tokens * config.serving.samples_per_prompt if config.loss.prompt_weight else 0)
        parts["probabilities"] = learned * bytes_per_token(config.signal.k, target.facts.vocab_rows)
    return parts


def _sizes(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {decimal(int(size))}" for name, size in parts.items())
