"""Engine rules: each refusal has its reason, each command is what a shell hands to the engine, each number is replay's."""

import json
import re
from contextlib import nullcontext
from dataclasses import asdict, replace

import pytest
import yaml
from engine_facts import DRAFT, GOOD, TARGET, TAUS, calls, options, tensorrt_file
from transformers import CONFIG_MAPPING

from distill.engines.protocol.engine import known_engines
from distill.engines.protocol.facts import EngineFacts, OnePass, _layer_kinds
from distill.engines.protocol.verdict import (
    check,
    check_all,
    check_directory_name,
    others,
    place_of,
    places,
    with_places,
)
from distill.export.facts import _lookups_of
from distill.run.verdict_record import DraftOf, Verdict
from speculative.errors import UserError
from speculative.measure.measured import BY_BLOCK, BY_TOKEN, LOOKUP, LOOKUP_DRAFT, Measured
from speculative.measure.measured import DRAFT as JUDGED
from speculative.rules.sampling import GREEDY, SamplingSettings

FULL, STATE = EngineFacts.FULL, EngineFacts.STATE


def speculative_config(facts):
    return json.loads(options(check("vLLM", facts).command)[1]["--speculative-config"])


def test_every_engine_takes_a_good_pair():
    verdicts = check_all(replace(GOOD, sampling=GREEDY))
    assert [verdict.engine for verdict in verdicts] == list(known_engines())
    assert set(known_engines()) == {"vLLM", "SGLang", "llama.cpp", "transformers", "TensorRT-LLM", "OpenVINO GenAI"}
    for verdict in verdicts:
        assert verdict.ok
        assert verdict.reasons == []
        assert verdict.version
        json.dumps(asdict(verdict))


def test_vllm_drafts_as_replay_says_is_accepted_more_and_both_taus_stand_there():
    verdict = check("vLLM", GOOD)
    words, given = options(verdict.command)
    assert words == ["vllm", "serve", TARGET]
    drawn = {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }
    assert json.loads(given["--speculative-config"]) == drawn
    assert verdict.rule == "sample-untruncated", "vLLM draws drafts at the temperature alone"
    assert "rule sample-untruncated: replay predicts tau 3.63 at gamma 5" in verdict.rule_note.replace(
        " at temperature > 0", ""
    )
    assert check("vLLM", replace(GOOD, sampling=SamplingSettings(0.8))).rule == "sample", "nothing is truncated"
    assert "default, rule greedy-draft) replay predicts tau 2.01" in verdict.notes[0]
    del drawn["draft_sample_method"]
    argmax = replace(GOOD, taus={"sample": 3.0, "sample-untruncated": 2.0, "greedy-draft": 2.01})
    verdict = check("vLLM", argmax)
    assert speculative_config(argmax) == drawn
    assert (verdict.rule, "tau 2.01" in verdict.rule_note) == ("greedy-draft", True)
    assert '"probabilistic"` (rule sample-untruncated) replay predicts tau 2.00' in verdict.notes[0]
    for unknown in (replace(GOOD, taus={}), replace(GOOD, taus={"sample": 3.0}), replace(GOOD, sampling=None)):
        assert speculative_config(unknown) == drawn
    greedy = replace(GOOD, sampling=GREEDY, taus={"greedy": 2.58})
    assert speculative_config(greedy) == drawn
    assert not any("draft_sample_method" in note and "tau" in note for note in check("vLLM", greedy).notes)


def test_openvino_takes_what_it_keeps_the_distribution_of():
    greedy = replace(GOOD, sampling=GREEDY, taus={"greedy": 2.58})
    verdict = check("OpenVINO GenAI", greedy)
    assert (verdict.ok, verdict.rule, "tau 2.58 at gamma 5" in verdict.rule_note) == (True, "greedy", True)
    assert "num_assistant_tokens=5" in verdict.command
    assert check("OpenVINO GenAI", GOOD).reasons == [
        "at temperature > 0 its speculation does not keep the target's distribution; set serving.temperature to 0"
    ]
    assert "8-bit" in check("OpenVINO GenAI", replace(greedy, draft_quantised=True)).reasons[0]


