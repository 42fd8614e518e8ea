"""Export: an ordinary directory, whole or not at all, that gives the student's logits and the target's text."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from failures import full_disk
from file_modes import other_modes, umask
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig, get_peft_model
from pydantic import TypeAdapter
from tiny_models import logits, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.generation.utils import GenerationMixin

from distill.engines.protocol.facts import EngineFacts
from distill.engines.protocol.verdict import check
from distill.export import export as export_module
from distill.export.card import model_card, serving_page
from distill.export.export import export_draft
from distill.export.facts import RunFacts, read_run
from distill.models.load import base_of_adapter
from distill.models.vocabulary import repair_rows
from distill.run.result import Curves
from distill.run.verdict_record import DraftOf, Verdict
from speculative.errors import UserError
from speculative.measure.measured import BY_TOKEN, DRAFT, LOOKUP, LOOKUP_DRAFT, TARGET, UNDISTILLED, Measured
from speculative.rules.sampling import SamplingSettings

TEXT = ["def main():", "    return value", "for name in names:", "the draft proposes, the target decides"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
PADDED_ROWS = 16
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44], [100]]


def make_tokenizer(swap=False):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|end|>", "<|pad|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXT, trainer)
    if swap:
        state = json.loads(core.to_str())
        vocab = state["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
        core = Tokenizer.from_str(json.dumps(state))
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def make_llama(rows, layers=1, tied=True, context=256, seed=0):
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    shape = {"vocab_size": rows, "num_hidden_layers": layers, "max_position_embeddings": context}
    return tiny_model(seed=seed, tie_word_embeddings=tied, **shape, **ids)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory, tokenizer):
    """A bfloat16 target with padded rows."""
    directory = tmp_path_factory.mktemp("models") / "target"
    make_llama(len(tokenizer) + PADDED_ROWS, layers=2, tied=False, seed=1).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def student_dir(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("runs") / "checkpoint-10"
    make_llama(len(tokenizer) + PADDED_ROWS).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def curve(rule, taus):
    known = {"alpha": 0.7, "alpha_ci": (0.6, 0.8), "tokens": 100, "prompts": 8, "survival": [0.7, 0.5, 0.3]}
    own = known | {"rule": rule, "gammas": [0, 3], "tau": taus, "tau_ci": [(tau, tau) for tau in taus]}
    return {"rule": rule, "ways": {DRAFT: own}}


CURVES = Curves.model_validate(
    {
        "gammas": [0, 3],
        "rules": [
            curve("sample", [1.0, 2.8]),
            curve("sample-untruncated", [1.0, 2.7]),
            curve("greedy-draft", [1.0, 2.25]),
        ],
    }
)


def timed(way, gamma, **more):
    known = {"gamma": gamma, "tau": 2.8, "tokens_per_second": 900.0, "speed_up": 1.5, "speed_up_ci": (1.4, 1.6)}
    return Measured(way, "sample", **known | more)


def make_verdict(rows=None, run=DRAFT, drafting="autoregressive", **changes):
    """A draft judged at gamma 5, and what was timed."""
    interval = {"alpha_ci": (0.48, 0.52), "tau_ci": (1.8, 2.0), "how": {"tau": "live"}}
    drafts = {UNDISTILLED: (0.5, 1.9), DRAFT: (0.75, 3.25)}
    judged = [
        Measured(way, "sample", gamma=5, alpha=alpha, tau=tau, **interval) for way, (alpha, tau) in drafts.items()
    ]
    known = {
        "rule": "sample",
        "gamma": 5,
        "prompts": 20,
        "tokens": 1234,
        "drafts": [DraftOf(way=way, drafting=drafting) for way in drafts],
        "measured": [*judged, *([timed(DRAFT, 3)] if rows is None else rows)],
        "run": {"1": run},
        "pays": True,
        "outcome": "pays_off",
        "headline": "Run it.",
        "version": "1",
    }
    return Verdict.model_validate(known | changes)


def export(student_dir, target_dir, to, dtype="auto", overwrite=False, **known):
    return export_draft(RunFacts(student_dir, str(target_dir), **known), to, dtype=dtype, overwrite=overwrite)


@pytest.fixture(scope="module")
def exported(student_dir, target_dir, tmp_path_factory):
    provenance = {"base": "org/base", "data": ["gsm8k"], "license": "apache-2.0", "command": "accelerate launch x"}
    to = tmp_path_factory.mktemp("out") / "my draft's"
    sampling = SamplingSettings(0.7, top_p=0.9)
    return export(
        student_dir, target_dir, to, verdict=make_verdict(), curves=CURVES, provenance=provenance, sampling=sampling
    )


def test_the_directory_is_the_student_in_the_targets_dtype(exported, student_dir, target_dir, tokenizer):
    draft = AutoModelForCausalLM.from_pretrained(exported.path, dtype="auto")
    same = AutoModelForCausalLM.from_pretrained(student_dir, dtype=torch.bfloat16)
    assert draft.dtype == torch.bfloat16
    assert exported.dtype == "bfloat16"
    assert torch.equal(logits(draft), logits(same))
    loaded = AutoTokenizer.from_pretrained(exported.path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == TEMPLATE
    assert (draft.config.eos_token_id, draft.config.pad_token_id) == (0, 1)
    assert any("the export was reloaded" in check for check in exported.checks)
    assert [entry.name for entry in exported.path.parent.iterdir()] == [exported.path.name]
    assert exported.path.stat().st_mode & 0o777 == 0o755


def test_the_generation_config_serves_as_measured(exported):
    generation = json.loads((exported.path / "generation_config.json").read_text())
    generation.pop("transformers_version")
    assert generation == {
        "assistant_confidence_threshold": 0.0,
        "do_sample": True,
        "eos_token_id": 0,
        "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "constant",
        "pad_token_id": 1,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
    }


def test_serving_json(exported, target_dir, tokenizer):
    serving = json.loads((exported.path / "serving.json").read_text())
    rows = len(tokenizer) + PADDED_ROWS
    assert (serving["format"], serving["version"]) == ("understudy-serving", 4)
    assert serving["target"] == {"name": "target", "rows": rows, "dtype": "bfloat16", "quantised": False}
    assert (serving["draft"]["name"], serving["draft"]["rows"]) == (exported.path.name, rows)
    assert serving["vocabulary"]["verdict"] == "agree"
    assert (serving["gamma"], serving["gain"]) == (3, True)
    assert serving["gamma_source"] == "the fastest measured at one request at a time"
    assert serving["measured"] == json.loads(json.dumps([row.record() for row in make_verdict().measured]))
    assert serving["run"] == {"1": DRAFT}
    assert list(serving["engines"]) == ["vLLM", "SGLang", "llama.cpp", "transformers", "TensorRT-LLM", "OpenVINO GenAI"]
    assert "temperature > 0" in serving["engines"]["OpenVINO GenAI"]["reasons"][0]
    for engine in list(serving["engines"].values())[:-1]:
        assert engine["ok"], engine["reasons"]
        predicted = {"sample": "2.80", "sample-untruncated": "2.70", "greedy-draft": "2.25"}[engine["rule"]]
        assert f"rule {engine['rule']} at temperature > 0: replay predicts tau {predicted}" in engine["rule_note"]
    assert serving["engines"]["vLLM"]["rule"] == "sample-untruncated"
    assert serving["sampling"] == {"temperature": 0.7, "top_p": 0.9}
    assert serving["files"] == sorted(entry.name for entry in exported.path.iterdir())


def commands_again(directory):
    """The commands as `understudy serve` makes them: from the numbers in serving.json, not from its words."""
    facts = TypeAdapter(EngineFacts).validate_python(json.loads((directory / "serving.json").read_text())["facts"])
    return {name: check(name, facts).command for name in ("vLLM", "SGLang", "TensorRT-LLM", "transformers")}


def test_the_pages_name_what_counts(exported, target_dir):
    card = (exported.path / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["target_model"]) == ("org/base", "target")
    assert (front["datasets"], front["license"]) == (["gsm8k"], "apache-2.0")
    for needle in (
        "0.750 [0.480, 0.520]",
        "3.25 [1.80, 2.00]",
        "**1.50x** [1.40, 1.60]",
        "Run it.",
        "use gamma 3 (the fastest",
    ):
        assert needle in card
    assert "accelerate launch x" in card
    page = (exported.path / "SERVING.md").read_text()
    for engine in exported.engines:
        supports = (
            "does NOT support" if engine.engine == "OpenVINO GenAI" else "supports"
        )  # it serves temperature 0 only
        assert f"## {engine.engine}: {supports} this pair" in page
        assert engine.command in page
    assert str(exported.path) not in page, "the commands survive a move"
    assert 'export DRAFT="$PWD" TARGET=target  # change to the target\'s directory on this machine' in page
    assert '{"temperature": 0.7, "top_p": 0.9}' in page
    assert "tau 2.80" in page
    assert "tau 2.25" in page
    assert page.count("\n") < 140


def test_a_target_that_is_a_file_is_called_a_file(exported):
    """Of a GGUF file the export knows only the name, as of a directory."""
    serving = json.loads((exported.path / "serving.json").read_text())
    page = serving_page(serving | {"target": serving["target"] | {"name": "target-Q4_1.gguf"}})
    assert "TARGET=target-Q4_1.gguf  # change to the target's file on this machine" in page


def test_a_card_names_only_what_the_hub_has(tmp_path, monkeypatch, tiny_run):
    """The hub refuses a card whose `base_model` or `datasets` are no ids of the hub."""
    cached = "/c l'été/datasets--org--set/snapshots/0123abcd"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/sub").mkdir(parents=True)
    config = yaml.safe_load((tiny_run / "config.yaml").read_text())
    for base, name in (("models/my base/final", None), ("/c/models--org--base/snapshots/0123abcd", "org/base")):
        sources = [{"path": path} for path in ("data/sub", "/a/*.jsonl", cached, "org/other", "stdlib", "x y/p.csv")]
        config["student"] = {"init": "pretrained", "path": base}
        config["data"] |= {"train": sources, "heldout": []}
        (tiny_run / "config.yaml").write_text(yaml.safe_dump(config))
        facts = read_run(tiny_run)
        serving = {
            "target": {"name": "final"},
            "draft": {"name": 'l\'été "1"', "parameters": 1, "dtype": "x"},
            "gain": None,
            "gamma": 1,
        }
        card = ModelCard(model_card(serving | {"gamma_source": "-"}, facts.verdict, facts.provenance))
        front = card.data.to_dict()
        assert (front.get("base_model"), front["datasets"]) == (name, ["org/set", "org/other"])
        for one in (*front["datasets"], *filter(None, [name])):
            validate_repo_id(one)
        assert "- training prompts: sub, *.jsonl, org/set, org/other, stdlib, p.csv" in card.text


def test_a_lossy_way_is_called_lossy_on_every_page(tmp_path, student_dir, target_dir):
    price = {"total_variation": 0.05, "total_variation_ci": (0.04, 0.06), "differing": 0.25}
    lossy = timed("draft, LOSSY lenience 2", 3, **price)
    for number, run in enumerate((DRAFT, lossy.way)):
        verdict = make_verdict([timed(DRAFT, 3), lossy], run=run)
        found = export(student_dir, target_dir, tmp_path / str(number), verdict=verdict, curves=CURVES)
        page = (found.path / "SERVING.md").read_text()
        assert "**LOSSY**, so its text is not the target's, and no command below does it" in page
        assert "total variation 0.050 at a drafted token, and 25 % of responses differ" in page
        for text in (page, (found.path / "README.md").read_text(), (found.path / "serving.json").read_text()):
            lines = [line for line in text.splitlines() if "lenience" in line]
            assert lines
            assert all("LOSSY" in line for line in lines)
    assert "Fastest configuration by number of concurrent requests: 1: draft, LOSSY lenience 2." in page


def test_the_transformers_code_runs_without_the_penalties_of_the_targets_file(
    exported, target_dir, tmp_path, capsys, monkeypatch
):
    target = shutil.copytree(target_dir, tmp_path / "target")
    own = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "top_k": 20, "do_sample": True, "eos_token_id": [3]}
    (target / "generation_config.json").write_text(json.dumps(own))
    monkeypatch.setenv("DRAFT", str(exported.path))
    monkeypatch.setenv("TARGET", str(target))
    applied = []
    prepare = GenerationMixin._prepare_generation_config

    def noted(*args, **kwargs):
        prepared = prepare(*args, **kwargs)
        applied.append(prepared[0])
        return prepared

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", noted)
    (snippet,) = (engine.command for engine in exported.engines if engine.engine == "transformers")
    exec(compile(snippet, "snippet", "exec"), {})
    assert capsys.readouterr().out
    used = applied[0]
    assert (used.eos_token_id, used.repetition_penalty, used.no_repeat_ngram_size) == ([0], 1.0, 0)
    assert (used.temperature, used.top_k, used.top_p) == (0.7, 0, 0.9)


def test_an_export_ends_where_the_responses_of_the_run_ended(tmp_path, target_dir, student_dir):
    """The tokenizer ends with token 0; the target's own files name others."""
    target = shutil.copytree(target_dir, tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        known = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(known | {"eos_token_id": 2}))
    report = export(student_dir, target, tmp_path / "out")
    assert json.loads((report.path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    page = (report.path / "SERVING.md").read_text()
    assert 'set `"stop_token_ids": [2, 0]` in each request' in page
    assert "eos_token_id=[2, 0], pad_token_id=2" in page
    assert "stop_token_ids={2, 0}" in page


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows_beyond_target", [-PADDED_ROWS, 0, 24])
def test_padded_rows_are_repaired(tmp_path, target_dir, tokenizer, tied, rows_beyond_target):
    target_rows = len(tokenizer) + PADDED_ROWS
    student = make_llama(target_rows + rows_beyond_target, tied=tied)
    student.save_pretrained(tmp_path / "student")
    report = export(tmp_path / "student", target_dir, tmp_path / "out", dtype="float32")
    assert report.vocabulary.verdict == ("agree" if rows_beyond_target == 0 else "repair")
    draft = AutoModelForCausalLM.from_pretrained(report.path)
    assert draft.config.vocab_size == draft.get_input_embeddings().weight.shape[0] == target_rows
    assert draft.config.tie_word_embeddings == tied
    tokens = len(tokenizer)
    torch.testing.assert_close(logits(draft)[..., :tokens], logits(student)[..., :tokens])
    assert all(engine.ok for engine in report.engines)
    assert "the student has no tokenizer of its own" in report.warnings[0]


def adapted_to(base_dir, rows, modules):
    """The base with so many rows and a random adapter on it."""
    loaded = AutoModelForCausalLM.from_pretrained(base_dir)
    repair_rows(loaded, rows, loaded.config.vocab_size)
    torch.manual_seed(5)
    return get_peft_model(loaded, LoraConfig(r=4, target_modules=modules, init_lora_weights=False)).eval()


@pytest.mark.parametrize("base_rows", [0, PADDED_ROWS])
def test_an_adapter_is_merged(tmp_path, target_dir, tokenizer, base_rows):
    base_dir, adapter_dir = tmp_path / "base", tmp_path / "adapter"
    base = make_llama(len(tokenizer) + base_rows)
    base.save_pretrained(base_dir)
    adapted = adapted_to(base_dir, len(tokenizer) + PADDED_ROWS, "all-linear")
    adapted.save_pretrained(adapter_dir)
    report = export(adapter_dir, target_dir, tmp_path / "out", dtype="float32")
    draft = AutoModelForCausalLM.from_pretrained(report.path)
    # float32: W + BA once against Wx + B(Ax)
    torch.testing.assert_close(logits(draft), logits(adapted), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(draft)[..., : len(tokenizer)], logits(base)[..., : len(tokenizer)], atol=0.1)
    assert not (report.path / "adapter_config.json").exists()
    with pytest.raises(UserError, match="overlaps"):
        export(adapter_dir, target_dir, base_dir / "inside")


def test_an_adapter_on_a_tied_head_is_merged_into_a_head_of_its_own(tmp_path, target_dir, tokenizer):
    base_dir, adapter_dir = tmp_path / "base", tmp_path / "adapter"
    make_llama(len(tokenizer) + PADDED_ROWS).save_pretrained(base_dir)
    adapted = adapted_to(base_dir, len(tokenizer) + PADDED_ROWS, ["q_proj", "lm_head"])
    adapted.save_pretrained(adapter_dir, save_embedding_layers=False)
    report = export(adapter_dir, target_dir, tmp_path / "out", dtype="float32")
    draft = AutoModelForCausalLM.from_pretrained(report.path)
    assert not draft.config.tie_word_embeddings
    torch.testing.assert_close(logits(draft), logits(adapted), atol=1e-4, rtol=1e-4)
    assert any("head and embedding are both exported" in warning for warning in report.warnings)


def test_an_adapter_that_is_kept_apart_finds_its_base_from_where_it_is(tmp_path, student_dir, target_dir, tokenizer):
    base_dir, adapter_dir = tmp_path / "run" / "base", tmp_path / "run" / "adapter"
    make_llama(len(tokenizer) + PADDED_ROWS).save_pretrained(base_dir)
    adapted_to(base_dir, len(tokenizer) + PADDED_ROWS, "all-linear").save_pretrained(adapter_dir)
    export_draft(RunFacts(student_dir, str(target_dir)), tmp_path / "out" / "one", adapter=adapter_dir)
    moved = (tmp_path / "out").rename(tmp_path / "moved") / "one" / "adapter"
    named = json.loads((moved / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == "../../../run/base"
    assert Path(base_of_adapter(moved).path).samefile(base_dir)


def test_an_adapter_without_its_base_is_refused(tmp_path, target_dir):
    (tmp_path / "adapter").mkdir()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(UserError, match="base_model_name_or_path is empty"):
        export(tmp_path / "adapter", target_dir, tmp_path / "out")
    config.write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match=r"its base .*: no config.json there"):
        export(tmp_path / "adapter", target_dir, tmp_path / "out")


def test_without_a_verdict_it_says_not_measured(tmp_path, student_dir, target_dir):
    report = export(student_dir, target_dir, tmp_path / "out")
    serving = json.loads((report.path / "serving.json").read_text())
    assert (serving["measured"], serving["gain"], serving["gamma"]) == (None, None, 4)
    assert "Not measured" in (report.path / "README.md").read_text()
    assert "not measured" in (report.path / "SERVING.md").read_text()


def test_a_long_entry_does_not_bury_the_card(tmp_path, student_dir, target_dir):
    provenance = {"argv": ["train.py", "a b"], "config": "+" * 5000, "commit": "abc"}
    card = (export(student_dir, target_dir, tmp_path / "out", provenance=provenance).path / "README.md").read_text()
    assert "train.py 'a b'" in card
    assert "+++" not in card
    assert "+++" in (tmp_path / "out" / "provenance.json").read_text()


def test_no_gain_is_reported_plainly(tmp_path, student_dir, target_dir):
    verdict = make_verdict([timed(DRAFT, 0, speed_up=1.0)], run=TARGET, pays=False, headline="It cost time.")
    report = export(student_dir, target_dir, tmp_path / "out", verdict=verdict)
    serving = json.loads((report.path / "serving.json").read_text())
    assert (serving["gain"], serving["gamma"]) == (False, 5)
    for page in ("README.md", "SERVING.md"):
        assert "No certain gain" in (report.path / page).read_text()
        assert "It cost time." in (report.path / page).read_text()
    assert "--spec-draft-n-max 5" in (report.path / "SERVING.md").read_text()


def test_every_command_drafts_the_gamma_that_was_timed_as_best_for_one_request(tmp_path, student_dir, target_dir):
    """Whatever is best under load, and whatever was judged or predicted."""
    loaded = [
        timed(DRAFT, 3),
        timed(DRAFT, 1, concurrency=8, speed_up=1.2),
        timed(DRAFT, 1, concurrency=16, speed_up=1.1),
    ]
    report = export(student_dir, target_dir, tmp_path / "out", verdict=make_verdict(loaded, best_gamma=1))
    commands = {one.engine: one.command for one in report.engines}
    given = json.loads(re.search("'({.*})'", commands["vLLM"].split(" --gen")[0].replace("'\"$DRAFT\"'", "d"))[1])
    assert given["num_speculative_tokens"] == 3
    assert given["num_speculative_tokens_per_batch_size"] == [[1, 2, 3], [3, 4096, 1]]
    assert commands_again(report.path).items() <= commands.items()
    for name, flag in (("SGLang", "num-steps 3"), ("llama.cpp", "n-max 3"), ("TensorRT-LLM", "max_draft_len: 3")):
        assert flag in commands[name]
    assert json.loads((report.path / "generation_config.json").read_text())["num_assistant_tokens"] == 3


def test_what_was_measured_of_lookup_is_what_the_commands_start(tmp_path, student_dir, target_dir):
    rows = [
        timed(DRAFT, 3),
        timed(LOOKUP, 7, ngrams=(4, 2)),
        timed(LOOKUP_DRAFT, 7, ngrams=(4, 2), then_gamma=3, then_way=DRAFT),
    ]
    pages = {}
    for run in (LOOKUP_DRAFT, DRAFT):
        report = export(student_dir, target_dir, tmp_path / run, verdict=make_verdict(rows, run), curves=CURVES)
        pages[run] = (report.path / "SERVING.md").read_text()
    assert "--spec-type ngram-simple,draft-simple" in pages[LOOKUP_DRAFT]
    assert "ngram-simple,draft-simple" not in pages[DRAFT]
    assert all('"method":"ngram","num_speculative_tokens":7' in page for page in pages.values())


def test_a_draft_of_one_pass_is_used_token_by_token_by_transformers_at_the_gamma_of_that(
    tmp_path, student_dir, target_dir
):
    marked = shutil.copytree(student_dir, tmp_path / "marked")
    config = json.loads((marked / "config.json").read_text())
    (marked / "config.json").write_text(json.dumps(config | {"pard_token": 3}))
    rows = [timed(DRAFT, 7), timed(BY_TOKEN, 2)]
    for run, gamma, one_pass in ((DRAFT, 7, True), (BY_TOKEN, 2, False)):
        # Where the other way is what should be run, its gamma is the one that is told.
        report = export(marked, target_dir, tmp_path / str(gamma), verdict=make_verdict(rows, run, "parallel"))
        found = {one.engine: one for one in report.engines}
        assert ("parallel_drafting" in found["vLLM"].command) is one_pass
        assert f'"num_speculative_tokens":{gamma}' in found["vLLM"].command
        assert commands_again(report.path)["vLLM"] == found["vLLM"].command
        assert json.loads((report.path / "generation_config.json").read_text())["num_assistant_tokens"] == 2
        assert f"use gamma {gamma} (the fastest measured" in (report.path / "README.md").read_text()


def test_greedy_sampling_and_a_short_context(tmp_path, target_dir, tokenizer):
    make_llama(len(tokenizer) + PADDED_ROWS, context=64).save_pretrained(tmp_path / "student")
    sampling = SamplingSettings(0.0, 5, 0.9)
    report = export(tmp_path / "student", target_dir, tmp_path / "out", sampling=sampling)
    generation = json.loads((report.path / "generation_config.json").read_text())
    assert generation["do_sample"] is False
    assert "temperature" not in generation
    assert any("context is 64 tokens, shorter than the target's" in warning for warning in report.warnings)
    assert all("64" in engine.command for engine in report.engines if engine.engine != "transformers")


def refused(match, **call):
    with pytest.raises(UserError, match=match) as caught:
        export(**call)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("match", "changed"),
    [
        ("no such directory", {"student_dir": "missing"}),
        ("no config.json there", {"student_dir": "empty"}),
        ("target .*no config.json there", {"target_dir": "empty"}),
        ("local directory", {"target_dir": "nobody/nothing"}),
        ("dtype 'int8' is unknown", {"dtype": "int8"}),
        (r"id \d+ is 'A' in the target and 'B' in the draft", {"student_dir": "other"}),
        (r"the draft has only \d+ rows", {"student_dir": "few"}),
        ("cannot write", {"to": "file/out"}),
    ],
)
def test_bad_inputs_are_refused_and_leave_nothing(
    tmp_path, student_dir, target_dir, tokenizer, monkeypatch, match, changed
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    make_tokenizer(swap=True).save_pretrained(shutil.copytree(student_dir, tmp_path / "other"))
    make_llama(len(tokenizer) - 3).save_pretrained(tmp_path / "few")
    call = {"student_dir": student_dir, "target_dir": target_dir, "to": tmp_path / "out" / "x"}
    there = {name for entry in tmp_path.iterdir() if (name := entry.name)}
    own = {
        key: tmp_path / value if value.split("/")[0] in there | {"missing"} else value for key, value in changed.items()
    }
    refused(match, **call | own)
    assert {entry.name for entry in tmp_path.iterdir()} == there
    assert (tmp_path / "file").read_text() == "x"


def test_missing_and_overflowing_weights_are_refused(tmp_path, target_dir, tokenizer):
    from safetensors.torch import load_file, save_file

    model = make_llama(len(tokenizer) + PADDED_ROWS)
    model.save_pretrained(tmp_path / "student")
    weights = load_file(tmp_path / "student" / "model.safetensors")
    call = {"student_dir": tmp_path / "student", "target_dir": target_dir, "to": tmp_path / "out"}
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], 1e30)
    save_file(weights, tmp_path / "student" / "model.safetensors", metadata={"format": "pt"})
    refused("model.norm.weight has values up to 1e.30, too large for float16", **call | {"dtype": "float16"})
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "student" / "model.safetensors", metadata={"format": "pt"})
    refused("model.norm.weight is missing", **call)
    assert not (tmp_path / "out").exists()


