"""General text as training examples: documents joined by the end token and cut into windows."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.batches.collate import Example
from data.prompts import stdlib
from data.prompts.prompt import PromptSource
from data.prompts.sources import STDLIB, load_source
from speculative.errors import UserError


def cut_windows(documents: Sequence[Sequence[int]], window: int, eos_id: int) -> np.ndarray:
    """Documents joined by eos and cut into windows; the incomplete last window is dropped. int32 (windows, window)."""
    stream = np.fromiter((token for document in documents for token in (*document, eos_id)), dtype=np.int32)
    return stream[: len(stream) // window * window].reshape(-1, window)


def documents_of(source: PromptSource) -> list[str]:
    """Texts of a source: the standard library's corpus, or the prompt column of any other; UserError for chat messages."""
    if source.path == STDLIB:
        return stdlib.corpus_documents(heldout=source.split == "heldout")
    rows = load_source(source)
    for row in rows:
        if row.text is None:
            raise UserError(f"{row.origin}: chat messages are not plain text; set prompt_column to a text column")
    return [str(row.text) for row in rows]


TEXT_WINDOW = 256  # tokens, or those of the context if that is shorter


def text_examples(sources: Sequence[PromptSource], tokenizer: PreTrainedTokenizerBase, window: int) -> list[Example]:
    """Windows of all documents; every token of one but the first is predicted. UserError: no text, or less than one window."""
    documents = [ids for source in sources for ids in tokenizer(documents_of(source), verbose=False)["input_ids"]]
    windows = cut_windows(documents, window, tokenizer.eos_token_id)
    if not len(windows):
        names = ", ".join(source.path for source in sources)
        raise UserError(f"data.text: fewer than {window} tokens in {names}; add text")
    mask = np.arange(window) > 0
    return [Example(ids, mask) for ids in windows]