@pytest.mark.parametrize("quantised", [False, True])
def test_sglang_command(quantised):
    words, given = options(check("SGLang", replace(GOOD, target_quantised=quantised)).command)
    assert words == ["python", "-m", "sglang.launch_server"]
    expected = {
        "--model-path": TARGET,
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": DRAFT,
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
        "--sampling-defaults": "openai",
    }
    if quantised:
        expected["--speculative-draft-model-quantization"] = "unquant"
    assert given == expected


LOOKUP_ALONE = Measured(
    LOOKUP, "sample", gamma=9, tau=1.5, tokens_per_second=140.0, speed_up=1.38, speed_up_ci=(1.3, 1.47), ngrams=(4, 2)
)
LOOKUP_AND_DRAFT = replace(LOOKUP_ALONE, way=LOOKUP_DRAFT, gamma=10, then_gamma=3, ngrams=(5, 3), speed_up=1.7)


def test_llama_cpp_chains_lookup_and_the_draft_where_that_was_measured_to_be_best():
    found = check("llama.cpp", replace(GOOD, lookup=LOOKUP_ALONE, lookup_draft=LOOKUP_AND_DRAFT))
    _, given = options(calls_of(found.command))
    assert given["--spec-type"] == "ngram-simple,draft-simple"
    assert (given["--spec-draft-n-max"], given["--spec-ngram-simple-size-n"], given["--spec-ngram-simple-size-m"]) == (
        "3",
        "3",
        "10",
    )
    assert any("measured at 1.70x [1.30, 1.47] the speed of the target alone" in note for note in found.notes)
    alone = check("llama.cpp", replace(GOOD, lookup=LOOKUP_ALONE))
    assert "ngram" not in alone.command


def calls_of(command):
    """The last line alone: what starts the server."""
    return command.splitlines()[-1]


