"""Token ids to text, streamed: text that may still change is held back, and stop strings end a response.

The text is tokenizer.decode of the whole response, without special tokens. Decoding all of it for every token would cost
more and more, so only ids whose text may still change are decoded again; the tokenizer's decoder decides which.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

UNDECODED = "\ufffd"  # Stands for bytes that are not (yet) a character.
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")

# bytes: ids stand for bytes and the text is their concatenation (GPT-2, Llama 3, Qwen).
# pieces: ids stand for characters, or for single bytes that count as a run (Llama 2, Mistral, Gemma).
# whole: anything else; a later token may change any of the text before it.
Decoding = Literal["bytes", "pieces", "whole"]


class Pushed(NamedTuple):
    """`text`: what can be streamed now, possibly "". `stopped`: the stop string that this token completed."""

    text: str
    stopped: str | None


class TextStream:
    """The text of one response, token by token.

    The response ends with the first token after which its text contains a stop string, and its text is cut before the earliest one in it
    (the first given of those that start there). The texts of all `push` calls and of `finish` add up to the final `text`: streamed text
    never changes. So bytes of an unfinished character are held back, an end of the text that may become a stop string, and everything with
    a decoder whose text may change anywhere.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._decoding = decoding_of(tokenizer)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        # The text has three parts: sent; final, but possibly the start of a stop string; open to change by a later token.
        self._sent: list[str] = []
        self._pending = ""
        self._open = ""
        # The ids that are decoded again, and how many characters of their text come before `_open`.
        self._window_ids: list[int] = []
        self._window_final = 0
        self._ended = False

    @property
    def text(self) -> str:
        """The whole text so far, including held-back text; cut before the stop string."""
        return "".join(self._sent) + self._pending + self._open

    def push(self, token_id: int) -> Pushed:
        """Append one token. Not to be called after a stop string or `finish`."""
        assert not self._ended, "push() after the end"
        self._window_ids.append(token_id)
        fresh = decoded(self._tokenizer, self._window_ids)[self._window_final :]
        # No stop string begins in the sent text: it would have been held back.
        found = self._find_stop(self._pending + fresh)
        if found is not None:
            cut, stopped = found
            self._pending, self._open = (self._pending + fresh)[:cut], ""
            return Pushed(self.finish(), stopped)
        final = self._settle(fresh)
        self._pending, self._open = self._pending + fresh[:final], fresh[final:]
        return Pushed(self._send(len(self._pending) - self._held_back()), None)

    def finish(self) -> str:
        """End the response and return the text that was held back."""
        self._ended = True
        self._pending, self._open = self._pending + self._open, ""
        return self._send(len(self._pending))

    def _send(self, length: int) -> str:
        piece, self._pending = self._pending[:length], self._pending[length:]
        if piece:
            self._sent.append(piece)
        return piece

    def _settle(self, fresh: str) -> int:
        """How many characters of `fresh`, the window's text, are final; forgets ids that need no decoding again."""
        if self._decoding == "bytes":
            # Text up to a whole character ends between two characters' bytes, so that what follows cannot change it; a
            # U+FFFD at its end may be the beginning of a character.
            final = len(fresh.rstrip(UNDECODED))
            if final == len(fresh):
                self._window_ids, self._window_final = [], 0
            else:
                self._window_final += final
            return final
        if self._decoding == "pieces":
            # A byte may turn the run of bytes before it into U+FFFD, so a run waits for the token that ends it. That
            # token stays in the window: a decoder may treat a first token in its own way (drop its leading space). Tokens
            # without a text of their own (skipped ones, a space alone) do not protect the next from that.
            last_id = self._window_ids[-1]
            last_text = decoded(self._tokenizer, [last_id])
            if last_text != "" and BYTE_PIECE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(last_id))) is None:
                self._window_ids, self._window_final = [last_id], len(last_text)
                return len(fresh)
        return 0

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """(position in `text`, stop string) of the earliest one."""
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        return min(found, key=lambda one: one[0], default=None)

    def _held_back(self) -> int:
        """Length of the longest end of the pending text that a stop string begins with."""
        for start in range(max(0, len(self._pending) - self._longest_stop + 1), len(self._pending)):
            end = self._pending[start:]
            if any(stop.startswith(end) for stop in self._stop):
                return len(end)
        return 0


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of a list of ids; the tokenizer itself may also return a list of texts."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text


def decoding_of(tokenizer: PreTrainedTokenizerBase) -> Decoding:
    """How later tokens may change the text of earlier ones, as far as the tokenizer's decoder is one we know."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or _decodes_in_its_own_way(tokenizer):
        return "whole"
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return "whole"
    # The only way a decoder shows its settings.
    description = json.loads(decoder.__getstate__())
    steps = description["decoders"] if description["type"] == "Sequence" else [description]
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return "bytes"
    if re.fullmatch("(Metaspace|Replace( ByteFallback)?( Fuse)?( Strip)?)", kinds) is None:
        return "whole"
    replaces_single_characters = all(
        len(step["pattern"].get("String", "")) == 1 for step in steps if step["type"] == "Replace"
    )
    strips_the_beginning_only = all(step["stop"] == 0 for step in steps if step["type"] == "Strip")
    return "pieces" if replaces_single_characters and strips_the_beginning_only else "whole"


def _decodes_in_its_own_way(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether Python code stands between the decoder and the text: an override, or the clean-up of spaces."""
    kind = type(tokenizer)
    # CodeGen's override only takes one more argument.
    overridden = kind.decode is not PreTrainedTokenizerBase.decode and not kind.__name__.startswith("CodeGenTokenizer")
    if overridden or kind._decode is not PreTrainedTokenizerFast._decode:
        return True
    # transformers cleans up BPE text only if a second option is set too.
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    told_twice = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces) and (told_twice or not is_bpe)
