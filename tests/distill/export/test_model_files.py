"""Both spellings of config.json, and the target's own tokenizer files."""

import json
import shutil

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoConfig, AutoTokenizer

from distill.export.model_files import add_older_keys, copy_tokenizer, rewrite
from distill.models.load import EMBEDDED
from distill.models.target import load_target_side

THETA = 50_000.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
WINDOWED = {
    "full_attention": {"rope_type": "linear", "rope_theta": THETA, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
}
# kind -> (its rope_parameters and other fields, the keys that transformers 4 reads)
SPELLINGS = {
    "llama": ({"rope_type": "default"}, {}, {"rope_theta": THETA, "rope_scaling": None}),
    "qwen3": (YARN, {}, {"rope_theta": THETA, "rope_scaling": YARN}),
    "olmo2": ({"rope_type": "linear", "factor": 2.0}, {}, {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "stablelm": ({"rope_type": "default", "partial_rotary_factor": 0.5}, {}, {"rope_theta": THETA, "partial_rotary_factor": 0.5}),
    "gpt_neox": ({"rope_type": "default", "partial_rotary_factor": 0.5}, {}, {"rotary_emb_base": THETA, "rotary_pct": 0.5}),
    "qwen3_moe": ({"rope_type": "default"}, {"num_experts": 4, "num_experts_per_tok": 2}, {"num_experts": 4, "rope_theta": THETA}),
    "phi3": (
        LONG | {"partial_rotary_factor": 0.5}, {"original_max_position_embeddings": 64},
        {"rope_theta": THETA, "partial_rotary_factor": 0.5,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
    ),
    "gemma3_text": (
        WINDOWED, {"layer_types": ["sliding_attention", "full_attention"]},
        {"rope_theta": THETA, "rope_local_base_freq": 3000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
}  # fmt: skip


def model_of(kind):
    rope, more, _ = SPELLINGS[kind]
    rope = rope if "full_attention" in rope else rope | {"rope_theta": THETA}
    return tiny_model(kind, hidden_size=64, head_dim=16, rope_parameters=rope, **more)


@pytest.mark.parametrize("kind", SPELLINGS)
def test_both_spellings_are_written_and_read_alike(tmp_path, kind):
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    alone = AutoConfig.from_pretrained(tmp_path).to_dict()
    rewrite(tmp_path / "config.json", add_older_keys)
    tree = json.loads((tmp_path / "config.json").read_text())
    older = {"torch_dtype": tree["dtype"]} | SPELLINGS[kind][2]
    assert {key: tree[key] for key in older} == older
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    for rope in (again["rope_parameters"], *again["rope_parameters"].values()):
        if isinstance(rope, dict):
            rope.pop("type", None)  # the older name of rope_type
    assert again == alone | {key: again[key] for key in again.keys() - alone.keys()}, "transformers 5 reads the same"
    assert again["rope_parameters"] == alone["rope_parameters"]
    ids_BT = torch.arange(40)[None] % 60
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(input_ids=ids_BT).logits, model.eval()(input_ids=ids_BT).logits)


def test_a_config_in_a_config_has_them_too():
    inner = {
        "model_type": "llama",
        "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }
    tree = add_older_keys({"model_type": "outer", "text_config": inner, "rope_parameters": None})
    assert (tree["text_config"]["rope_theta"], tree["text_config"]["torch_dtype"]) == (THETA, "bfloat16")
    assert "rope_theta" not in tree


def test_the_tokenizer_files_are_the_targets_own(tmp_path):
    source, out = tmp_path / "target", tmp_path / "out"
    load_target_side(EMBEDDED).tokenizer.save_pretrained(source)
    tree = json.loads((source / "tokenizer_config.json").read_text())
    older = tree | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    older.pop("extra_special_tokens", None)
    (source / "tokenizer_config.json").write_text(json.dumps(older, indent=1))
    (source / "special_tokens_map.json").write_text("{}")
    (source / "tokenizer.model").write_bytes(b"\x00pieces")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{load_target_side(EMBEDDED).name}/{name}", source)
    out.mkdir()
    copy_tokenizer(load_target_side(str(source)), out)
    copied = sorted(path for path in out.rglob("*") if path.is_file())
    assert {"tokenizer.json", "tokenizer.model", "special_tokens_map.json", "rag.jinja"} <= {one.name for one in copied}
    for path in copied:
        assert path.read_bytes() == (source / path.relative_to(out)).read_bytes(), path.name


def test_a_tokenizer_class_that_transformers_4_does_not_know_gets_its_older_name(tmp_path):
    side = load_target_side(EMBEDDED)
    source, out = tmp_path / "target", tmp_path / "out"
    shutil.copytree(side.name, source, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tree = json.loads((source / "tokenizer_config.json").read_text())
    tree |= {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<|im_start|>"]}
    (source / "tokenizer_config.json").write_text(json.dumps(tree))
    out.mkdir()
    copy_tokenizer(load_target_side(str(source)), out)
    tree = json.loads((out / "tokenizer_config.json").read_text())
    assert tree["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tree["additional_special_tokens"] == ["<|im_start|>"]
    assert "extra_special_tokens" not in tree
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