def test_lookup_without_a_draft_is_reported_at_the_timed_setting():
    line = others(replace(GOOD, lookup=LOOKUP_ALONE))[-1]
    command = re.search("`(vllm .*?)`", line)[1]
    _, given = options(command)
    assert json.loads(given["--speculative-config"]) == {
        "method": "ngram",
        "num_speculative_tokens": 9,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    assert "measured at 1.38x [1.30, 1.47]" in line
    assert "--spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 9" in line
    assert json.loads(given["--override-generation-config"]) == {"temperature": 0.8, "top_p": 0.95}
    assert "prompt_lookup_num_tokens=9, max_matching_ngram_size=4" in line
    assert "lookup+draft" not in line
    assert "lookup+draft" in others(replace(GOOD, lookup=LOOKUP_ALONE, lookup_draft=LOOKUP_AND_DRAFT))[-1]
    assert not any("Prompt lookup" in other for other in others(GOOD))


@pytest.mark.parametrize(
    ("run", "drafting", "then_way", "usable"),
    [
        (LOOKUP_DRAFT, "autoregressive", JUDGED, True),
        (LOOKUP_DRAFT, "autoregressive", "draft in int8", True),
        (JUDGED, "autoregressive", JUDGED, False),
        (LOOKUP_DRAFT, "autoregressive", BY_BLOCK, False),
        (LOOKUP_DRAFT, "parallel", JUDGED, False),
        (LOOKUP_DRAFT, "parallel", BY_TOKEN, True),
    ],
)
def test_what_a_verdict_says_of_lookup(run, drafting, then_way, usable):
    """llama.cpp drafts token by token: a block drafted in one pass after the lookup is nothing for it."""
    lookup_draft = replace(LOOKUP_AND_DRAFT, then_way=then_way)
    drafts = [DraftOf(way=JUDGED, drafting=drafting)]
    verdict = Verdict.model_construct(measured=[LOOKUP_ALONE, lookup_draft], drafts=drafts, run={"1": run})
    assert _lookups_of(verdict) == {"lookup": LOOKUP_ALONE, "lookup_draft": lookup_draft if usable else None}
    assert _lookups_of(None) == {}
    nothing = Verdict.model_construct(measured=[], drafts=[], run={})
    assert _lookups_of(nothing) == {"lookup": None, "lookup_draft": None}


def test_llama_cpp_commands():
    convert_target, convert_draft, serve = calls(check("llama.cpp", GOOD).command)
    convert = ["python", "/src/llama.cpp/convert_hf_to_gguf.py"]
    assert convert_target == [*convert, TARGET, "--outfile", f"{DRAFT}-target.gguf"]
    assert convert_draft == [*convert, DRAFT, "--outfile", f"{DRAFT}.gguf"]
    start = ["llama-server", "-m", f"{DRAFT}-target.gguf", "-md", f"{DRAFT}.gguf", "--spec-type", "draft-simple"]
    settings = ["--temp", "0.8", "--top-k", "0", "--top-p", "0.95", "--min-p", "0.0"]
    # Its own order truncates first and heats after: another distribution than the one that was measured.
    order = ["--samplers", "temperature;top_k;top_p;min_p", "--repeat-penalty", "1.0"]
    assert serve == [*start, "--spec-draft-n-max", "5", *settings, *order]
    greedy = calls(check("llama.cpp", replace(GOOD, sampling=GREEDY)).command)[-1]
    assert greedy == [*start, "--spec-draft-n-max", "5", "--temp", "0", "--repeat-penalty", "1.0"], (
        "the converter keeps the target's penalty"
    )


def test_llama_cpp_converts_the_draft_only_if_the_target_is_a_gguf_file():
    convert_draft, serve = calls(check("llama.cpp", replace(GOOD, target="some.gguf")).command)
    assert convert_draft[2:] == [DRAFT, "--outfile", f"{DRAFT}.gguf"]
    assert serve[:5] == ["llama-server", "-m", TARGET, "-md", f"{DRAFT}.gguf"]


def test_transformers_code_compiles_and_serves_as_measured():
    verdict = check("transformers", GOOD)
    assert verdict.language == "python"
    compile(verdict.command, "snippet", "exec")
    assert "do_sample=True, temperature=0.8, top_k=0, top_p=0.95, min_p=None)" in verdict.command
    assert "do_sample=False)" in check("transformers", replace(GOOD, sampling=GREEDY)).command
    alone = with_places(verdict.command, verdict.language, DRAFT, TARGET)
    assert f"DRAFT, TARGET = {DRAFT!r}, {TARGET!r}" in alone


def test_a_target_of_a_revision_is_fetched_and_named_by_its_folder() -> None:
    verdict = check("transformers", GOOD)
    code = with_places(verdict.command, verdict.language, DRAFT, "org/t", "v 1")
    assert "snapshot_download('org/t', revision='v 1')" in code
    compile(code, "snippet", "exec")
    fetched = """TARGET="$(hf download org/t --revision 'v 1' --quiet)\""""
    assert fetched in with_places("serve", "bash", DRAFT, "org/t", "v 1")
    assert places("d", place_of("/local/model", "v1")) == places("d", "/local/model")


def test_tensorrt_llm_command_and_file(tmp_path):
    serve, file = tensorrt_file(GOOD, tmp_path)
    assert serve == ["trtllm-serve", TARGET, "--config", "tensorrt_llm.yaml"]
    assert file == {
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": DRAFT},
        "disable_overlap_scheduler": True,
    }
    assert any("use_rejection_sampling" in note and "tau 3.70" in note for note in check("TensorRT-LLM", GOOD).notes)


def test_the_measured_settings_are_in_every_command_that_has_a_flag():
    given = options(check("vLLM", GOOD).command)[1]
    assert given["--generation-config"] == "vllm"
    assert json.loads(given["--override-generation-config"]) == {"temperature": 0.8, "top_p": 0.95}
    given = options(check("vLLM", replace(GOOD, sampling=GREEDY)).command)[1]
    assert json.loads(given["--override-generation-config"]) == {"temperature": 0.0}
    mlx = re.search("`(mlx.*?)`", others(GOOD)[0])[1]
    (words,) = calls(mlx)
    settings = ["--temp", "0.8", "--top-p", "0.95"]
    assert words == ["mlx_lm.server", "--model", TARGET, "--draft-model", DRAFT, "--num-draft-tokens", "5", *settings]
    unknown = replace(GOOD, sampling=None)
    assert not any(
        word in verdict.command for verdict in check_all(unknown) for word in ("--temp", "temperature", "sampling")
    )


def test_a_draft_of_a_shorter_context_caps_the_server(tmp_path):
    short = replace(GOOD, draft_context=2048)
    flags = {
        "vLLM": "--max-model-len",
        "SGLang": "--context-length",
        "TensorRT-LLM": "--max_seq_len",
        "llama.cpp": "-c",
    }
    for engine, flag in flags.items():
        words = calls(check(engine, short).command, cwd=tmp_path)[-1]
        assert words[words.index(flag) + 1] == "2048"
        assert flag not in calls(check(engine, GOOD).command, cwd=tmp_path)[-1]


def test_a_command_finds_the_pair_wherever_the_directory_lies(tmp_path):
    for verdict in check_all(GOOD):
        assert DRAFT not in verdict.command
        assert TARGET not in verdict.command
    moved = tmp_path / "it's $moved"
    moved.mkdir()
    (words,) = calls(places('"$PWD"', "org/t") + "\n" + check("vLLM", GOOD).command, cwd=moved)
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(moved)
    assert words[2] == "org/t"
    (words,) = calls(with_places(check("vLLM", GOOD).command, "bash", "/elsewhere/a b", "/t"), "", "")
    assert words[2] == "/t"
    assert '"model":"/elsewhere/a b"' in words[4]


def refusing(**changes):
    """The engines that have a reason that they do not have for GOOD."""
    found = {verdict.engine: set(verdict.reasons) for verdict in check_all(replace(GOOD, **changes))}
    return {name for name, reasons in found.items() if reasons - set(check(name, GOOD).reasons)}


def test_rows_must_be_equal_except_for_llama_cpp():
    everyone = set(known_engines())
    assert refusing(draft_rows=4097) == everyone - {"llama.cpp"}
    assert refusing(draft_rows=4096 + 128) == everyone - {"llama.cpp"}
    assert refusing(draft_rows=4096 + 129) == everyone
    assert refusing(draft_rows=4096 - 129) == everyone
    assert "4097 draft rows and 4096 target rows" in check("vLLM", replace(GOOD, draft_rows=4097)).reasons[0]


def test_token_strings_must_be_equal_and_llama_cpp_looks_from_5():
    assert refusing(first_difference=(3, "a", "b")) == set(known_engines()) - {"llama.cpp"}
    difference = (7, "a", None)
    assert refusing(first_difference=difference, first_difference_from_5=difference) == set(known_engines())
    reason = check("SGLang", replace(GOOD, first_difference=difference)).reasons[0]
    assert "id 7" in reason
    assert "'a'" in reason
    assert "None" in reason


WINDOW, OTHER = "a window of 512 tokens", "a window of 64 tokens"


@pytest.mark.parametrize(
    ("target", "draft", "off", "refused", "threads"),
    [
        ((FULL,), (FULL,), False, False, ()),
        ((FULL,), (FULL, WINDOW), True, False, ("vllm#46032", "vllm#50169")),
        ((FULL, WINDOW), (FULL, WINDOW), True, False, ("vllm#46032", "vllm#50169")),
        ((FULL, WINDOW), (WINDOW,), True, False, ("vllm#46032", "vllm#50169")),
        ((FULL,), (WINDOW,), False, False, ("vllm#46032", "vllm#50169")),
        ((FULL, WINDOW), (FULL,), False, False, ()),
        ((FULL, OTHER), (FULL, WINDOW), True, True, ("vllm#46032", "vllm#50169")),
        ((FULL, STATE), (FULL,), False, False, ("vllm#43626", "vllm#57721", "TensorRT-LLM#18449")),
        ((FULL, STATE), (FULL, STATE), True, True, ("vllm#49112",)),
        ((FULL, STATE), (FULL, WINDOW), True, True, ("vllm#46032",)),
    ],
)
def test_drafts_that_vllm_may_not_start_with(target, draft, off, refused, threads):
    """As vLLM 0.32 groups these layers (get_kv_cache_groups), with its hybrid cache manager and without."""
    facts = replace(GOOD, layers={"target": target, "draft": draft})
    found = check("vLLM", facts)
    assert ("--disable-hybrid-kv-cache-manager" in calls(found.command)[-1]) == off
    assert (not found.ok) == refused
    said = " ".join(line for one in check_all(facts) for line in (*one.reasons, *one.warnings))
    assert {thread for thread in THREADS if thread in said} >= set(threads)
    assert bool(threads) or not any(thread in said for thread in THREADS)
    for line in (*found.reasons, *found.warnings):
        assert re.search(r"2026-\d\d-\d\d", line), "a thread has a date"


THREADS = ("vllm#46032", "vllm#50169", "vllm#43626", "vllm#57721", "vllm#49112", "TensorRT-LLM#18449")


@pytest.mark.parametrize(
    ("kind", "fields", "kinds"),
    [
        ("llama", {}, (FULL,)),
        ("mistral", {"sliding_window": 16}, ("a window of 16 tokens",)),
        ("gemma2", {"sliding_window": 16}, ("a window of 16 tokens", FULL)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            ("a window of 16 tokens", FULL),
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, (FULL,)),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, (STATE, FULL)),
        ("falcon_h1", {}, (STATE, FULL)),
        ("mamba", {}, (STATE,)),
    ],
)
def test_kinds_of_layers_by_the_config(kind, fields, kinds):
    assert _layer_kinds(CONFIG_MAPPING[kind](num_hidden_layers=2, **fields)) == tuple(sorted(kinds))


