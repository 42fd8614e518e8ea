"""result.json of a real run: every number in it can be traced to the log of proposals, the judgements or the held-out responses."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from failures import full_disk
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from data.responses.store import Store
from distill import train
from distill.commands.export import export_run
from distill.commands.options import ExportOptions
from distill.config.layout import step_folder
from distill.config.load import load_config
from distill.models.draft import load_draft
from distill.models.load import load_model
from distill.models.target import Target
from distill.run.result import Result
from distill.verdict import conclusion
from distill.verdict.evidence import with_speeds
from distill.verdict.token_view import spread_over, writers
from distill.verdict.verdict import with_gains
from speculative.decoder.responses import Response
from speculative.errors import UserError
from speculative.evaluate import Judgement, PerResponse
from speculative.measure.cost import StepCosts
from speculative.measure.measured import DRAFT, HELD_OUT, LOOKUP, LOOKUP_DRAFT, PAST, SERVED, TARGET, UNDISTILLED
from speculative.measure.metrics import Curve
from speculative.measure.token_scores import score_responses
from speculative.rules.sampling import SamplingSettings

ADAPTER = f"{SERVED} 2, sql"


@pytest.fixture(scope="module")
def result(tiny_run: Path) -> dict:
    return json.loads((tiny_run / "result.json").read_text(encoding="utf-8"))


def test_tau_is_that_of_the_proposal_log(result: dict, tiny_run: Path) -> None:
    verdict = result["verdict"]
    (judged,) = (
        row
        for row in verdict["measured"]
        if (row["way"], row["how"].get("tau"), row["text"]) == (DRAFT, "live", HELD_OUT)
    )
    blocks = verdict["replay_check"]["live_blocks"]
    assert verdict["live_tokens"] / blocks == pytest.approx(judged["tau"], rel=1e-12)
    log = pq.read_table(tiny_run / result["files"]["proposals"]).to_pandas()
    assert log["accepted"].mean() == pytest.approx(judged["accepted_per_drafted"], rel=1e-12)
    drafted, kept = (rows.groupby(["prompt", "block"]).size() for rows in (log, log[log["accepted"]]))
    for j, share in enumerate(verdict["survival"], start=1):
        assert (kept >= j).sum() / (drafted >= j).sum() == pytest.approx(share, rel=1e-12)
    assert len(drafted) <= blocks  # a block that drafted nothing (no room left) leaves no row


def test_the_token_view_shows_the_source_of_every_token_of_the_logged_run(result: dict, tiny_run: Path) -> None:
    log = pq.read_table(tiny_run / "proposals.parquet").to_pandas()
    responses = result["token_view"]["responses"]
    assert len(responses) == min(8, result["verdict"]["prompts"])
    for response in responses:
        tokens, own = response["tokens"], log[log["prompt"] == response["key"]]
        kept = own[own["accepted"]]
        assert (response["drafted"], response["accepted"]) == (len(own), len(kept))
        assert response["tokens_count"] == len(tokens)
        assert own["block"].nunique() <= response["blocks"] == len({token["block"] for token in tokens})
        for entry in kept.itertuples():
            if entry.position < len(tokens):  # else the end token cut the block
                token = tokens[entry.position]
                assert (token["id"], token["by"], token["block"]) == (entry.drafted, "draft", entry.block)
        by_draft = sum(token["by"] == "draft" for token in tokens)
        assert by_draft == (kept["position"] < len(tokens)).sum()
        for token in tokens:
            assert len(token["target_top"]) == len(token["draft_top"]) == 5
            for name in ("target", "draft"):
                probs = [prob for _, prob in token[f"{name}_top"]]
                assert probs == sorted(probs, reverse=True)
                assert -1e-6 <= token[f"{name}_prob"] <= probs[0] + 1e-5


def test_the_curves_of_the_runs_own_rule_are_the_verdicts(result: dict) -> None:
    verdict, first = result["verdict"], result["curves"]["rules"][0]
    assert first["rule"] == verdict["rule"] == "sample"
    assert [entry["rule"] for entry in result["curves"]["rules"]] == ["sample", "greedy-draft", "block", "greedy"]
    assert result["curves"]["refused"] == {}
    of = first["ways"][DRAFT]
    assert of["gammas"] == list(range(33))
    np.testing.assert_allclose(of["tau"], [verdict["replay"][str(gamma)] for gamma in range(33)], rtol=1e-9)
    costs = verdict["costs"]
    timed = StepCosts(
        1.0, {3: 0.3}, {3: 1.2}, 1, 8, host_seconds=(0.1, 0.2), prompt_seconds=(2.0, 3.0), text=(8.0, 10.0)
    )
    assert with_speeds(Curve.model_validate(of), timed).predicted_speed_up[:5] == [
        *(timed.speed_up(gamma, of["tau"][gamma]) for gamma in range(4)),
        None,
    ]
    assert of["predicted_speed_up"][0] == of["tau"][0] == 1.0
    measured = max(map(int, costs["verify_ratio"]))
    assert [value is None for value in of["predicted_speed_up"]] == [gamma > measured for gamma in range(33)]


def test_the_speed_up_is_pooled(result: dict) -> None:
    rates = result["timed_prompts"].values()
    assert len(rates) == 2  # judge.speed_prompts
    rows = {row["way"]: row for row in result["verdict"]["measured"] if "speed_up" in row}
    ways = {UNDISTILLED, DRAFT, LOOKUP, PAST, LOOKUP_DRAFT}
    assert set(rows) == {TARGET, *ways}
    clocked = [row for row in rows.values() if "first_token_ms" in row]
    assert {TARGET, DRAFT} <= {row["way"] for row in clocked} <= {TARGET, DRAFT, *result["verdict"]["run"].values()}
    assert all(set(row["stages_ms"]) <= {"prefill", "draft", "verify", "accept", "host"} for row in clocked)
    alone = rows.pop(TARGET)["tokens_per_second"]
    for row in rows.values():
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / alone)
        assert "speed_up_ci" not in row  # of two prompts
    assert all(own[name] > 0 for own in rates for name in (UNDISTILLED, DRAFT))
    assert rows[LOOKUP]["tuned_on"] == "training prompts"


def test_slices_partition_the_heldout_responses(result: dict) -> None:
    verdict = result["verdict"]
    assert {table["dimension"] for table in result["slices"]} == {
        "domain",
        "prompt length",
        "position",
        "first tokens",
        "token class",
        "target entropy",
    }
    for table in result["slices"]:
        rows = table["rows"]
        assert sum(row["tokens"] for row in rows) == verdict["tokens"], table["dimension"]
        assert sum(row["lost_share"] for row in rows) == pytest.approx(1.0)
        mean = sum(row["tokens"] * row["alpha"][DRAFT] for row in rows) / verdict["tokens"]
        judged = next(row for row in verdict["measured"] if (row["way"], row["text"]) == (DRAFT, HELD_OUT))
        assert mean == pytest.approx(judged["alpha"], abs=1e-9)


def test_every_checkpoint_is_paired_with_the_first(result: dict) -> None:
    verdict = result["verdict"]
    best = next(row for row in verdict["checkpoints"] if row["step"] == verdict["drafts"][-1]["step"])
    assert "gain" not in verdict["checkpoints"][0]
    assert best["gain"]["gain"] == pytest.approx(verdict["gain"]["alpha"]["gain"], abs=1e-6)


def test_checkpoints_on_text_that_differs_are_not_paired() -> None:
    sums = [([1.0, 2.0], [2, 4]), ([1.0, 3.0], [2, 5]), ([1.5, 2.5], [2, 4])]
    records = [
        Judgement(step=step, alpha=0.5, tau=1.5, per_response=PerResponse(accept_sums=accepted, tokens=tokens))
        for step, (accepted, tokens) in enumerate(sums)
    ]
    rows = with_gains(records, ["a", "b"])
    assert [row.gain is None for row in rows] == [True, True, False]
    assert rows[2].gain is not None
    assert rows[2].gain.gain == pytest.approx(1.0 / 6.0)


def test_writers_of_a_block_that_was_accepted_whole_cut_and_empty() -> None:
    response = Response("key", [1], response_ids=[5] * 7, drafted_counts=[3, 2, 0, 3], accepted_counts=[1, 2, 0, 3])
    assert [who for who, _ in writers(response)] == ["draft", "target", "draft", "draft", "bonus", "bonus", "draft"]
    assert [block for _, block in writers(response)] == [0, 0, 1, 1, 1, 2, 3]


def test_shown_responses_take_the_domains_in_turn() -> None:
    responses = [Response(str(index), [1], response_ids=[1] * (index != 1)) for index in range(6)]
    assert spread_over(responses, ["a", "a", "a", "a", "b", "b"], 4) == [0, 4, 2, 5]


@pytest.fixture(scope="module")
def other_run(tiny_config: Path, tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter under rule block, two served drafts beside, one of them an adapter, a domain that was not trained on, and the dial read at
    every step.
    """
    folder = tmp_path_factory.mktemp("other")
    old = folder / "old.jsonl"
    old.write_text("".join(json.dumps({"prompt": f"What is {i} + {i}?"}) + "\n" for i in range(6)), encoding="utf-8")
    tree = yaml.safe_load(tiny_config.read_text(encoding="utf-8"))
    tree |= {"name": "other", "output": str(folder)}
    tree["data"]["heldout"] = [
        tree["data"]["heldout"][0] | {"limit": 6},
        {"path": str(old), "prompt_column": "prompt", "domain": "old"},
    ]
    tree["student"] |= {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}
    tree["loss"] |= {"name": "lk_hybrid"}
    tree["train"] |= {"steps": 4}
    tree["judge"] |= {"rule": "block", "replay_every": 1, "served": [str(tiny_run), str(folder / "sql")], "live": "end"}
    base = load_model("base", str(tiny_run / "best" / "student"))
    get_peft_model(base, LoraConfig(r=2, init_lora_weights=False)).save_pretrained(folder / "sql")
    (folder / "other.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(conclusion, "plot_run", lambda run: None)
        patched.setattr(conclusion, "write_page", lambda run: None)
        assert train.main([str(folder / "other.yaml")]) == 0
    return folder / "other"


def test_the_served_draft_stands_between_baseline_and_best(other_run: Path, tiny_run: Path) -> None:
    result = json.loads((other_run / "result.json").read_text())
    drafts = [one["way"] for one in result["verdict"]["drafts"]]
    assert drafts == [UNDISTILLED, SERVED, ADAPTER, DRAFT]
    alphas = {
        row["way"]: row["alpha"]
        for row in result["verdict"]["measured"]
        if row["text"] == HELD_OUT and row["way"] in drafts
    }
    served = load_model("served", str(tiny_run / "best" / "student"))
    texts = [
        SimpleNamespace(
            prompt_ids=row.prompt_ids, response_ids=row.response_ids, log_target_probs=list(row.log_target_probs)
        )
        for row in Store(other_run / "responses" / "heldout").read()
    ]
    probs = np.concatenate(score_responses(served, texts, SamplingSettings(temperature=0.7)))
    # Batching changes the last digits only.
    assert alphas[SERVED] == pytest.approx(float(probs.mean()), abs=1e-5)
    assert alphas[ADAPTER] != alphas[SERVED]
    against = result["verdict"]["against_served"]["alpha"]
    assert against["gain"] == pytest.approx(alphas[DRAFT] - alphas[SERVED], abs=1e-6)


def test_a_domain_that_was_not_trained_on_is_watched(other_run: Path, result: dict) -> None:
    watched = json.loads((other_run / "result.json").read_text())
    assert watched["trained_on"] == result["trained_on"] == ["stdlib"]
    rows = next(table["rows"] for table in watched["slices"] if table["dimension"] == "domain")
    assert {row["name"] for row in rows} == {"old", "stdlib"}
    for row in rows:
        assert set(row["alpha"]) == {UNDISTILLED, SERVED, ADAPTER, DRAFT}
        assert row["gain"] == pytest.approx(row["alpha"][DRAFT] - row["alpha"][UNDISTILLED], abs=1e-9)


def test_block_verification_is_replayed_against_live_decoding(other_run: Path) -> None:
    verdict = json.loads((other_run / "verdict.json").read_text())
    assert verdict["rule"] == "block"
    assert verdict["warnings"] == []
    assert [record["live"] for record in verdict["checkpoints"]] == [False, False]


def test_the_dial_is_read_between_checkpoints(other_run: Path) -> None:
    lines = [json.loads(line) for line in (other_run / "metrics.jsonl").read_text().splitlines()]
    replays = {line["step"]: line for line in lines if "replay/alpha" in line}
    assert sorted(replays) == [1, 2, 3]  # 4 is a checkpoint
    first = next(line for line in lines if line["step"] == 0 and "judge/alpha" in line)
    assert all(0 < line["replay/alpha"] < 1 and line["replay/tau"] >= 1 for line in replays.values())
    assert replays[1]["replay/alpha"] != first["judge/alpha"]


def test_the_adapter_of_a_run_is_exported_alone_or_merged(other_run: Path, tiny_config: Path, tmp_path: Path) -> None:
    first, last = (step_folder(other_run, step) for step in (0, 4))
    assert AutoModelForCausalLM.from_pretrained(other_run / "best" / "student").config.num_hidden_layers == 2
    export_run(ExportOptions(last, tmp_path / "out", dtype="float32", adapter=True))
    target = Target(load_config(tiny_config).target, torch.device("cpu"))
    ids_BT, paths = torch.arange(20, 40)[None], (tmp_path / "out", tmp_path / "out" / "adapter", first)
    with torch.no_grad():
        merged, apart, untrained = (load_draft(str(path), target)(input_ids=ids_BT).logits for path in paths)
    torch.testing.assert_close(apart, merged, rtol=1e-4, atol=1e-4)  # W + BA in another order
    assert (merged - untrained).abs().max() > 1e-2
    with pytest.raises(UserError, match="--adapter: it has no adapter"):
        export_run(ExportOptions(first, tmp_path / "none", adapter=True))


def test_a_served_draft_that_cannot_be_judged_is_refused_before_the_work(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(tiny_config), f"output={tmp_path}", "judge.served=nowhere/draft"]
    assert train.main(command) == 2
    assert "nowhere/draft" in capsys.readouterr().err
    assert not (tmp_path / "tiny" / "responses").exists()


def test_a_run_is_finished_when_verdict_json_is_there(tiny_run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(conclusion, "write_page", full_disk)
    result = Result.read(tiny_run / "result.json")
    with pytest.raises(OSError, match="No space"):
        conclusion.write_conclusion(tmp_path, result)
    assert (tmp_path / "result.json").exists()
    assert not (tmp_path / "verdict.json").exists()
