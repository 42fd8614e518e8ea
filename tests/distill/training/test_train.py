"""The whole road on a tiny target: what a run leaves behind, and that every number of the verdict has its file."""

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tiny_training import write_target
from transformers import AutoModelForCausalLM

from data.responses.store import Store
from distill import train
from distill.config.layout import list_steps, step_folder
from distill.models.carving.layers import carve
from distill.models.load import load_model
from distill.run.verdict_record import Verdict
from distill.training.trainer import STAGES
from speculative.measure.measured import DRAFT, HELD_OUT, UNDISTILLED
from speculative.measure.replay import replay
from speculative.measure.token_scores import score_responses
from speculative.rules.sampling import SamplingSettings


@pytest.fixture(scope="module")
def verdict(tiny_run: Path) -> dict:
    return json.loads((tiny_run / "verdict.json").read_text())


def test_a_run_leaves_what_the_documentation_says(tiny_run: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "self_checks.json", "verdict.json", "plot.png", "best"):
        assert (tiny_run / name).exists(), name
    assert list_steps(tiny_run) == [0, 4, 8, 12]
    for step in list_steps(tiny_run):
        folder = step_folder(tiny_run, step)
        assert (folder / "student" / "config.json").exists()
        assert (folder / "judgement.json").exists()
        provenance = json.loads((folder / "provenance.json").read_text())
        assert provenance["target_fingerprint"]
        assert provenance["versions"]["torch"] == version("torch")


def test_the_verdict_has_the_documented_shape(verdict: dict) -> None:
    assert set(verdict) == set(Verdict.model_fields) - {"engine"}, "no engine was timed"
    Verdict.model_validate(verdict)
    for name in (UNDISTILLED, DRAFT):
        row = next(row for row in verdict["measured"] if (row["way"], row["text"]) == (name, HELD_OUT))
        assert row["how"] == {"alpha": "replay", "tau": "live"}
        assert row["alpha_ci"][0] <= row["alpha"] <= row["alpha_ci"][1]
        assert row["tau_ci"][0] <= row["tau"] <= row["tau_ci"][1]
    assert verdict["gain"]["alpha"]["ci"][0] > 0, "distilling raises alpha on held-out prompts"
    assert verdict["replay_check"]["agrees"]
    for record in verdict["checkpoints"]:
        assert record["live_check"]["replay"]["agrees"]
        assert record["score"] == record["tau"] == record["replay"][str(record["gamma"])]
        assert record["greedy"]["tau"] >= 1.0
    survival = verdict["survival"]
    assert len(survival) == verdict["gamma"]
    assert survival == sorted(survival, reverse=True)
    assert set(verdict["replay"]) == {str(gamma) for gamma in range(33)}
    assert set(verdict["gain"]["alpha"]) == {"gain", "ci"}
    assert [record["step"] for record in verdict["checkpoints"]] == [0, 4, 8, 12]
    assert verdict["self_checks"]["alpha_live"] == pytest.approx(1.0, abs=1e-3)
    stages = {f"train/{stage}" for stage in STAGES}
    assert set(verdict["seconds"]) == {"self_checks", "respond", "judge", "train", "verdict"} | stages
    # The stages are parts of the whole; a little is between them.
    assert sum(verdict["seconds"][stage] for stage in stages) == pytest.approx(
        verdict["seconds"]["train"], rel=0.2, abs=0.1
    )


def judged_alpha(verdict: dict) -> float:
    return next(row["alpha"] for row in verdict["measured"] if (row["way"], row["text"]) == (DRAFT, HELD_OUT))


def test_the_baseline_is_the_carved_student_untouched(tiny_run: Path, tiny_target: Path) -> None:
    target = load_model("target", str(tiny_target))
    baseline = AutoModelForCausalLM.from_pretrained(step_folder(tiny_run, 0) / "student").state_dict()
    for name, value in carve(target, [0, -1]).state_dict().items():
        assert torch.equal(value, baseline[name]), name


