"""speculation_profile.json and the hub's evaluation results: what a run measured, in the formats of others, and back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from data.prompts.prompt import PromptSource
from distill.commands import show as show_module
from distill.commands.export import export_run
from distill.commands.options import ExportOptions, ShowRunOptions
from distill.config.layout import VERDICT
from distill.export.export import export_draft
from distill.export.facts import read_run
from distill.export.hub.profile import SPECULATION_PROFILE, profile_of, read_profile
from distill.export.hub.results import EVAL_RESULTS, benchmark_of, index_of, results_file
from distill.run.verdict_record import DraftOf, Verdict, load_verdict
from speculative.errors import UserError
from speculative.evaluate import Judgement, OnText
from speculative.measure.measured import DRAFT, Measured
from speculative.measure.metrics import survival

# A profile as another producer writes it, with keys that only it knows. The rates are made up.
FOREIGN = {
    "schema_version": "1.0", "measured": True, "method": "dflash", "draft_checkpoint": {"id": "org/block-draft"},
    "target_model": {"id": "org/target"}, "num_speculative_tokens": 3, "block_size": 8, "max_supported_k": 8,
    "verification_method": "longest_prefix", "conditional_accept_rates": [0.8, 0.75, 0.5],
    "marginal_accept_rates": [0.8, 0.6, 0.3], "mean_accept_length": 2.7, "mean_accept_length_per_request": 2.75,
    "accept_length_model": "measured_per_k", "accept_length_by_k": {"3": 2.7}, "acceptance_length_histogram": {"1": 2, "4": 3},
    "per_category": {"writing": {"mean_accept_length": 2.1}}, "measurement_conditions": {"dataset": "mt_bench", "osl": 512},
    "validation": None, "a_key_of_theirs": [1],
}  # fmt: skip


def made(accepted: list[int], gamma: int, rule: str = "sample", drafting: str = "autoregressive") -> Verdict:
    """A verdict of blocks that accepted these counts of gamma drafted tokens, all of one domain."""
    shares = survival(accepted, gamma)
    tau = 1 + sum(accepted) / len(accepted)
    step = Judgement(step=4, alpha=0.5, tau=tau, domains={"code": OnText(alpha=0.5, survival=shares)})
    return Verdict(
        format=2, version="1", drafts=[DraftOf(way=DRAFT, step=4, drafting=drafting)], headline="", rule=rule, gamma=gamma, prompts=9,
        tokens=99, outcome="pays_off", survival=shares, checkpoints=[step], replay={1: 1.5, 8: 3.0},
        measured=[Measured(DRAFT, rule, gamma=gamma, tau=tau, alpha=0.5, prompts=9, how={"tau": "live", "alpha": "replay"})],
    )  # fmt: skip


@given(st.data())
def test_conditional_and_marginal_rates_are_the_shares_that_counting_gives(data: Any) -> None:
    gamma = data.draw(st.integers(1, 6))
    accepted = data.draw(st.lists(st.integers(0, gamma), min_size=1, max_size=40))
    profile = profile_of(made(accepted, gamma), gamma, "org/target", "draft", ["prompts"])
    for place in range(1, gamma + 1):
        reached = [count for count in accepted if count >= place - 1]
        kept = sum(count >= place for count in accepted)
        assert profile.marginal_accept_rates[place - 1] == pytest.approx(kept / len(accepted), abs=1e-6)
        conditional = kept / len(reached) if reached else 0.0
        assert profile.conditional_accept_rates[place - 1] == pytest.approx(conditional, abs=1e-6)
    # Where each block drafts gamma tokens, the mean over blocks is 1 + the sum of the marginal rates.
    assert profile.mean_accept_length == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-6)
    assert profile.per_category["code"].marginal_accept_rates == profile.marginal_accept_rates
    assert profile.fault() is None


def test_a_finished_run_exports_a_profile_that_reads_back(tiny_run: Path, tmp_path: Path) -> None:
    report = export_run(ExportOptions(tiny_run, tmp_path / "draft"))
    assert SPECULATION_PROFILE in report.files
    found, verdict = read_profile(report.path), load_verdict(tiny_run)
    written = json.loads((report.path / SPECULATION_PROFILE).read_text())
    assert json.loads(json.dumps(found.record())) == written
    assert (written["schema_version"], written["measured"], written["method"]) == ("1.0", True, "draft_model")
    assert "2247" in written["measurement_conditions"]["follows"]
    assert written["num_speculative_tokens"] == verdict.gamma == len(written["marginal_accept_rates"])
    assert verdict.survival is not None
    assert written["marginal_accept_rates"] == pytest.approx(verdict.survival, abs=1e-6)
    (judged,) = [one for one in verdict.checkpoints if one.step == verdict.drafts[-1].step]
    assert written["per_category"].keys() == judged.domains.keys()
    for name, own in judged.domains.items():
        assert written["per_category"][name]["marginal_accept_rates"] == pytest.approx(own.survival, abs=1e-6)
    assert str(tmp_path) not in json.dumps(written)


def test_a_profile_of_another_producer_reads_and_writes_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(FOREIGN))
    assert json.loads(json.dumps(read_profile(path).record())) == FOREIGN
    # A rate alone, and a profile that says that nothing was measured, are legal too.
    for change in ({"marginal_accept_rates": None}, {"measured": False, "mean_accept_length": None}):
        path.write_text(json.dumps(FOREIGN | change))
        assert read_profile(path).schema_version == "1.0"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema_version": "2.0"}, "schema_version is 2.0, not 1.x; measure again"),
        ({"num_speculative_tokens": None}, "key num_speculative_tokens has an invalid value"),
        ({"marginal_accept_rates": [0.8, 1.7, 0.3]}, r"key marginal_accept_rates\[1\] has an invalid value"),
        ({"marginal_accept_rates": [0.6, 0.8, 0.3]}, "marginal_accept_rates increase; measure again"),
        ({"conditional_accept_rates": [0.8, 0.6, 0.3]}, "are not the products of conditional_accept_rates"),
        ({"conditional_accept_rates": [0.8, 0.75]}, "are not the products of conditional_accept_rates"),
        (
            {"mean_accept_length": 3.1},
            r"mean_accept_length is 3.100, but 1 \+ the sum of marginal_accept_rates is 2.700",
        ),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(FOREIGN | change))
    with pytest.raises(UserError, match=told):
        read_profile(path)


def test_block_verification_and_a_draft_without_a_verdict_have_no_rates() -> None:
    block = profile_of(made([0, 2, 1], 2, rule="block"), 2, "t", "d", [])
    assert (block.conditional_accept_rates, block.marginal_accept_rates, block.per_category) == (None, None, {})
    assert block.record()["verification_method"] == "block"
    assert block.mean_accept_length == 2.0
    unknown = profile_of(None, 4, "t", "d", [])
    assert (unknown.measured, unknown.num_speculative_tokens, unknown.marginal_accept_rates) == (False, 4, None)
    # A block draft plans all tokens at once, so its rates do not hold at another gamma.
    parallel = profile_of(made([0, 2, 1], 2, drafting="parallel"), 2, "t", "d", []).record()
    assert (parallel["accept_length_model"], parallel["max_supported_k"]) == ("measured_per_k", 2)
    chain = profile_of(made([0, 2, 1], 2), 2, "t", "d", []).record()
    assert (chain["accept_length_model"], chain["max_supported_k"]) == ("chain_analytic", 8)


def test_show_prints_another_drafts_profile_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / VERDICT).write_text(json.dumps(made([0, 2, 2, 1], 2).record()))
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps(FOREIGN))
    monkeypatch.setattr(show_module, "Console", lambda: Console(width=200))
    show_module.show(ShowRunOptions(tmp_path, profile=theirs))
    said = capsys.readouterr().out
    rows = [line.replace("│", " ").split() for line in said.splitlines()]
    nothing = "\N{EN DASH}"
    assert ["1", "0.750", "0.750", "0.800", "0.800"] in rows
    assert ["2", "0.667", "0.500", "0.750", "0.600"] in rows
    assert ["3", nothing, nothing, "0.500", "0.300"] in rows
    assert ["tokens", "per", "block", nothing, "2.250", nothing, "2.700"] in rows
    assert ["tokens", "per", "block,", "code", nothing, "2.250", nothing, nothing] in rows
    assert "other: theirs.json, dflash, dataset mt_bench, osl 512" in said


def test_the_card_has_a_model_index_that_the_hub_reads(tiny_run: Path, tmp_path: Path) -> None:
    report = export_run(ExportOptions(tiny_run, tmp_path / "draft"))
    card, verdict = huggingface_hub.ModelCard.load(report.path / "README.md"), load_verdict(tiny_run)
    assert card.data.model_name == "draft"
    found = {(one.dataset_config, one.metric_type): one.metric_value for one in card.data.eval_results}
    row, timed = verdict.judged(DRAFT), verdict.row(DRAFT)
    assert row is not None
    assert timed is not None
    assert found[None, "alpha"] == pytest.approx(row.alpha, abs=1e-6)
    assert found[None, "tau"] == pytest.approx(row.tau, abs=1e-6)
    assert found[None, "speed_up"] == pytest.approx(timed.speed_up, abs=1e-6)
    domains = {one.text for one in verdict.measured if one.text != "held-out"}
    assert {config for config, _ in found} == {None, *domains}
    # Held out of a local source: there is no dataset of the hub that the results could be listed under.
    assert not (report.path / ".eval_results").exists()


def test_results_name_the_benchmark_that_was_held_out(tmp_path: Path) -> None:
    benchmark = benchmark_of([PromptSource(path="nvidia/SPEED-Bench", subset="qualitative", split="test")])
    assert benchmark is not None
    (entry,) = huggingface_hub.parse_eval_result_entries(
        yaml.safe_load(results_file(made([1], 2), benchmark, "org/target"))
    )
    assert (entry.dataset_id, entry.task_id, entry.value) == ("nvidia/SPEED-Bench", "qualitative", 2.0)
    assert entry.notes == "tau (tokens per target call) with org/target, gamma 2, rule sample, 9 prompts, live"
    (tmp_path / "org").mkdir()
    cached = "/c/datasets--nvidia--SPEED-Bench/snapshots/0123abcd"
    assert benchmark_of([PromptSource(path=cached, subset="qualitative")]) == benchmark
    local = (tmp_path / "org" / "set").touch()
    for sources in ([], [PromptSource(path="stdlib")], [PromptSource(path=str(tmp_path / "org" / "set"))]):
        assert benchmark_of(sources) is local is None
    both = [PromptSource(path="a/b"), PromptSource(path="c/d")]
    assert benchmark_of(both) is None
    assert [one.metric_type for one in index_of(made([1], 2), [])] == ["alpha", "tau"]


def test_an_export_with_results_is_replaced_like_any_other(tiny_run: Path, tmp_path: Path) -> None:
    facts = replace(read_run(tiny_run), benchmark=benchmark_of([PromptSource(path="org/benchmark", revision="abc")]))
    for overwrite in (False, True):
        report = export_draft(facts, tmp_path / "draft", overwrite=overwrite)
        assert ".eval_results" in report.files
        (told,) = yaml.safe_load((report.path / EVAL_RESULTS).read_text())
        assert told["dataset"] == {"id": "org/benchmark", "task_id": "default", "revision": "abc"}
        assert facts.verdict is not None
        assert told["value"] == pytest.approx(facts.verdict.judged(DRAFT).tau, abs=1e-6)
