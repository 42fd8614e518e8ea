"""`check-pair`: each check is found by a pair that violates only it, and pairs without a fault pass clean."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from gguf_file import tokenizer_metadata, write_gguf, write_model
from safetensors.torch import load_file, save_file
from test_export import make_tokenizer
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer, write_target
from transformers import Gemma3nTextConfig, LlamaConfig
from typer.testing import CliRunner

from distill import cli
from distill.config.layout import SERVING_FORMAT
from distill.engines.protocol.facts import _shape
from distill.export.pair import check_pair
from distill.models.files.gguf import read_gguf
from distill.models.load import load_model, load_tokenizer
from distill.models.target import load_target_side
from distill.models.vocabulary import tokens_by_id
from speculative.errors import UserError

VLLM, SGLANG, LLAMA_CPP = "vLLM 0.32", "SGLang 0.5", "llama.cpp v0.5.0"
ALL = {VLLM, SGLANG, LLAMA_CPP, "transformers 5", "TensorRT-LLM 1.3", "OpenVINO GenAI 2026.4.1"}
ROWS = len(make_tokenizer()) + 2


def write(folder, kind="llama", dtype=torch.float32, **shape):
    known = {"vocab_size": ROWS, "head_dim": 32, "tie_word_embeddings": True, "num_hidden_layers": 1}
    tiny_model(kind, dtype=dtype, **known | shape).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def edit(folder, name, change):
    tree = json.loads((folder / name).read_text())
    change(tree)
    (folder / name).write_text(json.dumps(tree))


def test_the_width_of_a_model_with_one_a_layer_is_their_divisor():
    config = Gemma3nTextConfig(num_hidden_layers=2, intermediate_size=[64, 96])
    assert _shape(config)[3] == 32
    assert _shape(LlamaConfig(intermediate_size=96))[3] == 96


class Finding(NamedTuple):
    breaks: bool
    engines: tuple[str, ...]
    text: str


def found(target, draft, *ggufs, **how) -> list[Finding]:
    told = check_pair(str(target), str(draft), ggufs, **how)
    parts = [
        (breaks, *line.split(": ", 1)) for breaks, lines in zip((True, False), told, strict=True) for line in lines
    ]
    assert all(who.startswith("breaks " if breaks else "note for ") for breaks, who, _ in parts)
    names = [who.removeprefix("breaks ").removeprefix("note for ") for _, who, _ in parts]
    engines = [() if one == "every engine" else tuple(one.split(", ")) for one in names]
    return [Finding(breaks, who, text) for (breaks, _, text), who in zip(parts, engines, strict=True)]


@pytest.fixture
def target(tmp_path):
    return write(tmp_path / "target")


@pytest.fixture
def draft(tmp_path):
    return write(tmp_path / "draft")


def test_pairs_without_a_fault_pass_clean(target, draft):
    assert found(target, draft) == found(target, draft, tensor_parallel=2) == []
    assert found("embedded", "embedded") == [], "a trained pair, with a bos that both add"


def add_bos(tree):
    special = {"SpecialToken": {"id": "<|user|>", "type_id": 0}}
    token = {"<|user|>": {"id": "<|user|>", "ids": [2], "tokens": ["<|user|>"]}}
    single = [special, {"Sequence": {"id": "A", "type_id": 0}}]
    tree["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": token}


def swapped(tree):
    vocab = tree["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]


def added(tree):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tree["added_tokens"].append({"id": tree["model"]["vocab"]["A"], "content": "A", **flags})


# (file, its change, who is broken by it, words of the finding); an empty set: a note.
FILES = [
    ("tokenizer.json", add_bos, {LLAMA_CPP}, ("post_processor", "[] in the target", "['<|user|>'] in the draft", "refuses")),
    ("tokenizer.json", swapped, ALL, ("tokenizer.json", "'A' in the target", "'B' in the draft", "use a draft with the target")),
    ("tokenizer.json", added, {SGLANG}, ("added_tokens", "{} in the target", "'A'", "sglang#24051")),
    ("tokenizer.json", lambda tree: tree["model"].update(byte_fallback=True), {LLAMA_CPP}, ("byte_fallback", "False", "True")),
    ("tokenizer.json", lambda tree: tree.update(normalizer={"type": "Lowercase"}), set(), ("normalizer", "Lowercase", "acceptance")),
    ("tokenizer.json", lambda tree: tree["model"]["merges"].pop(), set(), ("merges", "acceptance falls")),
    ("tokenizer_config.json", lambda tree: tree.update(pad_token="<|user|>"), set(), ("pad_token", "<|pad|>", "<|user|>")),
    ("config.json", lambda tree: tree.update(vocab_size=ROWS + 9), ALL - {LLAMA_CPP}, (f"{ROWS + 9} draft rows", "needs the same")),
    ("config.json", lambda tree: tree.update(vocab_size=ROWS + 999), ALL, (f"{ROWS + 999} draft rows", "needs")),
    ("config.json", lambda tree: tree.update(tie_word_embeddings=False), None, ("no lm_head.weight", "noise")),
    ("config.json", lambda tree: tree.update(dtype="float16"), set(), ("torch.float32 in the target, torch.float16 in the draft", "vLLM")),
    ("config.json", lambda tree: tree.update(max_position_embeddings=64), set(), ("context is 64", "limit the server")),
    ("config.json", lambda tree: tree.update(head_dim=20), {VLLM}, ("head_dim 20 in the draft", "no attention kernel")),
    ("config.json", lambda tree: tree.update(head_dim=40), set(), ("head_dim 40 in the draft", "CPU build")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "broken", "words"), FILES)
def test_each_file_that_differs_is_found_once(target, draft, name, change, broken, words):
    edit(draft, name, change)
    findings = found(target, draft)
    if "draft rows" in words[0]:  # Then the weights do not fit config.json either, which is a finding of its own.
        findings = [one for one in findings if "draft's safetensors" not in one.text]
    assert findings
    named = {engine for one in findings for engine in one.engines if one.breaks}
    assert named == (broken or set())
    assert any(one.breaks for one in findings) == (broken is None or bool(broken))
    text = "\n".join(f"{one.engines} {one.text}" for one in findings)
    assert all(word in text for word in words), text
    assert len(findings) <= 2, "several engines may say it in their own words, and nothing else is wrong"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", {"bos_token_id": 3}, ("bos_token_id: 2 in the target, 3 in the draft", "refuses")),
        (
            "tokenizer_config.json",
            {"bos_token": "<|pad|>"},
            ("bos_token: <|user|> in the target, <|pad|> in the draft", "refuses"),
        ),
    ],
)
def test_another_bos_breaks_only_if_the_target_adds_one(target, draft, name, change, words):
    for side in (target, draft):
        edit(side, "tokenizer_config.json", lambda tree: tree.update(bos_token="<|user|>"))
        edit(side, "config.json", lambda tree: tree.update(bos_token_id=2))
    assert found(target, draft) == []
    edit(draft, name, lambda tree: tree.update(change))
    assert not any(one.breaks for one in found(target, draft)), "no text begins with it"
    for side in (target, draft):
        edit(side, "tokenizer.json", add_bos)
    (one,) = (one for one in found(target, draft) if one.breaks)
    assert one.engines == (LLAMA_CPP,)
    assert all(word in one.text for word in words), one.text


WINDOWS = {"kind": "gemma2", "num_hidden_layers": 2, "sliding_window": 16}


def test_what_may_not_start_in_an_engine_is_reported_with_its_thread(target, tmp_path):
    (one,) = found(target, write(tmp_path / "windows", **WINDOWS))
    assert (one.breaks, one.engines) == (False, (VLLM,))
    assert all(
        word in one.text
        for word in ("a window of 16 tokens", "vllm#46032, 2026-06-18", "--disable-hybrid-kv-cache-manager")
    )
    alone = found(target, write(tmp_path / "alone", "mistral", sliding_window=16))
    assert ["vllm#50169" in one.text for one in alone] == [True]
    wide = write(tmp_path / "wide", **WINDOWS | {"sliding_window": 32})
    broken = [one for one in found(wide, tmp_path / "windows") if one.breaks]
    assert [(one.engines, "a draft whose layers all read all tokens" in one.text) for one in broken] == [
        ((VLLM,), True)
    ]
    hybrid = {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 0,
    }
    mixed = write(tmp_path / "hybrid", "qwen3_next", **hybrid)
    notes = {one.engines: one.text for one in found(mixed, target)}
    assert "vllm#43626, 2026-05-26" in notes[VLLM,]
    assert "TensorRT-LLM#18449, 2026-08-31" in notes["TensorRT-LLM 1.3",]
    assert not any(one.breaks for one in found(mixed, target))
    assert [one.engines for one in found(mixed, mixed) if one.breaks] == [(VLLM,)]


def test_a_row_of_gamma_0_of_an_export_is_reported(target, draft):
    facts = {
        "target": "t",
        "draft": "d",
        "gamma": 4,
        "target_rows": 1,
        "draft_rows": 1,
        "first_difference": None,
        "first_difference_from_5": None,
        "target_quantised": False,
        "gamma_by_load": [[1, 3, 4], [4, 4096, 0]],
    }
    (draft / "serving.json").write_text(json.dumps({"format": SERVING_FORMAT, "facts": facts}))
    notes = [one for one in found(target, draft) if "vllm#49548" in one.text]
    assert [one.engines for one in notes] == [(VLLM,)]
    (draft / "serving.json").write_text('{"facts": 1')
    assert found(target, draft) == [], "not ours to judge"


def test_a_chat_template_of_its_own_is_a_note(target, draft):
    (draft / "chat_template.jinja").write_text("other")
    (one,) = found(target, draft)
    assert not one.breaks
    assert "<|user|>" in one.text
    assert "other in the draft" in one.text


def test_rows_and_weights(tmp_path, target, draft):
    few = write(tmp_path / "few", vocab_size=ROWS - 9)
    assert {name for one in found(few, few) for name in one.engines if "tokenizer.json needs" in one.text} == ALL
    edit(few, "config.json", lambda tree: tree.update(vocab_size=ROWS))
    (one,) = found(target, few)
    assert (one.breaks, one.engines) == (True, ())
    assert f"embed_tokens.weight has {ROWS - 9} rows in the draft's safetensors" in one.text
    assert f"vocab_size is {ROWS}" in one.text
    (few / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(UserError, match=r"model\.safetensors: not a complete safetensors file"):
        found(target, few)
    own = write(tmp_path / "own", tie_word_embeddings=False)
    assert found(target, own) == [], "an untied head that is there"


def test_weights_that_are_not_there(tmp_path, target):
    own = write(tmp_path / "own", tie_word_embeddings=False)
    index, named = own / "model.safetensors.index.json", ["part.safetensors", "head.safetensors"]
    index.write_text(json.dumps({"weight_map": dict(zip("ab", named, strict=True))}))
    assert found(target, own) == [], "the whole file comes first"
    tensors = load_file(own / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "lm_head" not in name}, own / named[0])
    (own / "model.safetensors").unlink()
    (one,) = found(target, own)
    assert (one.breaks, "the draft has no head.safetensors; engines do not load it" in one.text) == (True, True)
    for damaged in ("[]", "{", '{"weight_map": {"a": null}}'):
        index.write_text(damaged)
        with pytest.raises(UserError, match="not an index of weight files"):
            found(target, own)
    torch.save({}, own / "pytorch_model-1.bin")
    index.rename(own / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "pytorch_model-1.bin", "b": "two.bin"}}'
    )
    (one,) = found(target, own)
    assert "the draft has no two.bin" in one.text
    torch.save({}, own / "pytorch_model.bin")
    assert all("two.bin" not in one.text for one in found(target, own)), "the whole file comes first"
    for path in own.glob("pytorch_model*"):
        path.unlink()
    (own / named[0]).rename(own / "adapter_model.safetensors")
    (one,) = found(target, own)
    assert "the draft has no model.safetensors" in one.text
    (own / "adapter_model.safetensors").rename(own / "pytorch_model.bin")
    assert found(target, own) == []


def test_a_head_that_the_engine_never_loads(tmp_path, target):
    full = {"layer_types": ["full_attention"]}
    untied = write(tmp_path / "untied", "gemma2", tie_word_embeddings=False, **full)
    (one,) = found(target, untied)
    assert (one.breaks, set(one.engines)) == (True, {VLLM, LLAMA_CPP})
    assert "gemma2" in one.text
    assert found(target, write(tmp_path / "tied", "gemma2", **full)) == []


@pytest.mark.parametrize(("parts", "fine"), [(2, True), (4, True), (3, False), (8, False)])
def test_tensor_parallel_must_divide(target, draft, parts, fine):
    findings = found(target, draft, tensor_parallel=parts)
    assert (findings == []) == fine
    assert all(one.breaks and one.engines == (VLLM,) for one in findings)
    assert fine or f"--tensor-parallel-size {parts}" in findings[0].text
    assert found(target, draft, tensor_parallel=parts, engines=["SGLang"]) == []


def gguf(folder: Path, side: str, shapes=None, **changes):
    tokenizer = load_target_side(side).tokenizer
    tokens = list(dict(sorted(tokens_by_id(tokenizer).items())).values())
    tokens += [f"[PAD{number}]" for number in range(2)]
    known = {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": side == "embedded",
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id or 0,
    }
    if tokenizer.chat_template:
        known["tokenizer.chat_template"] = tokenizer.chat_template
    known |= {key.replace("__", "."): value for key, value in changes.items()}
    return write_gguf(folder / "model.gguf", known, shapes or {"token_embd.weight": [32, len(tokens)]})


def test_a_target_that_is_a_gguf_file_is_compared_too(tmp_path):
    """Its tokenizer, end tokens and context are in the file. An export has the tokenizer that transformers reads from it."""
    own = write_target(tmp_path / "draft", tie_word_embeddings=True)
    file = write_model(tmp_path / "target.gguf", own, tokenizer_metadata(tiny_tokenizer()))
    load_tokenizer(str(file)).save_pretrained(tmp_path / "draft")
    assert [one.text for one in found(file, tmp_path / "draft", engines=["llama.cpp"]) if one.breaks] == []
    other = write(tmp_path / "other")
    assert any(one.breaks and "token id" in one.text for one in found(file, other, engines=["llama.cpp"]))


def test_weights_may_be_a_gguf_elsewhere(tmp_path, target):
    bare = write(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    assert ["the draft has no model.safetensors" in one.text for one in found(target, bare)] == [True]
    assert found(target, bare, gguf(tmp_path, str(target))) == []


@pytest.mark.parametrize(
    ("changes", "breaks", "words"),
    [
        ({}, None, ""),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 2},
            True,
            "added: ['<|user|>'], and [] by the target's files",
        ),
        (
            {"tokenizer__ggml__add_eos_token": True, "tokenizer__ggml__eos_token_id": 999999},
            True,
            "added: [None], and []",
        ),
        ({"tokenizer__ggml__tokens": ["<|end|>", "other"]}, True, "id 1: other, and <|pad|> by"),
        ({"tokenizer__chat_template": "other"}, False, "tokenizer.chat_template: other, and {% for"),
        ({"llama__context_length": 64}, False, "llama.context_length: 64, and 256"),
        ({"shapes": {"token_embd.weight": [32, 9]}}, True, "token_embd.weight: rows: [9], and ["),
    ],
)
def test_a_gguf_is_compared_with_the_targets_files(tmp_path, target, draft, changes, breaks, words):
    path = gguf(tmp_path, str(target), **changes)
    findings = [one for one in found(target, draft, path) if "and [2] by" not in one.text]
    assert [one.breaks for one in findings] == ([] if breaks is None else [breaks])
    for one in findings:
        assert one.engines == (LLAMA_CPP,)
        assert str(path) in one.text
        assert words in one.text
    assert found(target, draft, path, engines=["vLLM"]) == []


def test_a_gguf_whose_bos_is_the_targets_own(tmp_path):
    assert [one.text for one in found("embedded", "embedded", gguf(tmp_path, "embedded"))] == []
    (one,) = found("embedded", "embedded", gguf(tmp_path, "embedded", tokenizer__ggml__add_bos_token=False))
    assert "added: [], and ['<|bos|>'] by the target's files" in one.text


def test_files_that_are_no_gguf(tmp_path, target, draft):
    whole = gguf(tmp_path, str(target)).read_bytes()
    bad = tmp_path / "bad.gguf"
    for content in (
        b"",
        b"GGUF",
        b"hello world",
        b"GGUF\7\0\0\0",
        whole[:-30],
        whole[:400],
        whole[:16] + b"\xff" * 8 + whole[24:],
        whole[:32] + b"\xff" * 40,
    ):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.gguf: not a complete GGUF file"):
            read_gguf(bad)
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="not a complete GGUF file"):
            read_gguf(place)
    with pytest.raises(UserError, match=r"no tokenizer\.ggml\.tokens"):
        found(target, draft, write_gguf(bad, {"general.architecture": "clip"}, {}))


def test_the_command_and_its_exit_status(target, draft, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["check-pair", *map(str, arguments)])

    clean = run(target, draft)
    assert (clean.exit_code, "break serving: 0, notes: 0" in clean.output) == (0, True)
    (draft / "chat_template.jinja").write_text("other")
    assert run(target, draft).exit_code == 0, "a note breaks nothing"
    edit(draft, "tokenizer.json", add_bos)
    wrong = run(target, draft)
    assert wrong.exit_code == 1
    assert wrong.output.startswith(f"breaks {LLAMA_CPP}: tokenizer.json: post_processor")
    assert run(target, draft, "--engine", "vllm").exit_code == 0
    for arguments, words in (
        ((target, tmp_path / "nowhere"), "draft .*nowhere.*config.json"),
        ((tmp_path / "empty", draft), "target .*empty.*config.json"),
        ((target, draft / "config.json"), "draft .*config.json"),
        ((target, draft, "--engine", "ollama"), "--engine ollama"),
        ((target, draft, "--gguf", draft / "config.json"), "not a complete GGUF"),
    ):
        refused = run(*arguments).exception
        assert isinstance(refused, UserError)
        assert pytest.raises(UserError, match=words).matches(refused)
    (draft / "config.json").write_text('{"a": ')
    assert "not a valid JSON" in str(run(target, draft).exception)


def test_a_tied_config_beside_another_head_is_named(tmp_path):
    """transformers 5 computes with the head of the file, vLLM and SGLang with the embedding; nothing else may load it either."""
    right, stale = (write(tmp_path / name, tie_word_embeddings=False) for name in ("right", "stale"))
    edit(stale, "config.json", lambda tree: tree.update(tie_word_embeddings=True))
    broken = check_pair(str(right), str(stale))[0]
    assert any("tie_word_embeddings true in the draft" in line and "another lm_head.weight" in line for line in broken)
    assert not any("tie_word_embeddings true" in line for line in check_pair(str(right), str(right))[0])
    with pytest.raises(UserError, match=r"stale.*tie_word_embeddings: true.*set it to false"):
        load_model("draft", str(stale))
