"""Rows taken from another model: a donor's for the target's tokens, the target's in another width."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from tiny_models import logits, tiny_model
from tiny_training import train_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.models.load import load_model
from distill.models.student import from_architecture
from distill.models.transplant import (
    fit_embeddings,
    match_tokens,
    principal_basis,
    spread_rows,
    token_bytes,
    transplant_vocabulary,
)
from distill.models.vocabulary import compare_vocabularies, require_agreement, tokens_by_id, vocabulary_rows

ENGLISH = ["The quick brown fox jumps over the lazy dog; naïve café — déjà vu. " * 8, "What is 3 + 4? It is 7.\n" * 6]
CODE = ["def add(first, second):\n    return first + second\n" * 8, "for index in range(10): print(index)\n" * 6]


@functools.cache
def english() -> PreTrainedTokenizerFast:
    return train_tokenizer(ENGLISH, 360, max_length=256)


@functools.cache
def code() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer([*CODE, "the quick café\n" * 4], 330, max_length=256)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    return tokenizer


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """BPE with a block for a space, bytes for what it does not know, and other names for the special tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", " ") for text in ENGLISH], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    # The trainer knows special tokens only; the bytes are ordinary ones.
    return PreTrainedTokenizerFast(
        tokenizer_object=_without_added_bytes(fast), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _without_added_bytes(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    import json

    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(tree))


def donor_model(tokenizer: Any, kind: str = "llama", **options: Any) -> Any:
    return tiny_model(kind, vocab_size=len(tokenizer) + 5, pad_token_id=tokenizer.pad_token_id, **options)


@pytest.mark.parametrize("tokenizer", [english, code])
def test_bytes_of_byte_level_tokens_spell_the_text(tokenizer: Any) -> None:
    made = tokenizer()
    texts = token_bytes(made)
    assert set(tokens_by_id(made)) - set(texts) == set(made.all_special_ids)
    for text in ("def naïve(x):\n    return '—'", "\ttab \u4e2d\u6587 \U0001f600 end "):
        ids = made(text, add_special_tokens=False)["input_ids"]
        assert b"".join(texts[token_id] for token_id in ids) == text.encode()


def test_bytes_of_sentencepiece_tokens_spell_the_text() -> None:
    made = sentencepiece()
    texts = token_bytes(made)
    ids = made("The fox \u4e2d", add_special_tokens=False)["input_ids"]
    assert b"".join(texts[token_id] for token_id in ids) == " The fox \u4e2d".encode()
    assert made.eos_token_id not in texts


def test_every_token_that_both_know_is_matched_with_itself() -> None:
    match = match_tokens(code(), english())
    target_texts, donor_texts = token_bytes(code()), token_bytes(english())
    ids = {text: token_id for token_id, text in donor_texts.items()}
    shared = [token_id for token_id, text in target_texts.items() if text in ids]
    assert len(shared) > 256, "all bytes and some words"
    assert all(match.pieces[token_id] == (ids[target_texts[token_id]],) for token_id in shared)
    for token_id, pieces in match.pieces.items():
        if token_id in target_texts:
            assert b"".join(donor_texts[piece] for piece in pieces) == target_texts[token_id]
    for role in ("bos", "eos", "pad"):
        assert match.pieces[getattr(code(), f"{role}_token_id")] == (getattr(english(), f"{role}_token_id"),)
    call = code().convert_tokens_to_ids("<|call|>")
    assert call not in match.pieces
    assert match.fallback == 1
    assert match.exact == len(shared) + 3
    assert match.exact + match.averaged + match.fallback == len(code())
    assert match.averaged > 20
    facts = match.as_dict()
    assert facts["exact_share"] + facts["averaged_share"] + facts["fallback_share"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("target", "donor"), [(sentencepiece, english), (english, sentencepiece), (code, sentencepiece)]
)
def test_families_that_write_spaces_and_bytes_differently(target: Any, donor: Any) -> None:
    match = match_tokens(target(), donor())
    target_texts, donor_texts = token_bytes(target()), token_bytes(donor())
    for token_id, pieces in match.pieces.items():
        if token_id in target_texts and pieces:
            assert b"".join(donor_texts[piece] for piece in pieces) == target_texts[token_id]
    words = set(target_texts.values()) & set(donor_texts.values())
    assert any(text.startswith(b" ") and len(text) > 2 for text in words), "a word with its space, whatever the mark"
    assert match.pieces[target().eos_token_id] == (donor().eos_token_id,)
    unmatched = [token_id for token_id in tokens_by_id(target()) if not match.pieces.get(token_id)]
    assert all(token_id in target().all_special_ids for token_id in unmatched), "every text can be spelled in bytes"


def test_a_letter_is_preferred_to_its_byte() -> None:
    letter = next(i for i, text in token_bytes(english()).items() if text == b"e")
    donor_string = tokens_by_id(sentencepiece())[match_tokens(english(), sentencepiece()).pieces[letter][0]]
    assert donor_string == "e"


def test_special_tokens_of_one_name_go_together() -> None:
    donor = train_tokenizer(ENGLISH, 320, max_length=256)
    donor.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    match = match_tokens(code(), donor)
    token = "<|call|>"
    assert match.pieces[code().convert_tokens_to_ids(token)] == (donor.convert_tokens_to_ids(token),)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 9), bias=st.booleans())
