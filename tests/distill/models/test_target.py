"""The target as everybody gets it: one object, its facts known without its weights."""

import copy
import gc
import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from refusals import refused
from tiny_models import COMMON, tiny_model
from tiny_training import tiny_tokenizer, write_target
from tokenizers.normalizers import Lowercase

from distill.config.layout import RESPONSES, TARGET_FACTS
from distill.config.target import TargetConfig
from distill.models.draft import as_exported, cast_weights
from distill.models.load import _refuse_offloaded, model_files, tokenizer_fingerprint
from distill.models.target import Target, target_notes
from speculative.errors import UserError
from speculative.rules.sampling import GREEDY, SamplingSettings

CPU = torch.device("cpu")


def test_facts_outlive_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "target")
    first = Target(TargetConfig(path=str(tmp_path / "target")), CPU, tmp_path)
    facts = first.facts
    first.remember()
    with monkeypatch.context() as patch:
        patch.delattr("distill.models.target.load_model")
        assert Target(TargetConfig(path=str(tmp_path / "target")), CPU, tmp_path).facts == facts
    other = Target(TargetConfig(path=str(tmp_path / "target"), dtype="bfloat16"), CPU, tmp_path)
    assert other._facts is None, "facts of another dtype were asked for: the weights tell"
    assert (facts.dtype, other.facts.dtype) == ("float32", "bfloat16")
    same = {"source": facts.source, "dtype": facts.dtype, "fingerprint": facts.fingerprint}
    assert other.facts.model_copy(update=same) == facts


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("changed", ["weights", "one value", "config.json", "nothing"])
def test_every_file_of_the_target_is_in_its_fingerprint(name: str, changed: str, tmp_path: Path) -> None:
    """One value of a table of millions is found too: the samples alone would miss it."""
    config = TargetConfig(path=str(tmp_path / "target"))

    def write(seed: int = 0, scale: float = 1.0, **keys: object) -> None:
        model = write_target(tmp_path / "target", seed=seed, hidden_size=64, **keys)
        with torch.no_grad():
            model.get_input_embeddings().weight[1, 5] *= scale
        model.save_pretrained(tmp_path / "target")
        if name.endswith(".bin"):
            torch.save(model.state_dict(), tmp_path / "target" / name)
            (tmp_path / "target" / "model.safetensors").unlink()

    write()
    first = Target(config, CPU, tmp_path)
    first.remember()
    assert Target(config, CPU, tmp_path)._facts == first.facts
    change = {"weights": {"seed": 1}, "one value": {"scale": 1.5}, "config.json": {"rms_norm_eps": 0.1}, "nothing": {}}
    write(**change[changed])
    again = Target(config, CPU, tmp_path)
    assert again._facts is None
    assert (again.facts.fingerprint == first.facts.fingerprint) == (changed == "nothing")
    (tmp_path / RESPONSES).mkdir()
    again.remember()
    remembered = json.loads((tmp_path / TARGET_FACTS).read_text(encoding="utf-8"))
    assert remembered["fingerprint"] == first.facts.fingerprint, "the responses are of this target"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "adapter_model.bin",
        "parts/layer.py",
        "model.safetensors.index.json",
    ],
)
def test_facts_are_found_again_when_any_file_of_the_model_changes(name: str, tmp_path: Path) -> None:
    place = tmp_path / "target"
    write_target(place)
    Target(TargetConfig(path=str(place)), CPU, tmp_path).remember()
    assert Target(TargetConfig(path=str(place)), CPU, tmp_path)._facts is not None
    before = model_files(str(place))
    (place / name).parent.mkdir(exist_ok=True)
    with (place / name).open("a") as file:
        file.write("\n")
    assert place / name in model_files(str(place))
    assert place / name in before or len(model_files(str(place))) == len(before) + 1
    if not name.endswith(".bin"):
        assert Target(TargetConfig(path=str(place)), CPU, tmp_path)._facts is None


def test_a_tokenizer_with_other_rules_has_another_fingerprint() -> None:
    tokenizer, other = tiny_tokenizer(), copy.deepcopy(tiny_tokenizer())
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(other)
    tokenizer(["a", "a longer text"], padding=True)
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(other), "padding is no rule"
    other.backend_tokenizer.normalizer = Lowercase()
    assert tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(other)


@pytest.mark.parametrize(("value", "legal"), [(float("nan"), False), (float("inf"), False), (float("-inf"), True)])
def test_logits_are_numbers_and_a_head_may_forbid_tokens(value: float, legal: bool, tmp_path: Path) -> None:
    model = write_target(tmp_path, kind="phi", num_key_value_heads=COMMON["num_attention_heads"])
    with torch.no_grad():
        model.lm_head.bias[5:9] = value
    model.save_pretrained(tmp_path)
    target = Target(TargetConfig(path=str(tmp_path)), CPU)
    if legal:
        with target.loaded() as whole:
            assert as_exported(whole, target).lm_head.bias[5] == value
    else:
        assert "its logits in float32 are not numbers" in refused(lambda: target.facts)