def test_rules_of_single_engines():
    assert refusing(differences={"added": "x"}) == {"SGLang"}
    assert refusing(differences={"ends": "x"}) == {"llama.cpp"}
    assert refusing(differences={"kind": "x"}) == {"llama.cpp"}
    assert refusing(draft="/models/My-EAGLE3-draft") == {"vLLM"}
    assert refusing(sampling=SamplingSettings(0.8, min_p=0.05)) == {"vLLM"}
    assert refusing(sampling=SamplingSettings(0.0, min_p=0.05)) == set()


def test_each_engine_says_its_rule_and_what_replay_predicts_for_it():
    drafting_argmax = replace(GOOD, taus=TAUS | {"sample-untruncated": 1.9})
    rules = {verdict.engine: verdict.rule for verdict in check_all(drafting_argmax)}
    assert rules == {
        "vLLM": "greedy-draft",
        "SGLang": "greedy-draft",
        "llama.cpp": "greedy-draft",
        "transformers": "sample",
        "TensorRT-LLM": "greedy-draft",
        "OpenVINO GenAI": "greedy",
    }
    assert "temperature 0" in check("OpenVINO GenAI", drafting_argmax).rule_note
    for verdict in (one for one in check_all(drafting_argmax) if one.ok):
        expected = drafting_argmax.taus[verdict.rule]
        assert (
            f"rule {verdict.rule} at temperature > 0: replay predicts tau {expected:.2f} at gamma 5"
            in verdict.rule_note
        )
    for verdict in check_all(replace(GOOD, sampling=GREEDY, taus={"greedy": 2.58}, measured_rule="greedy")):
        assert (verdict.rule, "temperature 0: replay predicts tau 2.58" in verdict.rule_note) == ("greedy", True)
    assert "--rule greedy-draft" in check("SGLang", replace(GOOD, taus={})).rule_note
    assert "the rule of the run's verdict" in check("transformers", replace(GOOD, taus={})).rule_note
    assert "was not measured" in check("vLLM", replace(GOOD, taus={}, measured_rule=None)).rule_note


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *(
            (path, "vLLM")
            for path in ("/m/eagle-draft", "/m/Eagle3/x", "/DFlash/x", "runs/my_dspark2", "/home/EAGLE-x/out")
        ),
        *((path, "JSON cannot hold") for path in ('/m/a"b', "/m/a\\b")),
        *((path, None) for path in ("/m/draft", "/m/eagle/draft", "runs/flash", "/home/beagle/x")),
    ],
)
def test_paths_that_no_engine_serves_are_refused(path, fault):
    """vLLM selects another method by a word in the path."""
    with pytest.raises(UserError, match=fault) if fault else nullcontext():
        check_directory_name(path)


def test_a_draft_of_one_pass_where_the_engine_has_it_and_token_by_token_elsewhere():
    facts = replace(
        GOOD, one_pass=OnePass(4095, 7, {"sample-untruncated": 3.9, "greedy-draft": 3.1}), gamma_by_load=((1, 8, 5),)
    )
    found = {verdict.engine: verdict for verdict in check_all(facts)}
    spoken = speculative_config(facts)
    assert (spoken["parallel_drafting"], spoken["num_speculative_tokens"]) == (True, 7)
    assert "replay predicts tau 3.90 at gamma 7" in found["vLLM"].rule_note
    written = yaml.safe_load(found["TensorRT-LLM"].command.split("EOF\n")[1])["speculative_config"]
    assert (written["decoding_type"], written["mask_token_id"], written["max_draft_len"]) == ("PARD", 4095, 7)
    for name in ("SGLang", "llama.cpp"):
        assert found[name].command == check(name, replace(GOOD, gamma_by_load=())).command
    assert "parallel_drafting" not in check("vLLM", GOOD).command