def test_spread_rows_are_means(seed: int, rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    donor = torch.randn((6,) if bias else (6, 4), generator=generator)
    pieces = {
        int(row): tuple(
            torch.randint(6, (int(torch.randint(0, 4, (1,), generator=generator)),), generator=generator).tolist()
        )
        for row in torch.randperm(12, generator=generator)[:8]
    }
    made = spread_rows(donor, pieces, rows, [0, 1, 4])
    for row in range(rows):
        own = list(pieces.get(row, ())) or [0, 1, 4]
        torch.testing.assert_close(made[row], torch.stack([donor[i] for i in own]).mean(0), rtol=1e-5, atol=1e-6)
    single = {row: own for row, own in pieces.items() if len(own) == 1 and row < rows}
    for row, own in single.items():
        assert torch.equal(made[row], donor[own[0]]), "a copied row is a copy"


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", False), ("llama", True), ("gpt2", False), ("gpt2", True), ("phi", False)]
)
def test_shared_tokens_keep_the_donors_logits(kind: str, tied: bool) -> None:
    """phi's head has a bias. Text in shared tokens is the same text to both, so the hidden states are the same too."""
    donor = donor_model(english(), kind, tie_word_embeddings=tied)
    match = match_tokens(code(), english())
    shared = [(token_id, pieces[0]) for token_id, pieces in match.pieces.items() if len(pieces) == 1]
    target_ids, donor_ids = ([pair[side] for pair in shared[40:60]] for side in (0, 1))
    before = logits(donor, donor_ids)[0]
    rows = len(code()) + 7
    found = transplant_vocabulary(donor, english(), code(), rows)
    assert found == match
    after = logits(donor, target_ids)[0]
    assert after.shape[-1] == rows == donor.get_input_embeddings().weight.shape[0]
    kept, of = ([pair[side] for pair in shared] for side in (0, 1))
    # A matrix of another number of rows sums in another order.
    torch.testing.assert_close(after[:, kept], before[:, of], rtol=1e-5, atol=1e-5)
    assert (donor.get_output_embeddings().weight is donor.get_input_embeddings().weight) == tied
    averaged = next(token_id for token_id, pieces in match.pieces.items() if len(pieces) > 1)
    expected = before[:, list(match.pieces[averaged])].mean(-1)
    torch.testing.assert_close(
        after[:, averaged], expected, rtol=1e-4, atol=1e-4
    )  # the mean is taken before the product
    if kind != "phi":
        padding = after[:, len(code()) :]
        assert (padding.max(-1).values < after[:, : len(code())].max(-1).values).all(), (
            "a padded id is never the argmax"
        )


def test_the_result_speaks_the_targets_vocabulary(tmp_path: Any) -> None:
    donor = donor_model(english())
    rows = len(code()) + 7
    state = torch.get_rng_state()
    transplant_vocabulary(donor, english(), code(), rows)
    assert torch.equal(torch.get_rng_state(), state)
    agreement = require_agreement(compare_vocabularies(code(), rows, code(), vocabulary_rows(donor.config)))
    assert agreement.verdict == "agree"
    for role in ("bos", "eos", "pad"):
        assert getattr(donor.config, f"{role}_token_id") == getattr(code(), f"{role}_token_id")
        assert getattr(donor.generation_config, f"{role}_token_id") == getattr(code(), f"{role}_token_id")
    donor.save_pretrained(tmp_path)
    again = load_model("student.path", str(tmp_path))
    torch.testing.assert_close(logits(again, [3, 4, 5]), logits(donor, [3, 4, 5]), rtol=0, atol=0)


