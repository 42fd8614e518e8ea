"""serving.engine: the rule that it gives a run, what it refuses before anything is spent, and that programs ask it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tiny_training import run_config, small_config, write_target

from distill import train
from distill.config.command_line import TrainOptions
from distill.config.layout import CONFIG, RESULT
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.protocol.engine import known_engines
from distill.engines.protocol.serving_engine import for_engine
from distill.faults import MISTAKE
from distill.respond import run as respond
from distill.run.result import Result
from distill.verdict.conclusion import other_rules
from speculative.measure.measured import DRAFT

PLAIN, CUT, GREEDY = {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0}
# Key -> the rules at temperature > 0, and those where top-p cuts the distribution; the default first.
RULES = {
    "vllm": (["greedy-draft", "sample", "block"], ["greedy-draft", "sample-untruncated"]),
    "sglang": (["greedy-draft"],) * 2,
    "llama.cpp": (["greedy-draft"],) * 2,
    "transformers": (["sample"],) * 2,
    "tensorrt-llm": (["greedy-draft", "sample"],) * 2,
}


def config_for(engine: str, serving: dict[str, Any], **sections: Any) -> RunConfig:
    return run_config(Path("runs"), serving={"engine": engine, **serving}, **sections)


@pytest.mark.parametrize("engine", RULES)
def test_an_engine_gives_the_run_its_rule_and_takes_only_its_own(engine: str) -> None:
    for serving, expected in zip((PLAIN, CUT), RULES[engine], strict=True):
        derived = for_engine(config_for(engine, serving))
        assert derived.serving.rule == derived.judge_rule.name == expected[0]
        assert for_engine(derived) == derived, "a run's own config is not changed"
        for rule in ("sample", "sample-untruncated", "greedy-draft", "block"):
            for key in ("serving.rule", "judge.rule"):
                sections = {"judge": {"rule": rule}} if key == "judge.rule" else {}
                config = config_for(engine, serving | ({} if sections else {"rule": rule}), **sections)
                if rule in expected:
                    assert for_engine(config).judge_rule.name == rule
                else:
                    told = refused(for_engine, config)
                    assert f"{key}: {rule}, but" in told
                    assert f"accepts by {' or '.join(expected)} at these settings" in told
    assert for_engine(config_for(engine, GREEDY)).judge_rule.name == "greedy"


def test_every_engine_is_in_the_table_and_in_the_keys_meaning() -> None:
    keys = {engine.key for engine in known_engines().values()}
    assert keys == {*RULES, "openvino"}
    meaning = RunConfig.model_fields["serving"].annotation.model_fields["engine"].description  # type: ignore[union-attr]
    assert all(key in meaning for key in keys)


def test_the_training_page_lists_the_rules_of_every_engine() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    engines = {engine.key: engine for engine in known_engines().values()}
    for key, engine in engines.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{key}`" in line)
        assert set(re.findall("`([^`]+)`", row)) - set(engines) == {*engine.rules, *engine.truncated_rules} - {"greedy"}


def test_without_an_engine_a_config_stays_as_it_is() -> None:
    config = run_config(Path("runs"), serving=CUT)
    assert for_engine(config) is config
    assert config.judge_rule.name == "sample"


def test_the_rule_sets_the_default_objective() -> None:
    objectives = {
        engine: for_engine(config_for(engine, CUT, loss={"name": None})).objective_names()
        for engine in ("vllm", "transformers")
    }
    assert objectives == {"vllm": {"lk_hybrid"}, "transformers": {"jsd"}}


@pytest.mark.parametrize(
    ("engine", "serving", "sections", "told"),
    [
        ("vlm", PLAIN, {}, "serving.engine: unknown engine 'vlm': did you mean `vllm`?"),
        ("openvino", PLAIN, {}, "set serving.temperature to 0"),
        ("openvino", GREEDY, {"export": {"quantize": "int8"}}, "does not read 8-bit weights"),
        ("vllm", PLAIN | {"min_p": 0.1}, {}, "vLLM refuses min_p with speculation"),
        ("vllm", PLAIN, {"name": "my-eagle-run"}, "path with 'eagle-' in it"),
        ("llama.cpp", PLAIN, {"student": {"parallel": {}}}, "it drafts token by token; leave student.parallel out"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused(
    engine: str, serving: dict[str, Any], sections: dict[str, Any], told: str
) -> None:
    message = refused(for_engine, config_for(engine, serving, **sections))
    assert told in message
    assert "\n" not in message


def test_a_pair_that_the_engine_cannot_serve_stops_the_run_before_any_response(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_target(tmp_path / "target", head_dim=6)
    path = small_config(tmp_path, serving={"engine": "vllm"}, train={"steps": 2})
    assert train.command(TrainOptions(path, [])) == MISTAKE
    told = capsys.readouterr().err
    assert "serving.engine: vLLM cannot serve this run: config.json: head_dim 6 in the target" in told
    assert not (tmp_path / "small" / "responses" / "train").exists()


def test_answers_made_before_training_belong_to_the_same_run(tmp_path: Path) -> None:
    path = small_config(tmp_path, serving={"engine": "vllm"})
    respond(path)
    config = load_config(tmp_path / "small" / "config.yaml")
    assert (config.serving.engine, config.serving.rule) == ("vllm", "greedy-draft")
    assert config == for_engine(load_config(path))


def test_the_verdict_has_the_tau_of_the_engines_other_rules_where_it_differs(tiny_run: Path) -> None:
    result, config = Result.read(tiny_run / RESULT), load_config(tiny_run / CONFIG, ["serving.engine=vllm"])
    assert result.curves is not None
    taus = result.curves.taus_at(result.verdict.gamma, DRAFT)
    rule, gamma = result.verdict.rule, result.verdict.gamma
    apart = [of for of in RULES["vllm"][0] if abs(taus[of] / taus[rule] - 1) > 0.02]
    assert other_rules(config, result.verdict, result.curves) == [
        f"vLLM can also accept by rule {of}: tau {taus[of]:.2f} at gamma {gamma}, {taus[rule]:.2f} by {rule}."
        for of in apart
    ]
    assert apart, "argmax and sampled drafts are accepted differently here"
    alone = config.model_copy(update={"serving": config.serving.model_copy(update={"engine": None})})
    assert other_rules(alone, result.verdict, result.curves) == []
