"""One gamma and one table of gammas by load: on every page, in every command, in what `serve` starts and in what readback expects."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter
from test_export import PADDED_ROWS, export, make_llama, make_tokenizer, make_verdict, timed

from distill.commands.options import ServeOptions
from distill.commands.readback.options import ReadbackOptions
from distill.commands.readback.source import _gammas
from distill.commands.serve import engine_words, read_export
from distill.config.layout import best_student
from distill.engines.protocol.facts import EngineFacts
from distill.engines.protocol.verdict import check
from distill.export.load_table import gamma_plan
from distill.models.target import load_target_side
from distill.verdict.conclusion import serve_commands
from speculative.measure.engine_costs import EngineCosts, ratios_of, step_costs
from speculative.measure.measured import DRAFT, TARGET
from speculative.rules.sampling import SamplingSettings


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target, and a run whose best checkpoint is a student of it."""
    folder, tokenizer = tmp_path_factory.mktemp("pair"), make_tokenizer()
    rows = len(tokenizer) + PADDED_ROWS
    for name, model in (
        (folder / "target", make_llama(rows, layers=2, seed=1)),
        (best_student(folder), make_llama(rows)),
    ):
        model.to(torch.bfloat16).save_pretrained(name)
        tokenizer.save_pretrained(name)
    return folder


@pytest.mark.parametrize(
    ("measured", "gamma", "table"),
    [
        ({4: 3, 16: 2}, 3, [[1, 7, 3], [8, 4096, 2]]),  # one request at a time was not timed
        ({1: 3, 4: 1}, 3, [[1, 1, 3], [2, 4096, 1]]),
        ({1: 5, 4: 6, 16: 1}, 5, [[1, 7, 5], [8, 4096, 1]]),
        ({1: 0, 4: 2}, 2, [[1, 1, 0], [2, 4096, 2]]),  # it pays only from 2 requests on
    ],
)
def test_one_table_of_gammas_everywhere(tmp_path, pair, monkeypatch, measured, gamma, table):
    rows = [timed(DRAFT, one, concurrency=load, speed_up=1.4 if one else 0.9) for load, one in measured.items()]
    verdict = make_verdict(rows, run=TARGET if measured.get(1) == 0 else DRAFT)
    report = export(best_student(pair), pair / "target", tmp_path / "out", verdict=verdict)
    serving = json.loads((report.path / "serving.json").read_text())
    assert serving["gamma"] == serving["facts"]["gamma"] == gamma
    assert serving["gamma_by_load"] == serving["facts"]["gamma_by_load"] == table
    page = (report.path / "SERVING.md").read_text()
    assert f"draft gamma = {gamma} tokens" in page
    assert f"measured on the run's machine): {EngineFacts.load_words(table)}." in page
    assert f"use gamma {gamma} (" in (report.path / "README.md").read_text()
    assert json.loads((report.path / "generation_config.json").read_text())["num_assistant_tokens"] == gamma

    program = tmp_path / "vllm"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = engine_words(
        ServeOptions(report.path, engine="vllm", target=str(pair / "target")),
        *read_export(report.path),
        str(pair / "target"),
    )[1]
    started = json.loads(words[words.index("--speculative-config") + 1])
    written = [[first, last, at or 1] for first, last, at in table]  # a row of 0 waits for a readback
    assert (started["num_speculative_tokens"], started["num_speculative_tokens_per_batch_size"]) == (gamma, written)

    target = SimpleNamespace(side=load_target_side(str(pair / "target")))
    facts = TypeAdapter(EngineFacts).validate_python(serving["facts"])
    for commands in (
        {one.engine: one.command for one in report.engines},
        {name: check(name, facts).command for name in serving["engines"]},
        {one.engine: one.command for one in serve_commands(pair, target, verdict, SamplingSettings(), None)},
    ):
        schedule = json.dumps(written, separators=(",", ":"))
        assert f'"num_speculative_tokens":{gamma},' in commands["vLLM"]
        assert f'"num_speculative_tokens_per_batch_size":{schedule}' in commands["vLLM"]
        assert f"--speculative-num-steps {gamma} " in commands["SGLang"]
        assert f"--spec-draft-n-max {gamma}" in commands["llama.cpp"]
        assert f"max_draft_len: {gamma}\n" in commands["TensorRT-LLM"]

    for load, expected in ((1, gamma), (500, table[-1][2])):
        options = ReadbackOptions("http://127.0.0.1:1", tmp_path, concurrency=load)
        assert _gammas(options, None, verdict, SimpleNamespace(drafting="autoregressive"))[0] == expected


def test_the_engine_that_was_timed_has_its_own_gammas_on_every_page(tmp_path, pair):
    """vLLM was timed: its command has the gammas that its step times give; those of the other engines are the verdict's."""
    seconds = {(n, gamma): 0.01 * (1 + 0.05 * n * (gamma + 1)) + 0.002 * gamma for n in (1, 16) for gamma in (0, 1, 4)}
    costs = step_costs(seconds, parallel=False)
    ratios = {one.batch_size: ratios_of(one, [one, one]) for one in costs}
    engine = EngineCosts(format=1, engine="vLLM 0.32.0", device="d", flags=["/home/me"], costs=costs, ratios=ratios)
    verdict = make_verdict([timed(DRAFT, 3), timed(DRAFT, 3, concurrency=4)]).model_copy(
        update={"engine": engine, "replay": {gamma: 1 + 0.55 * gamma for gamma in range(5)}}
    )
    plan = gamma_plan(verdict, engine="vLLM")
    assert plan.gamma != gamma_plan(verdict).gamma == 3
    report = export(best_student(pair), pair / "target", tmp_path / "out", verdict=verdict)
    serving, page = json.loads((report.path / "serving.json").read_text()), (report.path / "SERVING.md").read_text()
    commands = {name: one["command"] for name, one in serving["engines"].items()}
    assert f'"num_speculative_tokens":{plan.gamma}' in commands["vLLM"]
    written = [(first, last, gamma or 1) for first, last, gamma in plan.by_load]
    assert json.dumps(written, separators=(",", ":")) in commands["vLLM"]
    assert "--speculative-num-steps 3" in commands["SGLang"]
    assert f"The vLLM command uses these gammas: {EngineFacts.load_words(plan.by_load)}." in page
    for row in verdict.engine_rows:
        assert row.gamma not in (1, 4) or f"{row.speed_up:.2f}x" in page
    assert "predicted (engine vLLM 0.32.0)" in page
    _, facts = read_export(report.path)
    assert check("vLLM", facts).command == commands["vLLM"], "what serve starts"