def test_the_row_without_a_gradient_is_the_targets_padding() -> None:
    donor = donor_model(english())
    assert donor.get_input_embeddings().padding_idx == english().pad_token_id == 0
    transplant_vocabulary(donor, english(), sentencepiece(), len(sentencepiece()))
    assert sentencepiece().pad_token_id is None
    assert donor.get_input_embeddings().padding_idx is None


def test_tokenizers_without_a_word_in_common() -> None:
    def words(*strings: str) -> PreTrainedTokenizerFast:
        vocabulary = {string: index for index, string in enumerate(strings)}
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=strings[0])))

    text = refused(transplant_vocabulary, tiny_model(vocab_size=3), words("a", "b"), words("c", "d"), 4)
    assert "student.vocabulary: transplant" in text


TABLES = {"tied": True, "untied": False}


def architecture(width: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 64,
    }


@pytest.mark.parametrize("width", [16, 32, 48])
@pytest.mark.parametrize("student_tied", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("target_tied", TABLES.values(), ids=TABLES)
def test_fitted_tables(width: int, student_tied: bool, target_tied: bool) -> None:
    target = tiny_model(vocab_size=330, tie_word_embeddings=target_tied)
    student = from_architecture(architecture(width, student_tied), code(), 330, seed=0)
    facts = fit_embeddings(student, target, seed=0)
    embedding, head = student.model.embed_tokens.weight.detach(), student.lm_head.weight.detach()
    assert embedding.shape == head.shape == (330, width)
    assert (student.lm_head.weight is student.model.embed_tokens.weight) == student_tied
    source_out, source_in = target.lm_head.weight.detach(), target.model.embed_tokens.weight.detach()
    assert head.square().mean() == pytest.approx(source_out.square().mean().item(), rel=1e-5)
    if not student_tied:
        assert embedding.square().mean() == pytest.approx(source_in.square().mean().item(), rel=1e-5)
    if width >= 32:
        assert facts["variance_kept"] == 1.0
        # Inner products stay, up to the one factor of the spread: between head rows, and from embedding to head.
        for own, source in ((head @ head.T, source_out @ source_out.T), (embedding @ head.T, source_in @ source_out.T)):
            if own is not head and student_tied and not target_tied:
                source = source_out @ source_out.T
            factor = own.norm() / source.norm()
            torch.testing.assert_close(own, factor * source, rtol=1e-3, atol=1e-6)  # float32 sums of 48 terms
    else:
        assert 0.5 < facts["variance_kept"] < 1.0
    before = student.state_dict()["model.layers.0.mlp.up_proj.weight"]
    other = from_architecture(architecture(width, student_tied), code(), 330, seed=0)
    torch.testing.assert_close(other.state_dict()["model.layers.0.mlp.up_proj.weight"], before, rtol=0, atol=0)


def test_the_main_axes_keep_the_most() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn((200, 12), generator=generator, dtype=torch.float64) * torch.arange(1, 13).double()
    basis, kept = principal_basis([table], 5)
    torch.testing.assert_close(basis.T @ basis, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (table @ basis).square().sum() / table.square().sum() == pytest.approx(kept)
    best = torch.linalg.svdvals(table).square()
    assert kept == pytest.approx(float(best[:5].sum() / best.sum()))
    columns = (table @ basis).square().sum(0)
    assert (columns.diff() <= 0).all()
    basis, kept = principal_basis([table, 1000 * table], 5)
    assert (table @ basis).square().sum() / table.square().sum() == pytest.approx(kept), "each table weighs the same"


def test_other_rows_than_the_targets_are_refused() -> None:
    student = from_architecture(architecture(16, True), code(), 340, seed=0)
    text = refused(fit_embeddings, student, tiny_model(vocab_size=330), seed=0)
    assert "330 vocabulary rows, and student.architecture gives 340; leave vocab_size out" in text
