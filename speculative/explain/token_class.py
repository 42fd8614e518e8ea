"""Which text each token adds to a response, and what kind of text that is: a word's beginning, a number, a code name."""

import re
import unicodedata
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from speculative.decoder.text import UNDECODED, decoded

CLASSES = ("word start", "word continuation", "identifier", "digits", "punctuation", "whitespace", "special", "other")
NAME_RUN = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
# fooBar, HTTPServer; acronyms in the plural (URLs) are words.
HUMP = re.compile(r"[a-z][A-Z]|[A-Z]{2,}[a-z]{2,}")
NUMBER = re.compile(r"[\d.,]*\d[\d.,_]*")
METASPACE = "\u2581"


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The text each token adds, special tokens adding nothing; joined, the pieces are the decoded response.

    A character whose bytes are spread over tokens belongs to the token that completes it; the tokens before add "".
    Bytes that never become a character are U+FFFD at the next token that adds text, or at the last. Only the tokens
    since the last whole character are decoded again, so the time is linear in the response. With a tokenizer whose
    decoder changes earlier text (one that cleans up spaces), the pieces are those of that text up to the changes.
    """
    pieces: list[str] = []
    window: list[int] = []
    settled_length = 0  # Characters of the window's text that have their token.
    for place, token_id in enumerate(ids):
        window.append(int(token_id))
        text = decoded(tokenizer, window)
        last = place == len(ids) - 1
        settled = len(text) if last else max(settled_length, len(text.rstrip(UNDECODED)))
        pieces.append(text[settled_length:settled])
        settled_length = settled
        alone = decoded(tokenizer, window[-1:])
        # One token stays as the past of the next: a decoder may treat a first token in its own way (drop its space).
        if alone and UNDECODED not in alone and settled == len(text):
            window, settled_length = window[-1:], len(alone)
    return pieces


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """One token as a reader should see it by itself: its text, a special token's name, `<id 231>` for part of a character."""
    text = decoded(tokenizer, [int(token_id)], skip_special_tokens=False)
    if not text or UNDECODED in text:
        return f"<id {int(token_id)}>"
    symbol = str(tokenizer.convert_ids_to_tokens(int(token_id)))
    # Decoders of this kind drop the space of a text's first token.
    return f" {text}" if symbol.startswith(METASPACE) and not text.startswith(" ") else text


def token_classes(pieces: Sequence[str]) -> list[str]:
    """The class, one of `CLASSES`, of each piece of one response, given in order: what a piece is depends on its past. special: adds no
    text (the end token and its like). whitespace: nothing but spaces, line breaks, indents. digits: a number or a part of one. identifier:
    letters, `_` or `.` inside a code name, which is a run of names joined by `.`, one with `_` in it, or one in camel case. word start,
    word continuation: other letters, by what is before the first of them. punctuation: only punctuation marks and mathematical or currency
    signs. other: the rest (emoji, parts of a character, undecodable bytes).
    """
    text = "".join(pieces)
    in_name = bytearray(len(text))
    for run in NAME_RUN.finditer(text):
        name = run.group()
        if "_" in name or "." in name or HUMP.search(name):
            in_name[run.start() : run.end()] = b"\1" * len(name)
    classes: list[str] = []
    start = 0
    for piece in pieces:
        classes.append(_class_of(piece, text, start, in_name))
        start += len(piece)
    return classes


def _class_of(piece: str, text: str, start: int, in_name: bytearray) -> str:
    core = piece.strip()
    if not piece:
        # A part of a character is followed by the piece that completes it, which is never ASCII.
        return "other" if start < len(text) and not text[start].isascii() else "special"
    if not core:
        return "whitespace"
    if NUMBER.fullmatch(core):
        return "digits"
    if any(in_name[start : start + len(piece)]):
        return "identifier"
    letter = re.search(r"\w", piece)
    if letter is not None:
        return "word continuation" if _inside_word(text, start + letter.start()) else "word start"
    return "punctuation" if all(map(_is_punctuation, core)) else "other"


def _inside_word(text: str, place: int) -> bool:
    """Whether the letter at `place` has a letter before it, an apostrophe between two letters counting as one."""
    before = text[max(0, place - 2) : place]
    return before[-1:].isalnum() or (before[-1:] in ("'", "\u2019") and before[:1].isalpha() and len(before) == 2)


def _is_punctuation(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "P" or category in ("Sm", "Sc", "Sk") or character.isspace()
