"""Engine rules: each refusal has its reason, each command parses back to what it should say."""

import json
import shlex
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import yaml

from distill.export.engines import (
    ENGINES,
    EngineFacts,
    check,
    check_all,
    check_directory_name,
    gather_facts,
    rerouted_word,
)
from speculative.errors import UserError

GOOD = EngineFacts(
    target="org/target-8b",
    draft="/models/my draft's $HOME",
    gamma=5,
    target_rows=4096,
    draft_rows=4096,
    first_difference=None,
    first_difference_from_5=None,
    added_tokens_equal=True,
    bos_eos_equal=True,
    tokenizer_kind_equal=True,
    target_quantised=False,
    measured_rule="sample",
)


def options(command):
    """A shell command as (words before the first option, {option: value})."""
    words = shlex.split(command)
    first = next(i for i, word in enumerate(words) if word.startswith("--"))
    pairs = words[first:]
    assert len(pairs) % 2 == 0
    return words[:first], dict(zip(pairs[::2], pairs[1::2], strict=True))


def test_every_engine_takes_a_good_pair():
    verdicts = check_all(GOOD)
    assert [verdict.engine for verdict in verdicts] == list(ENGINES)
    assert set(ENGINES) == {"vLLM", "SGLang", "llama.cpp", "transformers", "TensorRT-LLM"}
    for verdict in verdicts:
        assert verdict.ok
        assert verdict.reasons == []
        json.dumps(asdict(verdict))


def test_vllm_command():
    verdict = check("vLLM", GOOD)
    words, given = options(verdict.command)
    assert words == ["vllm", "serve", GOOD.target]
    assert json.loads(given["--speculative-config"]) == {
        "method": "draft_model",
        "model": GOOD.draft,
        "num_speculative_tokens": 5,
    }
    sampled = next(note for note in verdict.notes if "probabilistic" in note)
    words = shlex.split(sampled[sampled.index("--speculative-config") :])
    assert json.loads(words[1])["draft_sample_method"] == "probabilistic"


@pytest.mark.parametrize("quantised", [False, True])
def test_sglang_command(quantised):
    words, given = options(check("SGLang", replace(GOOD, target_quantised=quantised)).command)
    assert words == ["python", "-m", "sglang.launch_server"]
    expected = {
        "--model-path": GOOD.target,
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": GOOD.draft,
        "--speculative-num-steps": "5",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6",
    }
    if quantised:
        expected["--speculative-draft-model-quantization"] = "unquant"
    assert given == expected


def test_llama_cpp_commands():
    convert_target, convert_draft, serve = map(shlex.split, check("llama.cpp", GOOD).command.splitlines())
    assert convert_target[:4] == ["python", "convert_hf_to_gguf.py", GOOD.target, "--outfile"]
    assert convert_draft[:4] == ["python", "convert_hf_to_gguf.py", GOOD.draft, "--outfile"]
    assert convert_target[4] != convert_draft[4]
    assert serve == (
        [
            "llama-server",
            "-m",
            convert_target[4],
            "-md",
            convert_draft[4],
            "--spec-type",
            "draft-simple",
            "--spec-draft-n-max",
            "5",
        ]
    )


def test_transformers_code_compiles_and_fixes_gamma():
    verdict = check("transformers", GOOD)
    assert verdict.language == "python"
    compile(verdict.command, "snippet", "exec")
    assert repr(GOOD.draft) in verdict.command
    assert "num_assistant_tokens = 5" in verdict.command


def test_tensorrt_llm_command_and_file():
    verdict = check("TensorRT-LLM", GOOD)
    words, given = options(verdict.command)
    assert words == ["trtllm-serve", GOOD.target]
    (name, text) = next(iter(verdict.files.items()))
    assert given["--config"] == f"{GOOD.draft}/{name}"
    assert yaml.safe_load(text) == {
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 5, "speculative_model": GOOD.draft},
        "disable_overlap_scheduler": True,
    }


def refusing(**changes):
    return {verdict.engine for verdict in check_all(replace(GOOD, **changes)) if not verdict.ok}


def test_rows_must_be_equal_except_for_llama_cpp():
    everyone = set(ENGINES)
    assert refusing(draft_rows=4097) == everyone - {"llama.cpp"}
    assert refusing(draft_rows=4096 + 128) == everyone - {"llama.cpp"}
    assert refusing(draft_rows=4096 + 129) == everyone
    assert refusing(draft_rows=4096 - 129) == everyone
    assert "4097 draft rows and 4096 target rows" in check("vLLM", replace(GOOD, draft_rows=4097)).reasons[0]