def test_only_an_earlier_export_is_overwritten(tmp_path, student_dir, target_dir, tokenizer):
    report = export(student_dir, target_dir, tmp_path / "out")
    refused("--overwrite", student_dir=student_dir, target_dir=target_dir, to=report.path)
    make_llama(len(tokenizer) + PADDED_ROWS, seed=9).save_pretrained(tmp_path / "newer")
    export(tmp_path / "newer", target_dir, report.path, overwrite=True)
    draft = AutoModelForCausalLM.from_pretrained(report.path)
    newer = AutoModelForCausalLM.from_pretrained(tmp_path / "newer", dtype=torch.bfloat16)
    assert torch.equal(logits(draft), logits(newer))


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, student_dir, target_dir, mask):
    with umask(mask):
        to = export(student_dir, target_dir, tmp_path / "draft").path
    assert (to / "model.safetensors").exists()
    assert other_modes(to, mask) == []


def test_a_full_disk_is_one_line_and_leaves_the_earlier_export(tmp_path, student_dir, target_dir, monkeypatch):
    to = export(student_dir, target_dir, tmp_path / "out").path
    before = {entry.name: entry.read_bytes() for entry in to.iterdir()}
    monkeypatch.setattr(export_module, "_write_pages", full_disk)
    refused("No space left", student_dir=student_dir, target_dir=target_dir, to=to, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert before == {entry.name: entry.read_bytes() for entry in to.iterdir()}
