"""Text as examples: windows of a corpus, and held-out loss as the judge."""

import math
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerBase

from data.batches.collate import Example, collate
from data.batches.packing import cut_windows
from data.prompts import stdlib
from distill.config.run import RunConfig
from distill.config.sections import SourceConfig
from distill.training.module import DraftModule
from speculative.errors import UserError


def documents_of(source: SourceConfig) -> list[str]:
    """Texts of a corpus source: the standard library, or the prompt column of any other source.

    Raises:
        UserError: nothing there.
    """
    if source.path == "stdlib":
        return stdlib.corpus_documents(heldout=source.split == "heldout")
    from data.prompts.sources import load_source

    rows = load_source(**source.model_dump())
    for row in rows:
        if row.text is None:
            raise UserError(f"{row.origin}: chat messages are no plain text; map prompt_column")
    return [str(row.text) for row in rows]


def windows_of(sources: tuple[SourceConfig, ...], tokenizer: PreTrainedTokenizerBase, window: int) -> np.ndarray:
    """All documents of the sources as windows of ids. int32 (windows, window).

    Raises:
        UserError: less text than one window.
    """
    documents: list[list[int]] = []
    for source in sources:
        documents.extend(tokenizer(documents_of(source), verbose=False)["input_ids"])
    windows = cut_windows(documents, window, tokenizer.eos_token_id)
    if not len(windows):
        raise UserError(f"data: less than one window of {window} tokens in {', '.join(s.path for s in sources)}")
    return windows


def window_examples(windows: np.ndarray) -> list[Example]:
    """Every token but the first of a window is to be predicted."""
    mask = np.ones(windows.shape[1], dtype=bool)
    mask[0] = False
    return [Example(window, mask) for window in windows]


class HeldoutLoss:
    """Judges a model trained from text: mean loss in nats a token on held-out windows; score = minus that."""

    def __init__(self, config: RunConfig, accelerator: Accelerator, windows: np.ndarray) -> None:
        """At most `judge.corpus_windows` windows, evenly spread."""
        chosen = np.linspace(0, len(windows) - 1, min(len(windows), config.judge.corpus_windows)).astype(int)
        self.examples = window_examples(windows[chosen])
        self.accelerator = accelerator
        self.micro_batch_size = config.train.micro_batch_size

    def __call__(self, step: int, module: DraftModule | None) -> dict[str, Any]:
        """{step, heldout_loss, perplexity, heldout_tokens, score}; the main process's, sent to the others."""
        record: list[Any] = [None if module is None else self.judge(step, module)]
        return broadcast_object_list(record)[0] if self.accelerator.num_processes > 1 else record[0]

    @torch.no_grad()
    def judge(self, step: int, module: DraftModule) -> dict[str, Any]:
        """The record of one model, on this process alone."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.examples), self.micro_batch_size):
            batch = collate(self.examples[start : start + self.micro_batch_size], 0).to(self.accelerator.device)
            with self.accelerator.autocast():
                loss, _, _ = module(batch.input_ids_BT, batch.rows_R, batch.labels_R)
            total, tokens = total + float(loss), tokens + batch.labels_R.numel()
        mean = total / tokens
        return {
            "step": step,
            "heldout_loss": mean,
            "perplexity": math.exp(mean),
            "heldout_tokens": tokens,
            "score": -mean,
        }

    def dial(self, module: DraftModule) -> dict[str, float]:
        """Text alone has no acceptance to read: the config refuses judge.dial_every without a target."""
        raise AssertionError("judge.dial_every without a target")

    def headline(self, record: dict[str, Any]) -> str:
        """One line."""
        return f"step {record['step']:>6}  held-out loss {record['heldout_loss']:.4f} nats  perplexity {record['perplexity']:.2f}"
