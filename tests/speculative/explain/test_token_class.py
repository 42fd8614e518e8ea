"""Pieces against decoding every prefix in full; classes against a text labelled by hand."""

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from distill.models.load import EMBEDDED_FOLDER
from speculative.explain.token_class import CLASSES, token_classes, token_pieces, token_text

EMBEDDED = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
UNDECODED = "\ufffd"
CODE = '''
def total_price(items, taxRate=0.19):
    """Sum of all prices, don't round."""
    return sum(item.price for item in items) * (1 + taxRate)  # na\u00efve: 3 \u20ac \U0001f600!
'''


def ids_of(text: str) -> list[int]:
    return EMBEDDED(text, add_special_tokens=False)["input_ids"]


def pieces_of_prefixes(tokenizer: Any, ids: list[int]) -> list[str]:
    """The slow twin: what the text up to each token, without an unfinished character, has over that before it."""
    pieces, given = [], 0
    for length in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        settled = len(text) if length == len(ids) else max(given, len(text.rstrip(UNDECODED)))
        pieces.append(text[given:settled])
        given = settled
    return pieces


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """The decoder of Llama 2: spaces as U+2581, characters it does not know as bytes, the first space dropped."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<s>", "</s>", "<unk>", *bytes_, *"ab\u2581", "\u2581ab", "\u2581b", "."]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_pieces_of_code_put_together_are_the_text():
    ids = ids_of(CODE)
    pieces = token_pieces(EMBEDDED, [*ids, EMBEDDED.eos_token_id])
    assert "".join(pieces) == CODE
    assert pieces[-1] == ""
    assert pieces[:-1] == pieces_of_prefixes(EMBEDDED, ids)


@given(
    st.lists(
        st.one_of(st.integers(0, 40), st.integers(100, 300), st.sampled_from(ids_of("\U0001f600\u00e9\u4f60 a"))),
        max_size=24,
    )
)
def test_pieces_of_any_bytes_equal_decoding_every_prefix(ids):
    assert token_pieces(EMBEDDED, ids) == pieces_of_prefixes(EMBEDDED, ids)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([[3 + byte for byte in "\u00e9".encode()], [3 + byte for byte in "\U0001f600".encode()]]),
            st.sampled_from([[1], [259], [260], [261], [262], [263], [264]]),
        ),
        max_size=12,
    )
)
def test_pieces_of_a_tokenizer_that_falls_back_to_bytes(chunks):
    ids = [token_id for chunk in chunks for token_id in chunk]
    assert token_pieces(byte_fallback(), ids) == pieces_of_prefixes(byte_fallback(), ids)


def test_the_time_is_linear_in_the_response(monkeypatch):
    decoded: list[int] = []
    kind = type(EMBEDDED)
    original = kind.decode

    def counting(self, token_ids, *args, **options):
        decoded.append(len(token_ids))
        return original(self, token_ids, *args, **options)

    monkeypatch.setattr(kind, "decode", counting)
    ids = ids_of(CODE * 10)
    token_pieces(EMBEDDED, ids)
    assert sum(decoded) < 4 * len(ids)


def test_one_token_by_itself_is_readable():
    assert token_text(EMBEDDED, ids_of(" return")[0]) == " return"
    assert token_text(EMBEDDED, EMBEDDED.eos_token_id) == "<|eos|>"
    part = ids_of("\U0001f600")[0]
    assert token_text(EMBEDDED, part) == f"<id {part}>"
    assert token_text(byte_fallback(), 262) == " ab"  # Decoded alone it would lose its space.


def test_classes_of_labelled_text():
    labelled = [
        ("def", "word start"), (" to", "identifier"), ("tal", "identifier"), ("_", "identifier"), ("price", "identifier"),
        ("(", "punctuation"), ("foo", "word start"), ("bar", "word continuation"), (",", "punctuation"),
        (" tax", "identifier"), ("Rate", "identifier"), ("=", "punctuation"), ("0", "digits"), (".19", "digits"),
        ("):\n", "punctuation"), ("    ", "whitespace"), ("return", "word start"), (" self", "identifier"),
        (".x", "identifier"), (" don", "word start"), ("'t", "word continuation"), (" don", "word start"), ("'", "punctuation"),
        ("t", "word continuation"), (" item", "word start"), ("s.", "word continuation"), ("\n\n", "whitespace"),
        (" 'a", "word start"), ("'", "punctuation"), (" na", "word start"), ("\u00ef", "word continuation"), ("ve", "word continuation"),
        (" ", "whitespace"), ("", "other"), ("\u20ac", "punctuation"), (" ", "whitespace"), ("", "other"), ("", "other"),
        ("\U0001f600", "other"), (UNDECODED, "other"), ("HTTP", "identifier"), ("Server", "identifier"), (" URLs", "word start"),
        (" 12", "digits"), ("34", "digits"), (" x", "identifier"), ("_1", "identifier"), ("", "special"), ("", "special"),
    ]  # fmt: skip
    pieces, expected = zip(*labelled, strict=True)
    assert list(zip(pieces, token_classes(pieces), strict=True)) == list(zip(pieces, expected, strict=True))
    assert set(expected) == set(CLASSES)


@given(st.lists(st.text(max_size=4), max_size=12))
def test_every_piece_has_a_class(pieces):
    classes = token_classes(pieces)
    assert len(classes) == len(pieces)
    assert set(classes) <= set(CLASSES)
