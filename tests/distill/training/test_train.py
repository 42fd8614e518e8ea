"""The whole road on a tiny target: what a run leaves behind, and that every number of the verdict has its file."""

import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from data.responses.store import Store
from distill import train
from distill.config.layout import list_steps, step_folder
from distill.config.load import load_config
from distill.models.carving import carve
from distill.models.load import load_model
from distill.run.verdict_record import BestDraft, JudgedDraft, Verdict
from distill.training.loop import STAGES
from distill.training.optim import make_optimizers
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
    assert set(verdict) == set(Verdict.model_fields)
    Verdict.model_validate(verdict)
    for name, kind in (("baseline", JudgedDraft), ("best", BestDraft)):
        row = verdict[name]
        assert set(row) == set(kind.model_fields)
        assert row["alpha_ci"][0] <= row["alpha"] <= row["alpha_ci"][1]
        assert row["tau_ci"][0] <= row["tau"] <= row["tau_ci"][1]
        assert len(row["survival"]) == verdict["gamma"]
        assert row["survival"] == sorted(row["survival"], reverse=True)
    assert set(verdict["replay"]) == {str(gamma) for gamma in range(33)}
    assert set(verdict["paired"]) == {"alpha_gain", "ci"}
    assert [record["step"] for record in verdict["checkpoints"]] == [0, 4, 8, 12]
    assert verdict["self_checks"]["alpha_live"] == pytest.approx(1.0, abs=1e-3)
    stages = {f"train/{stage}" for stage in STAGES}
    assert set(verdict["seconds"]) == {"self_checks", "respond", "judge", "train", "verdict"} | stages
    # The stages are parts of the whole; a little is between them.
    assert sum(verdict["seconds"][stage] for stage in stages) == pytest.approx(
        verdict["seconds"]["train"], rel=0.2, abs=0.1
    )


def test_best_is_the_highest_tau_and_the_link_points_there(verdict: dict, tiny_run: Path) -> None:
    taus = {record["step"]: record["tau"] for record in verdict["checkpoints"]}
    assert verdict["best"]["step"] == max(taus, key=taus.__getitem__)
    assert (tiny_run / "best").resolve() == step_folder(tiny_run, verdict["best"]["step"]).resolve()


def test_distilling_raises_alpha_on_heldout_prompts(verdict: dict) -> None:
    assert verdict["paired"]["ci"][0] > 0
    gain = verdict["checkpoints"][-1]["alpha"] - verdict["baseline"]["alpha"]
    assert gain > 0


def test_the_paired_gain_is_the_difference_of_the_alphas(verdict: dict) -> None:
    difference = verdict["best"]["alpha"] - verdict["baseline"]["alpha"]
    # Replay scores in float32 logits: the last digits depend on how prompts were batched.
    assert verdict["paired"]["alpha_gain"] == pytest.approx(difference, abs=1e-6)


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
    assert sum(values.sum() for values in probs) / tokens == pytest.approx(verdict["best"]["alpha"], abs=1e-5)
    for gamma, tau in replay(probs).items():
        assert tau == pytest.approx(verdict["replay"][str(gamma)], rel=1e-5)


def test_live_decoding_agrees_with_replay(verdict: dict) -> None:
    for record in verdict["checkpoints"]:
        assert record["replay_check"]["agrees"]
        assert record["greedy"]["replay_check"]["predicted_blocks"] == pytest.approx(
            record["greedy"]["replay_check"]["live_blocks"]
        )


def test_no_prompt_is_in_both_sets(tiny_run: Path) -> None:
    train_ids = {row.prompt_id for row in Store(tiny_run / "responses" / "train").read()}
    heldout_ids = {row.prompt_id for row in Store(tiny_run / "responses" / "heldout").read()}
    assert train_ids
    assert heldout_ids
    assert not train_ids & heldout_ids


def test_metrics_have_a_line_for_every_step(tiny_run: Path) -> None:
    lines = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, 13))
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)


