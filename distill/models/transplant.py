"""Embedding rows for a draft from another model: a donor's rows for the target's tokens, or the target's rows in another width.

Legend: V vocabulary rows of the target, W of the donor, D hidden width of the target, S of the student.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from distill.models.quantized import full_weight
from distill.models.vocabulary import ROLES, role_ids, row_tensors, special_ids, tokens_by_id
from speculative.errors import UserError

_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Character -> byte of byte-level BPE (GPT-2).
_ALPHABET = {character: byte for byte, character in bytes_to_unicode().items()}


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is not None:
        return b"ByteLevel" in decoder.__getstate__()
    return any("\u0120" in string for string in tokenizer.get_vocab())


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Return the text of each token by id, as UTF-8 (possibly part of a character), without special tokens.

    Supports byte-level BPE and SentencePiece (a leading block for a space, `<0xAB>` for a byte).
    """
    byte_level, special = _is_byte_level(tokenizer), special_ids(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {}
    for token_id, string in tokens_by_id(tokenizer).items():
        if token_id in special:
            continue
        raw = _RAW_BYTE.fullmatch(string)
        if token_id in added:
            texts[token_id] = str(added[token_id].content).encode()
        elif byte_level and all(character in _ALPHABET for character in string):
            texts[token_id] = bytes(_ALPHABET[character] for character in string)
        elif raw and not byte_level:
            texts[token_id] = bytes([int(raw[1], 16)])
        else:
            texts[token_id] = string.replace("\u2581", " ").encode()
    return texts


@dataclass(frozen=True)
class TokenMatch:
    """For each target token the donor tokens whose rows replace it: one, several, or none."""

    pieces: dict[int, tuple[int, ...]]
    exact: int
    averaged: int
    fallback: int

    def as_dict(self) -> dict[str, float | int]:
        """Return counts, and their shares of the target's tokens."""
        counts = {key: value for key, value in asdict(self).items() if key != "pieces"}
        total = max(sum(counts.values()), 1)
        return counts | {f"{key}_share": value / total for key, value in counts.items()}


def match_tokens(target_tokenizer: Any, donor_tokenizer: Any) -> TokenMatch:
    """Find the donor tokens that have the same text as each target token.

    Special tokens match by role (bos, eos, pad, unk), then by string. Other tokens match by bytes: the donor's token with the same
    bytes; else the donor's tokenization of the text; else the longest donor tokens that spell the bytes (for a part of a
    character, or a tokenizer that changes the text).
    """
    donor_texts = token_bytes(donor_tokenizer)
    donor_ids: dict[bytes, int] = {}
    # If a byte token and a letter token have the same bytes, use the letter, which occurs in text.
    raw = {token_id for token_id, string in tokens_by_id(donor_tokenizer).items() if _RAW_BYTE.fullmatch(string)}
    for token_id in sorted(donor_texts, key=lambda token_id: (token_id in raw, token_id)):
        donor_ids.setdefault(donor_texts[token_id], token_id)
    pieces = _special_pieces(target_tokenizer, donor_tokenizer)
    texts = token_bytes(target_tokenizer)
    split: dict[int, str] = {}
    for token_id, text in texts.items():
        if token_id in pieces:
            continue
        if text in donor_ids:
            pieces[token_id] = (donor_ids[text],)
            continue
        try:
            split[token_id] = text.decode()
        except UnicodeDecodeError:
            pieces[token_id] = _longest(text, donor_ids)
    if split:
        encoded = donor_tokenizer(list(split.values()), add_special_tokens=False)["input_ids"]
        for token_id, ids in zip(split, encoded, strict=True):
            said = b"".join(donor_texts.get(piece, b"") for piece in ids)
            pieces[token_id] = tuple(ids) if ids and said == texts[token_id] else _longest(texts[token_id], donor_ids)
    lengths = [len(pieces.get(token_id, ())) for token_id in tokens_by_id(target_tokenizer)]
    exact, none = lengths.count(1), lengths.count(0)
    return TokenMatch(pieces, exact, len(lengths) - exact - none, none)


def _special_pieces(target_tokenizer: Any, donor_tokenizer: Any) -> dict[int, tuple[int, ...]]:
    pieces: dict[int, tuple[int, ...]] = {}
    for role in ROLES:
        target_id = getattr(target_tokenizer, f"{role}_token_id", None)
        donor_id = getattr(donor_tokenizer, f"{role}_token_id", None)
        if target_id is not None and donor_id is not None:
            pieces.setdefault(target_id, (donor_id,))
    donor_vocabulary, target_strings = donor_tokenizer.get_vocab(), tokens_by_id(target_tokenizer)
    for target_id in special_ids(target_tokenizer):
        string = target_strings.get(target_id)
        if string in donor_vocabulary:
            pieces.setdefault(target_id, (donor_vocabulary[string],))
    return pieces


def _longest(text: bytes, donor_ids: dict[bytes, int]) -> tuple[int, ...]:
    """Return donor tokens that spell the bytes, longest first; empty if a byte has no token."""
    tokens: list[int] = []
    while text:
        size = next((size for size in range(len(text), 0, -1) if text[:size] in donor_ids), None)
        if size is None:
            return ()
        tokens.append(donor_ids[text[:size]])
        text = text[size:]
    return tuple(tokens)


def spread_rows(
    donor_rows: Tensor, pieces: dict[int, tuple[int, ...]], rows: int, donor_tokens: Sequence[int]
) -> Tensor:
    """(rows, ...): row i is the mean of the donor rows `pieces[i]`; without pieces, of the rows of all `donor_tokens`.

    A mean of head rows gives a mean of logits, so no new token scores above the best of its source tokens.
    """
    wide = donor_rows.to(torch.promote_types(donor_rows.dtype, torch.float32))
    owned = [(token_id, donors) for token_id, donors in pieces.items() if donors and token_id < rows]
    owners = torch.tensor([token_id for token_id, donors in owned for _ in donors], dtype=torch.long)
    sources = torch.tensor([donor for _, donors in owned for donor in donors], dtype=torch.long)
    counts = torch.zeros(rows).index_add_(0, owners, torch.ones(len(owners)))
    means = torch.zeros((rows, *wide.shape[1:]), dtype=wide.dtype).index_add_(0, owners, wide[sources])
    shape = (rows,) + (1,) * (wide.dim() - 1)
    means = means / counts.clamp_min(1.0).view(shape).to(wide.dtype)
    mean = wide[torch.tensor(sorted(donor_tokens))].mean(0)
    return torch.where((counts > 0).view(shape), means, mean)


@torch.no_grad()
def transplant_vocabulary(donor: PreTrainedModel, donor_tokenizer: Any, target_tokenizer: Any, rows: int) -> TokenMatch:
    """Give the donor the target's vocabulary, in place: embedding, head (and its bias) and special ids.

    A token in both vocabularies keeps the donor's row and logit. Another token gets the mean of the rows that spell it
    (`match_tokens`). Tied weights stay tied. Parameters are replaced: build the optimizer afterwards.

    ``donor``: a causal LM on the CPU. ``rows``: of the target's embedding; rows after its tokens become the mean row.

    Raises UserError: the two tokenizers have no token in common.
    """
    match = match_tokens(target_tokenizer, donor_tokenizer)
    if not match.exact:
        raise UserError("student.vocabulary: transplant: the two tokenizers share no token; use another draft")
    old_rows = _tables(donor)[0].shape[0]
    known = [token_id for token_id in tokens_by_id(donor_tokenizer) if token_id < old_rows]
    # A tokenizer may have more tokens than the model has rows.
    pieces = {token_id: tuple(piece for piece in ids if piece < old_rows) for token_id, ids in match.pieces.items()}
    made = [spread_rows(tensor, pieces, rows, known) for tensor in row_tensors(donor)]
    with torch.random.fork_rng(devices=[]):
        donor.resize_token_embeddings(rows, mean_resizing=False)
    for tensor, values in zip(row_tensors(donor), made, strict=True):
        tensor.copy_(values)
    donor.config.get_text_config().vocab_size = rows
    ids = role_ids(rows, target_tokenizer)
    for name, token_id in ids.items():
        for config in (donor.config.get_text_config(), donor.generation_config):
            if config is not None:
                setattr(config, name, token_id)
    embedding: Any = donor.get_input_embeddings()
    # The row without gradient: the old pad id belongs to another token in the new vocabulary.
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = ids["pad_token_id"]
    return match


def principal_basis(tables: Sequence[Tensor], width: int) -> tuple[Tensor, float]:
    """(basis (D, S) with orthonormal columns, share of the tables' squares that it keeps), float64.

    The columns are the S main axes of the tables' (uncentred) second moment, each table weighing the same; S <= D.
    """
    moment_DD = torch.stack([(wide := table.double()).T @ wide / wide.square().sum() for table in tables]).mean(0)
    values_D, vectors_DD = torch.linalg.eigh(moment_DD)
    return vectors_DD[:, -width:].flip(1), float(values_D[-width:].sum() / values_D.sum())


def orthogonal_basis(width: int, wider: int, seed: int) -> Tensor:
    """(D, S) float64 with orthonormal rows, at random: rows placed with it keep their inner products; S >= D."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn((wider, width), generator=generator, dtype=torch.float64))[0].T


@torch.no_grad()
def fit_embeddings(student: PreTrainedModel, target: PreTrainedModel, seed: int) -> dict[str, float | int]:
    """Copy the target's embedding and head into the student, in the student's width, in place.

    A narrower student gets a projection onto the main axes that embedding and head share, which keeps their products, followed by
    a random rotation, so that no coordinate dominates. A wider student gets a random orthogonal map. Each table keeps the spread
    of the target's entries, which trains far better than the architecture's own spread, under which logits start flat. A tied
    student of an untied target takes the head, since a tied table ends up closer to an output embedding (arXiv 1608.05859).

    Returns the kept share of the tables' squares, and both widths.

    Raises UserError: the student has other vocabulary rows than the target.
    """
    source_in, source_out = _tables(target)
    own_in, own_out = _tables(student)
    if own_in.shape[0] != source_in.shape[0]:
        raise UserError(
            f"student.embeddings: target needs the target's {source_in.shape[0]} vocabulary rows, and "
            f"student.architecture gives {own_in.shape[0]}; leave vocab_size out"
        )
    width, own_width = source_in.shape[1], own_in.shape[1]
    one_table = source_in is source_out or own_in is own_out
    source_in, source_out = full_weight(source_in).cpu(), full_weight(source_out).cpu()
    tables = [source_out] if one_table else [source_in, source_out]
    variance_kept = 1.0
    if own_width < width:
        axes, variance_kept = principal_basis(tables, own_width)
        basis = axes @ orthogonal_basis(own_width, own_width, seed)
    else:
        basis = orthogonal_basis(width, own_width, seed)
    pairs = [(own_out, source_out)] if own_in is own_out else [(own_in, source_in), (own_out, source_out)]
    for own, source in pairs:
        spread = source.double().square().mean().sqrt()
        fitted = source.double() @ basis
        own.copy_(fitted * (spread / fitted.square().mean().sqrt()))
    return {"variance_kept": variance_kept, "width": own_width, "target_width": width}


def _tables(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return (embedding, head) weights; the same tensor if tied."""
    embedding: Any = model.get_input_embeddings()
    head: nn.Module | None = model.get_output_embeddings()
    return embedding.weight, embedding.weight if head is None else head.weight  # type: ignore[return-value]