def test_token_strings_must_be_equal_and_llama_cpp_looks_from_5():
    assert refusing(first_difference=(3, "a", "b")) == set(ENGINES) - {"llama.cpp"}
    difference = (7, "a", None)
    assert refusing(first_difference=difference, first_difference_from_5=difference) == set(ENGINES)
    reason = check("SGLang", replace(GOOD, first_difference=difference)).reasons[0]
    assert "id 7" in reason
    assert "'a'" in reason
    assert "None" in reason


def test_rules_of_single_engines():
    assert refusing(added_tokens_equal=False) == {"SGLang"}
    assert refusing(bos_eos_equal=False) == {"llama.cpp"}
    assert refusing(tokenizer_kind_equal=False) == {"llama.cpp"}
    assert refusing(draft="/models/My-EAGLE3-draft") == {"vLLM"}


def test_each_engine_says_which_measured_rule_counts():
    rules = {verdict.engine: verdict.rule_at_temperature for verdict in check_all(GOOD)}
    assert rules == {
        "vLLM": "greedy-draft",
        "SGLang": "sample",
        "llama.cpp": "greedy-draft",
        "transformers": "sample",
        "TensorRT-LLM": "greedy-draft",
    }
    assert "number to expect at temperature > 0" in check("SGLang", GOOD).rule_note
    assert "--rule greedy-draft" in check("vLLM", GOOD).rule_note
    assert "number to expect at temperature 0" in check("vLLM", replace(GOOD, measured_rule="greedy")).rule_note
    assert "nothing was measured" in check("vLLM", replace(GOOD, measured_rule=None)).rule_note


def test_an_unknown_engine_is_refused():
    with pytest.raises(UserError, match="unknown engine 'vllm'"):
        check("vllm", GOOD)


@pytest.mark.parametrize("path", ["/m/eagle-draft", "/m/Eagle3/x", "/DFlash/x", "runs/my_dspark2", "/home/EAGLE-x/out"])
def test_names_that_vllm_reroutes_are_refused(path):
    assert rerouted_word(path) is not None
    with pytest.raises(UserError, match="vLLM"):
        check_directory_name(path)


@pytest.mark.parametrize("path", ["/m/draft", "/m/eagle/draft", "runs/flash", "/home/beagle/x"])
def test_other_names_pass(path):
    check_directory_name(path)
    assert rerouted_word(path) is None


class Vocabulary:
    """As much of a tokenizer as the facts need."""

    def __init__(self, words, added=(), bos_token_id=0, eos_token_id=1):
        self.words, self.added = words, added
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id

    def get_vocab(self):
        return {word: i for i, word in enumerate([*self.words, *self.added])}

    def get_added_vocab(self):
        return {word: len(self.words) + i for i, word in enumerate(self.added)}


def config(rows, **fields):
    made = SimpleNamespace(vocab_size=rows, **fields)
    made.get_text_config = lambda: made
    return made


def facts_of(target_tokenizer, draft_tokenizer, **target_fields):
    return gather_facts(
        target="t",
        draft="/d",
        gamma=3,
        target_config=config(12, **target_fields),
        target_tokenizer=target_tokenizer,
        draft_config=config(10),
        draft_tokenizer=draft_tokenizer,
        measured_rule="greedy",
    )


def test_facts_of_equal_tokenizers():
    facts = facts_of(Vocabulary("abcdefgh"), Vocabulary("abcdefgh"))
    assert (facts.target_rows, facts.draft_rows, facts.measured_rule) == (12, 10, "greedy")
    assert facts.first_difference is None
    assert facts.first_difference_from_5 is None
    assert facts.added_tokens_equal
    assert facts.bos_eos_equal
    assert facts.tokenizer_kind_equal
    assert not facts.target_quantised


def test_facts_of_different_tokenizers():
    facts = facts_of(
        Vocabulary("abcdefgh", added=["<x>"]), Vocabulary("aBcdefgh", eos_token_id=2), quantization_config={"bits": 4}
    )
    assert facts.first_difference == (1, "b", "B")
    assert facts.first_difference_from_5 == (8, "<x>", None)
    assert not facts.added_tokens_equal
    assert not facts.bos_eos_equal
    assert facts.target_quantised