def test_alpha_and_replay_can_be_recomputed_from_the_files_alone(verdict: dict, tiny_run: Path) -> None:
    rows = Store(tiny_run / "responses" / "heldout").read()

    class Text:
        def __init__(self, row) -> None:
            self.prompt_ids, self.response_ids = row.prompt_ids, row.response_ids
            self.log_target_probs = list(row.log_target_probs)

    draft = load_model("best", str(tiny_run / "best" / "student"))
    probs = score_responses(draft, [Text(row) for row in rows], SamplingSettings(temperature=0.7))
    tokens = sum(len(values) for values in probs)
    assert tokens == verdict["tokens"]
    # The tiny target is saved in float32, so nothing is rounded; batching changes the last digits only.
    assert sum(values.sum() for values in probs) / tokens == pytest.approx(judged_alpha(verdict), abs=1e-5)
    for gamma, tau in replay(probs).items():
        assert tau == pytest.approx(verdict["replay"][str(gamma)], rel=1e-5)


def test_a_store_from_other_settings_is_refused_by_name(
    tiny_run: Path, tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run under another name whose responses folder was copied from a run with other settings.
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "responses").symlink_to(tiny_run / "responses")
    assert train.main([str(tiny_config), "name=copied", f"output={tmp_path}", "serving.temperature=0.5"]) == 2
    message = capsys.readouterr().err
    assert "made with another sampling" in message
    assert "responses/train" in message


@pytest.mark.usefixtures("without_figures")
def test_a_finished_run_started_again_measures_again_and_trains_nothing(
    tiny_run: Path, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "tiny"
    shutil.copytree(tiny_run, run, symlinks=True)

    def written(*names: str) -> list[int]:
        return [path.stat().st_mtime_ns for name in names for path in sorted(run.rglob(name))]

    metrics = (run / "metrics.jsonl").read_text()
    judged, concluded = written("judgement.json"), written("result.json", "verdict.json")
    monkeypatch.delattr("distill.run.prompts.load_source")  # the run has the prompts
    # How a batch is cut may change: it depends on the machine's memory.
    assert train.main([str(tiny_config), f"output={tmp_path}", "train.micro_batch_size=8"]) == 0
    assert (run / "metrics.jsonl").read_text() == metrics
    assert written("judgement.json") == judged
    assert (len(judged), len(concluded)) == (4, 2)
    assert all(now > before for now, before in zip(written("result.json", "verdict.json"), concluded, strict=True))


@pytest.mark.parametrize(
    ("kind", "layers", "rules"),
    [
        (
            "gemma4_text",
            [0, 1],
            {
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 0,
                "sliding_window": 8,
            },
        ),
        (
            "qwen2_moe",
            [0, 2],
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "decoder_sparse_step": 2,
            },
        ),
    ],
)
def test_layers_that_no_draft_can_keep_end_the_run_before_the_target_answers(
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    layers: list[int],
    rules: dict,
) -> None:
    write_target(tmp_path / "target", kind=kind, **rules)
    own = ["name=other", f"output={tmp_path}", f"target.path={tmp_path}/target", f"student.layers={layers}"]
    assert train.main([str(tiny_config), *own]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot keep these layers as they are" in line
    left = {path.name for path in (tmp_path / "other").iterdir()}
    assert not left & {"self_checks.json", "responses", "checkpoints"}


def test_trackers_get_what_checkpoints_decoded_live(tiny_run: Path) -> None:
    lines = map(json.loads, (tiny_run / "metrics.jsonl").read_text().splitlines())
    logged = {line["step"]: line for line in lines if "judge/score" in line}
    assert list(logged) == list_steps(tiny_run)
    for step, line in logged.items():
        check = json.loads((step_folder(tiny_run, step) / "judgement.json").read_text())["live_check"]
        names = {"tau_live": "tau", "accepted_per_drafted_live": "accepted_per_drafted", "live_prompts": "prompts"}
        assert {name: line[f"judge/{name}"] for name in names} == {name: check[key] for name, key in names.items()}
        assert "judge/live" not in line, "it would be false, because the tau that selects is of replay"
