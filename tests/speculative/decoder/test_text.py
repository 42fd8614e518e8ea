"""Streamed text against its definition: decode the whole response after every token, and look for stop strings."""

from functools import cache
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from distill.models.load import EMBEDDED_FOLDER, load_tokenizer
from speculative.decoder.text import TextStream, decoding_of

UNDECODED = "\ufffd"
SPACE = "\u2581"
EMBEDDED = load_tokenizer(str(EMBEDDED_FOLDER))


def whole(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def end_of(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> tuple[int, str, str | None]:
    """The slow twin: (tokens of the response, its text, the stop string)."""
    for length in range(1, len(ids) + 1):
        text = whole(tokenizer, ids[:length])
        found = [(text.find(string), order) for order, string in enumerate(stop) if string in text]
        if found:
            place, order = min(found)
            return length, text[:place], stop[order]
    return len(ids), whole(tokenizer, ids), None


def may_begin_a_stop(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that is a proper beginning of a stop string."""
    return max((k for string in stop for k in range(1, len(string)) if text.endswith(string[:k])), default=0)


def streamed(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None, int]:
    """(texts of every push and of finish, stop string, tokens pushed); text and pieces agree at each step."""
    stream = TextStream(tokenizer, stop)
    pieces: list[str] = []
    for count, token in enumerate(ids, start=1):
        pushed = stream.push(token)
        pieces.append(pushed.text)
        if pushed.stopped is not None:
            assert stream.text == "".join(pieces)
            assert stream.finish() == ""
            return pieces, pushed.stopped, count
        assert stream.text == whole(tokenizer, ids[:count])
        assert stream.text.startswith("".join(pieces))
    pieces.append(stream.finish())
    assert stream.finish() == ""
    assert stream.text == "".join(pieces)
    return pieces, None, len(ids)


def check_against_the_twin(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> None:
    length, text, stopped = end_of(tokenizer, ids, stop)
    pieces, found, count = streamed(tokenizer, ids, stop)
    assert (count, "".join(pieces), found) == (length, text, stopped)


def ids_of(text: str) -> list[int]:
    return EMBEDDED(text, add_special_tokens=False).input_ids


@cache
def piece_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Tiny tokenizers whose ids stand for characters, with the decoders of Llama 2, Gemma and Metaspace models."""
    pieces = ["<unk>", "<s>", SPACE, SPACE + "a", "b", "é", SPACE * 2, "st", "op", "x" + SPACE]
    pieces += [f"<0x{value:02X}>" for value in (0x0A, 0x41, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
    replace, spaces = decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 0)
    decoder = {
        "llama": decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), spaces]),
        "gemma": decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()]),
        "metaspace": decoders.Metaspace(),
        "words": decoders.WordPiece(cleanup=True),
        "ends": decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        "pairs": decoders.Sequence([decoders.Replace("ab", "c"), decoders.Fuse()]),
        "fused first": decoders.Sequence([decoders.Fuse(), decoders.Replace(SPACE, " ")]),
    }[kind]
    if kind == "words":
        pieces = ["<unk>", "<s>", "do", "n't", "##s", "a", ".", ",", "'", "##t", "we", "'re"]
    model = models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@cache