def test_a_finished_run_started_again_measures_again_and_trains_nothing(tiny_run: Path, tiny_config: Path) -> None:
    before = (tiny_run / "metrics.jsonl").read_text()
    judged = {
        step: (step_folder(tiny_run, step) / "judgement.json").stat().st_mtime_ns for step in list_steps(tiny_run)
    }
    # How a batch is cut may change: it depends on the machine's memory.
    assert train.main([str(tiny_config), "train.micro_batch_size=8"]) == 0
    assert (tiny_run / "metrics.jsonl").read_text() == before
    assert judged == {
        step: (step_folder(tiny_run, step) / "judgement.json").stat().st_mtime_ns for step in list_steps(tiny_run)
    }


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.lr=1.0", ["another config", "optim.lr is 0.003, now 1.0"]),
        ("seed=3", ["another config", "seed is 0, now 3"]),
        ("train.batch_size=8", ["another config", "train.batch_size is 16, now 8"]),
        ("resume=never", ["resume is never"]),
    ],
)
def test_a_folder_with_another_config_is_refused(
    override: str, words: list[str], tiny_run: Path, tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([str(tiny_config), override]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for word in words:
        assert word in message


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


@pytest.mark.parametrize("loss", ["lk_hybrid", "ce", "neg_log_alpha"])
def test_other_students_and_losses_run_to_a_verdict(loss: str, tiny_config: Path, tmp_path: Path) -> None:
    student = {
        "lk_hybrid": ["student.lora={rank: 4, target_modules: [q_proj, v_proj]}"],
        "ce": [
            "student.init=config",
            "student.architecture={model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,"
            " num_attention_heads: 2, max_position_embeddings: 128}",
        ],
        "neg_log_alpha": ["student.gradient_checkpointing=true", "optim.name=muon"],
    }[loss]
    if loss == "ce":
        student.append("student.layers=[0]")
    status = train.main(
        [
            str(tiny_config),
            "name=other",
            f"output={tmp_path}",
            f"loss.name={loss}",
            "train.steps=2",
            "judge.every=2",
            "judge.prompts=4",
            *student,
        ]
    )
    assert status == 0
    found = json.loads((tmp_path / "other" / "verdict.json").read_text())
    assert [record["step"] for record in found["checkpoints"]] == [0, 2]
    before, after = (record["alpha"] for record in found["checkpoints"])
    assert 0 < before != after > 0, "two steps changed the draft"
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "other" / "best" / "student").config
    assert config.num_hidden_layers == (1 if loss == "ce" else 2)


def test_muon_takes_the_layers_matrices_and_adamw_the_rest(tiny_target: Path, tiny_config: Path) -> None:
    config = load_config(tiny_config, ["optim.name=muon"])
    model = load_model("target", str(tiny_target))
    adamw, muon = make_optimizers(model, config.optim)
    of_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    of_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert not of_muon & of_adamw
    assert of_muon | of_adamw == {id(p) for p in model.parameters()}
    assert id(model.model.embed_tokens.weight) in of_adamw
    assert len(of_muon) == 3 * 7


def test_reference_answers_train_and_the_target_is_not_asked_of_them(
    tiny_target: Path, tiny_config: Path, tmp_path: Path
) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [{"q": f"def f{i}(x):\n", "a": f"    return x + {i}\n"} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "reference.yaml"
    config.write_text(
        f"""
name: reference
output: {tmp_path}
target: {{path: {tiny_target}}}
data:
  train: [{{path: {file}, prompt_column: q, reference_column: a}}]
  responses: reference
  template: {{mode: plain}}
  heldout_count: 5
serving: {{max_tokens: 12}}
loss: {{name: ce}}
train: {{steps: 2, batch_size: 4, micro_batch_size: 4}}
judge: {{every: 2, prompts: 5, gamma: 2, speed_prompts: 1, speed_seconds: 0.1}}
"""
    )
    assert train.main([str(config)]) == 0
    stored = Store(tmp_path / "reference" / "responses" / "train").read()
    assert len(stored) == 25
    assert all(row.response_ids and not row.log_target_probs for row in stored)


def test_stores_are_named_by_what_they_hold(tiny_run: Path) -> None:
    manifest = Store(tiny_run / "responses" / "heldout-greedy").manifest()
    assert manifest["sampling"]["temperature"] == 0
    assert Store(tiny_run / "responses" / "heldout").manifest()["sampling"]["temperature"] == 0.7
