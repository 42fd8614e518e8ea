"""The target's probabilities during training: from the target itself, or computed once, stored compactly and read back.

Legend: B sequences, T positions, R response tokens (rows), C rows of a chunk, D hidden width, V vocabulary, K stored entries.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.batches.collate import Batch
from data.signals.signal import DenseSignal, TopKSignal, joined
from data.signals.store import SignalStore
from distill.models.heads import SplitModel
from speculative.errors import UserError

Head = Callable[[Tensor], Tensor]
CHUNK_BYTES = 64 << 20  # size of one float32 (C, V) tensor; about five of them exist at once
FIRST_ROWS = 16  # rows of the first chunk, which shows the vocabulary size


class Teacher:
    """The target itself: its hidden states at response positions, and its head."""

    def __init__(self, target: PreTrainedModel) -> None:
        """The target is frozen and put into eval mode."""
        self.split = SplitModel(target.requires_grad_(False).eval())

    @torch.no_grad()
    def signal(self, batch: Batch) -> DenseSignal:
        """Hidden states (R, D) that predict the response tokens of the micro-batch, and the head over them."""
        hidden_BTD = self.split.hidden(batch.input_ids_BT, batch.position_ids_BT)
        return DenseSignal(hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R], self.split.head)


@torch.no_grad()
def topk_signal(
    head: Head, hidden_RD: Tensor, k: int, temperature: float = 1.0, chunk: int | None = None
) -> TopKSignal:
    """The k most probable tokens of softmax(head(hidden) / temperature), most probable first, and the log of the rest's mass.

    The rest is summed directly, so a small tail keeps its precision. On the device of ``hidden_RD``. ``chunk``: rows whose logits exist at
    once; None = as many as fit in CHUNK_BYTES. ValueError: k above the vocabulary.
    """
    parts, start, rows = [], 0, chunk or FIRST_ROWS
    while start < max(1, len(hidden_RD)):  # without rows there is one empty chunk
        logits_CV = head(hidden_RD[start : start + rows]).float() / temperature
        if k > logits_CV.shape[-1]:
            raise ValueError(f"k = {k} of a vocabulary of {logits_CV.shape[-1]}")
        top_CK, ids_CK = logits_CV.topk(k, dim=-1)
        rest_C = logits_CV.scatter_(-1, ids_CK, -torch.inf).logsumexp(-1)
        total_C = torch.logaddexp(top_CK.logsumexp(-1), rest_C)
        parts.append(TopKSignal(ids_CK, top_CK - total_C.unsqueeze(-1), rest_C - total_C))
        start, rows = start + rows, chunk or max(1, CHUNK_BYTES // (4 * logits_CV.shape[-1]))
    return joined(parts).to(hidden_RD.device)


class StoredTeacher:
    """Read the target's distributions from a store; no target in memory."""

    def __init__(self, store: SignalStore) -> None:
        """``store`` is open."""
        self.store = store
        self._read: dict[tuple[int, ...], TopKSignal] = {}

    def read_ahead(self, windows: Sequence[Batch]) -> None:
        """Read the signals of the next micro-batches, also from another thread, while those of the current step are used."""
        self._read |= {batch.indices: self.store.read(batch.indices) for batch in windows}

    def signal(self, batch: Batch) -> TopKSignal:
        """The stored distributions at the rows of a micro-batch, on its device; UserError if one is missing or damaged."""
        signal = self._read.pop(batch.indices, None)
        return (signal or self.store.read(batch.indices)).to(batch.rows_R.device)


# The source of the target's distributions for a micro-batch.
TeacherSource = Teacher | StoredTeacher


class CapturingTeacher(StoredTeacher):
    """Ask the online teacher once per example and store the answer; later requests read the store."""

    def __init__(self, teacher: Teacher, store: SignalStore, chunk: int | None = None) -> None:
        """``store`` is open with repair; its manifest has the settings. ``chunk``: rows whose logits exist at once."""
        super().__init__(store)
        self.teacher, self.chunk = teacher, chunk

    def signal(self, batch: Batch) -> TopKSignal:
        """The stored distributions at the rows of a micro-batch; a row trains the same in the step that captured it and later.

        UserError if the disk is full or the target's distribution is not finite.
        """
        self.fill(batch)
        return super().signal(batch)

    def fill(self, batch: Batch) -> int:
        """Capture the missing examples of a micro-batch; returns their number.

        The target runs on the whole micro-batch even if one example is missing. A row then depends on the micro-batch only,
        and a run killed between two examples and resumed stores the same bits as an uninterrupted one.
        """
        lacking = set(self.store.lacking(batch.indices))
        if not lacking:
            return 0
        lengths = self.store.lengths_N[list(batch.indices)].tolist()
        if sum(lengths) != batch.rows_R.numel():
            raise ValueError(
                f"{batch.rows_R.numel()} rows, but examples {batch.indices} have {sum(lengths)} response tokens"
            )
        settings, dense = self.store.manifest, self.teacher.signal(batch)
        temperature = float(settings["temperature"])  # the loss's
        signal = topk_signal(dense.head, dense.hidden_RD, int(settings["k"]), temperature, self.chunk).to(
            torch.device("cpu")
        )
        ends = np.cumsum(lengths).tolist()
        # An example that occurs twice is written once.
        rows = {
            index: signal.rows(slice(end - length, end))
            for index, length, end in zip(batch.indices, lengths, ends, strict=True)
            if index in lacking
        }
        for index, signal in rows.items():
            if signal.log_probs_RK.isnan().any():
                raise UserError(f"example {index}: the target's logits are not finite; try target.dtype: float32")
        self.store.write(rows)
        return len(lacking)