def mixed_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pieces that end or begin inside a character; these bytes are written as their Latin-1 letters."""
    pieces = ["<s>", "a", "Ã", "©", "aÃ", "©b", "ä", "abä¿", "¿©a", "ð£", "¡", "¡¡ä", "ÿ", "aÿ", "b©Ã", "ï¿½"]
    model = models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


random_ids = st.lists(
    # Single bytes are the ids after the three special ones: many of these lists are not UTF-8.
    st.one_of(st.integers(0, 258), st.integers(0, len(EMBEDDED) + 3)),
    max_size=25,
)


@given(random_ids, st.data())
def test_any_ids_and_stop_strings_from_their_text(ids, data):
    text = whole(EMBEDDED, ids)
    inside = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda start: st.integers(1, 5).map(lambda length: text[start : start + length] or "x")
    )
    stop = tuple(data.draw(st.lists(st.one_of(inside, st.text(max_size=3, min_size=1)), max_size=3)))
    check_against_the_twin(EMBEDDED, ids, stop)


@given(
    st.one_of(
        st.tuples(st.just(EMBEDDED), random_ids),
        st.tuples(st.just(mixed_byte_tokenizer()), st.lists(st.integers(0, 15), max_size=12)),
    ),
    st.lists(st.text("ab�é\n ", min_size=1, max_size=4), max_size=3),
)
def test_bytes_hold_back_no_more_than_they_must(tokenizer_and_ids, stop):
    (tokenizer, ids), stop = tokenizer_and_ids, tuple(stop)
    assert decoding_of(tokenizer) == "bytes"
    check_against_the_twin(tokenizer, ids, stop)
    stream, sent = TextStream(tokenizer, stop), ""
    for count, token in enumerate(ids, start=1):
        pushed = stream.push(token)
        sent += pushed.text
        if pushed.stopped is not None:
            return
        final = whole(tokenizer, ids[:count]).rstrip(UNDECODED)
        assert len(sent) == len(final) - may_begin_a_stop(final, stop)


@given(
    st.sampled_from(["llama", "gemma", "metaspace"]),
    st.lists(st.integers(0, 21), max_size=20),
    st.lists(st.sampled_from(["a", "b", " a", " ", "  ", "stop", "pb", "\n", "你", "é�", "A"]), max_size=2),
)
@example("llama", [10, 19], [])  # a newline that a later byte turns into U+FFFD
@example("llama", [2, 3], [])  # a leading space is dropped, and only the first
@example("metaspace", [1, 2, 1, 3], [])
def test_tokenizers_of_pieces_and_single_bytes(kind, ids, stop):
    assert decoding_of(piece_tokenizer(kind)) == "pieces"
    check_against_the_twin(piece_tokenizer(kind), ids, tuple(stop))


@given(
    st.sampled_from(["words", "pairs", "fused first"]),
    st.lists(st.integers(0, 11), max_size=12),
    st.lists(st.sampled_from(["n't", "a.", "c", "do", " a"]), max_size=2),
)
def test_unknown_decoders_are_right_and_wait_for_the_end(kind, ids, stop):
    tokenizer = piece_tokenizer(kind)
    assert decoding_of(tokenizer) == "whole"
    check_against_the_twin(tokenizer, ids, tuple(stop))
    assert not any(streamed(tokenizer, ids, tuple(stop))[0][:-1])


def test_a_decoder_with_python_around_it_is_not_trusted():
    class Shouting(PreTrainedTokenizerFast):
        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs).upper()

    class CodeGenTokenizer(PreTrainedTokenizerFast):
        """Its namesake in transformers adds an argument and nothing else."""

        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs)

    made = {"tokenizer_object": EMBEDDED.backend_tokenizer}
    assert decoding_of(PreTrainedTokenizerFast(**made)) == "bytes"
    assert decoding_of(CodeGenTokenizer(**made)) == "bytes"
    assert decoding_of(piece_tokenizer("ends")) == "whole"
    shouting = Shouting(**made)
    assert decoding_of(shouting) == "whole"
    check_against_the_twin(shouting, ids_of("one two"), ("E T",))
    # For BPE the clean-up of spaces is idle in transformers; told twice, it takes spaces back.
    assert decoding_of(PreTrainedTokenizerFast(**made, clean_up_tokenization_spaces=True)) == "bytes"
    told_twice = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    cleaned = PreTrainedTokenizerFast(**made, clean_up_tokenization_spaces=True, **told_twice)
    assert decoding_of(cleaned) == "whole"
    check_against_the_twin(cleaned, ids_of("do n't , it 's ."), ())
    assert decoding_of(object()) == "whole"  # type: ignore[arg-type]