def test_what_overflows_and_what_is_no_number_are_distinguished() -> None:
    for value, text in ((1e6, "values up to 1e.06, too large for float16"), (float("nan"), "is not a number")):
        model = tiny_model()
        with torch.no_grad():
            model.lm_head.weight[0, 0] = value
        assert re.search(text, refused(cast_weights, model, torch.float16))


def test_the_weights_are_in_memory_inside_a_block_and_blocks_in_it_share_them(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    target = Target(TargetConfig(path=str(tmp_path / "target")), CPU)
    with target.loaded() as model:
        alive = weakref.ref(model)
        with target.loaded() as inner, target.loaded(on_host=True) as read:
            assert inner is read is model
        assert target.facts.parameters == model.num_parameters()
    del model, inner, read
    gc.collect()
    assert alive() is None, "the last block to end frees them"
    with target.single_load():
        assert target._model is None, "the first block inside loads them"
        with target.loaded(on_host=True):
            assert target._model is None, "what is only read is not on the device"
        with target.loaded() as first:
            pass
        with target.loaded() as second:
            assert first is second
    with pytest.raises(KeyboardInterrupt), target.loaded():
        raise KeyboardInterrupt
    assert target._model is None


def test_a_target_spread_by_accelerate_is_the_same_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without GPUs everything lies on its one device; several processes cannot each have all GPUs."""
    write_target(tmp_path / "target")
    facts = Target(TargetConfig(path=str(tmp_path / "target")), CPU).facts
    spread = Target(TargetConfig(path=str(tmp_path / "target"), device_map="auto"), CPU)
    assert spread.facts == facts
    with spread.loaded() as model:
        assert model.device == CPU
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    words = r"target\.device_map: auto gives one process all GPUs, and 2 were started"
    with pytest.raises(UserError, match=words), spread.loaded():
        pass


@pytest.mark.parametrize("left", ["cpu", "disk"])
def test_a_target_that_does_not_fit_on_all_gpus_is_refused(left: str, tmp_path: Path) -> None:
    """accelerate would leave layers in memory or on disk and send them to a GPU for every token."""
    model = write_target(tmp_path)
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": left}
    with pytest.raises(UserError, match="does not fit on the 0 GPUs here"):
        _refuse_offloaded("target.path", str(tmp_path), model)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|bos|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def chat_target(folder: Path, ends: dict[str, object], **sampling: object) -> Target:
    """A target whose template ends turns with <|bos|>, and whose files name these end tokens."""
    write_target(folder)
    tokenizer = copy.deepcopy(tiny_tokenizer())  # tests share it
    tokenizer.chat_template = TEMPLATE
    token = {name: tokenizer.convert_tokens_to_ids(text) for name, text in ends.items() if isinstance(text, str)}
    tokenizer.eos_token = ends["tokenizer"]
    tokenizer.save_pretrained(folder)
    for name in ("config", "generation_config"):
        path = folder / f"{name}.json"
        known = json.loads(path.read_text())
        path.write_text(json.dumps(known | {"eos_token_id": token[name]} | (sampling if name != "config" else {})))
    return Target(TargetConfig(path=str(folder)), CPU)


EOS, TURN = "<|eos|>", "<|bos|>"


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "names", "words"),
    [
        (TURN, TURN, TURN, [TURN], None),
        (
            EOS,
            EOS,
            TURN,
            [EOS, TURN],
            "responses end at <|eos|> (2), <|bos|> (1); its config.json, generation_config.json and tokenizer differ",
        ),
        (TURN, EOS, EOS, [EOS, TURN], "responses end at <|eos|> (2), <|bos|> (1); "),
        (EOS, EOS, EOS, [EOS], "the chat template ends a turn with <|bos|> (1), but responses do not end there"),
    ],
)
def test_files_that_differ_on_the_end_of_a_response_are_all_heard(
    tmp_path: Path, config: str, generation: str, tokenizer: str, names: list[str], words: str | None
) -> None:
    target = chat_target(tmp_path, {"config": config, "generation_config": generation, "tokenizer": tokenizer})
    ids = tuple(target.tokenizer.convert_tokens_to_ids(names))
    assert target.facts.eos_ids == ids
    notes = target_notes(target.side, None)
    assert len(notes) == (words is not None)
    assert all(words and words in note and "\n" not in note for note in notes)


def test_settings_of_the_targets_own_file_that_are_not_measured_are_reported(tmp_path: Path) -> None:
    ends = {"config": TURN, "generation_config": TURN, "tokenizer": TURN}
    target = chat_target(tmp_path, ends, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.3, do_sample=True)
    (note,) = target_notes(target.side, SamplingSettings(1.0, 20, 1.0))
    assert (
        "generation_config.json sets temperature 0.7 (here 1), top_p 0.8 (here 1), repetition_penalty 1.3 (here 1)"
        in note
    )
    (note,) = target_notes(target.side, GREEDY)
    assert "sets temperature 0.7 (here 0), repetition_penalty 1.3 (here 1);" in note
