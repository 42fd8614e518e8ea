"""Payback and load by hand, the share of traffic, the gate's decisions, and input errors."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_arms import write_version
from refusals import refused
from rich.console import Console
from traffic_log import record_of, write_log

from data.responses.store import Store
from distill.commands.compare.comparison import Difference
from distill.live.arms import Arm, Arms
from distill.live.options import RefreshOptions
from distill.live.refresh import refresh
from distill.live.refresh.gate import failure_of, small_slices
from distill.live.refresh.plan import mixed
from distill.live.refresh.reasons import concurrency, own_words, payback
from distill.live.refresh.refresh import refresh_command
from distill.live.refresh.state import refresh_folder
from distill.live.rollout.engine import Engine
from distill.live.rollout.state import State
from distill.live.versions import list_versions, make_current
from distill.run.verdict_record import Costs
from speculative.errors import UserError
from speculative.measure.effects import Gain

# A block of gamma 3 takes 0.01 x (3 x 0.1 + 1.2) = 0.015 s.
COSTS = Costs(
    target_step_seconds=0.01,
    draft_step_seconds=0.001,
    cost_ratio=0.1,
    cost_ratio_at={1: 0.5, 3: 0.1},
    verify_ratio={1: 1.1, 3: 1.2},
)
# 1,000 tokens in a day, never two requests at once.
A_DAY = [
    record_of(
        number,
        time=number * 86_390.0,
        total_s=10.0,
        response_tokens=500,
        response_ids=None,
        accepted=500,
        drafted=1500,
        blocks=500,
    )
    for number in (0, 1)
]


def test_payback_equals_a_hand_calculation() -> None:
    # A token takes 0.015 / tau seconds; from tau 1.5 to 2 that saves 0.015 x (1 / 1.5 - 1 / 2) = 0.0025 s, 2.5 s a day.
    found = payback(COSTS, A_DAY, 1.5, 0.5, seconds=5.0, days=2.5)
    assert found.sentence.startswith("payback: 1,000 tokens and 2 requests a day, 1.0 in flight, 15.00 ms per block")
    assert found.saved_gpu_hours_per_day == pytest.approx(2.5 / 3600)
    assert found.training_gpu_hours == pytest.approx(5 / 3600)
    assert (found.days, found.holds) == (pytest.approx(2.0), True)
    assert not payback(COSTS, A_DAY, 1.5, 0.5, seconds=7.0, days=2.5).holds
    # Two requests share every step, so half of it is saved.
    twice = [*A_DAY, *(replace(one, id=f"{one.id}b") for one in A_DAY)]
    assert payback(COSTS, twice, 1.5, 0.5, 5.0, 2.5).saved_gpu_hours_per_day == pytest.approx(2.5 / 3600)


@pytest.mark.parametrize(("costs", "gain"), [(None, 0.5), (COSTS, 0.0), (COSTS, -0.2)])
def test_without_savings_there_is_no_payback(costs: Costs | None, gain: float) -> None:
    found = payback(costs, A_DAY, 1.5, gain, 5.0, 1e9)
    assert not found.holds
    json.dumps(found.record(), allow_nan=False)


def test_requests_in_flight_are_counted_while_there_are_any() -> None:
    spans = [(0.0, 10.0), (0.0, 10.0), (20.0, 10.0), (100.0, None)]
    records = [record_of(number, time=start, total_s=took) for number, (start, took) in enumerate(spans)]
    assert concurrency(records) == pytest.approx(1.5)  # 30 s of requests in 20 s
    assert concurrency(records[3:]) == 1.0


def test_greedy_text_differs_from_text_that_was_mixed_up(tiny_run: Path, tmp_path: Path) -> None:
    store = Store(tiny_run / "responses" / "heldout-greedy")
    rows = store.read()
    mixed_up = [
        replace(
            one,
            input_ids=[*one.prompt_ids, *other.response_ids],
            loss_mask=[False] * len(one.prompt_ids) + [True] * len(other.response_ids),
        )
        for one, other in zip(rows, [*rows[1:], rows[0]], strict=True)
    ]
    for name, some in (("own", rows), ("mixed up", mixed_up)):
        written = Store(tmp_path / name / "responses" / "train")
        written.open(store.manifest())
        written.write_shard(0, some)
        found = own_words(tiny_run, tmp_path / name)
        assert (found.holds, found.responses) == (name == "own", len(rows)), found


@pytest.mark.parametrize(
    ("old", "new", "share", "expected"),
    [
        (100, 100, 0.5, (100, 100)),
        (1800, 100, 0.5, (100, 100)),
        (100, 1000, 0.5, (100, 100)),
        (100, 1000, 0.25, (99, 33)),
        (900, 100, 0.25, (300, 100)),
        (100, 70, 1.0, (0, 70)),
    ],
)
def test_the_share_is_kept_with_all_that_fits_it(old: int, new: int, share: float, expected: tuple[int, int]) -> None:
    assert mixed(old, new, share) == expected


def difference(gain: float, low: float, high: float, prompts: int = 64, certain_tau: str = "none") -> Difference:
    certain = "gain" if low > 0 else "loss" if high < 0 else "none"
    return Difference.model_construct(
        alpha=Gain(gain=gain, ci=(low, high)),
        tau=Gain(gain=gain, ci=(low, high)),
        prompts=prompts,
        tokens=100,
        fewest_prompts=6,
        certain=certain,
        certain_tau=certain_tau,
    )


@pytest.mark.parametrize(
    ("side", "whole", "gain", "passes"),
    [
        ("new", True, difference(0.02, 0.001, 0.04), True),
        ("new", True, difference(0.02, -0.001, 0.04), False),  # a gain that is not certain
        ("new", True, difference(0.02, 0.001, 0.04, certain_tau="loss"), False),
        ("new", False, difference(0.0, -0.01, 0.01), True),  # a slice need not gain by itself
        ("new", False, difference(-0.02, -0.03, -0.01), False),
        ("old", False, difference(-0.005, -0.009, 0.0), True),  # certainly worse, by less than the margin
        ("old", False, difference(0.0, -0.011, 0.011), False),  # may have lost more than the margin
        ("old", False, difference(0.02, 0.01, 0.03, prompts=5), False),  # too few to be certain
    ],
)
def test_the_gate(side: str, whole: bool, gain: Difference, passes: bool) -> None:
    failure = failure_of("sql", gain, side, 0.01, whole)
    assert (failure == "") is passes
    assert passes or "sql" in failure or "no certain gain" in failure


@pytest.mark.parametrize(
    ("sizes", "looks", "small"),
    [
        ({"sql": 50, "chat": 40}, 2, set()),
        ({"sql": 50, "rare": 1, "odd": 2, "chat": 8}, 2, {"rare", "odd", "chat"}),  # 9 are needed: 1 + 2 + 8 are 11
        ({"sql": 50, "rare": 3}, 2, {"rare", "sql"}),  # alone it would always keep the old draft
        ({"sql": 8, "chat": 8, "code": 50}, 2, set()),  # 1 - 0.05 / 6: 1 + ceil(6.9) are needed
        ({"sql": 7, "chat": 8, "code": 50}, 2, {"sql", "chat"}),
        ({"sql": 3}, 1, set()),
    ],
)
def test_slices_too_small_to_be_certain_go_together(sizes: dict[str, int], looks: int, small: set[str]) -> None:
    assert small_slices(sizes, looks) == small


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"prompt_ids": None, "response_ids": None}, {}, r"none with text; start the gateway with --text"),
        ({"target_version": "other"}, {}, r"another target version \(other\)"),
        ({}, {}, r"10 requests with text; at least \d+ are needed"),
        ({}, {"share": 0.0}, r"--share 0"),
        ({}, {"overrides": ["data.train.0.limit=5"]}, r"data.train.0.limit=5: a refresh sets this key itself"),
        ({}, {"approve": "Ann", "dry_run": True}, r"--dry-run publishes nothing"),
    ],
)
def test_bad_input_is_refused_before_anything_is_done(
    tiny_run: Path, tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    target = json.loads((tiny_run / "target.json").read_text())["path"]
    records = [record_of(number, **{"target_version": target, **changes}) for number in range(10)]
    write_log(tmp_path / "log", records)
    assert re.search(said, refused(call, tiny_run, tmp_path, **options))
    assert not list(tiny_run.parent.glob("*-refresh-*"))


def call(run: Path, place: Path, **options: Any) -> int:
    known = RefreshOptions(run, **{"traffic": place / "log", "drafts": place / "drafts", **options})
    return refresh_command(known, Console(file=io.StringIO()))


def test_a_run_without_a_verdict_is_refused(tmp_path: Path, tiny_run: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((tiny_run / "config.yaml").read_bytes())
    with pytest.raises(UserError, match=r"verdict.json: not there: the run is not finished"):
        call(tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"no config.yaml there"):
        call(tmp_path / "none", tmp_path)


def test_a_training_that_a_kill_has_left_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    folder = tmp_path / "tiny-refresh-v0002"
    created = psutil.Process(left.pid).create_time()
    folder.with_name(f"{folder.name}.pid").write_text(json.dumps([left.pid, created]))
    out, rest = Console(file=io.StringIO()), (tmp_path, tmp_path, None, "v0001", None)
    own = refresh._Refresh(RefreshOptions(tmp_path), out, folder, *rest)  # type: ignore[arg-type]
    own._begin()
    assert left.poll() == 0, "it uses the folder, so nothing else may be done there before"
    assert f"process {left.pid} of a killed refresh is still training" in out.file.getvalue()


def test_a_version_whose_rollout_has_begun_is_not_pruned(tmp_path: Path) -> None:
    for number, name in enumerate(("v0001", "v0002", "v0003", "v0004", "v0005")):
        write_version(tmp_path, name, f"v000{number}")
    make_current(tmp_path, "v0002", "Ann")
    engine = Engine(url="http://127.0.0.1:9", port=9)
    arms = Arms("flags", (Arm("v0002", "http://127.0.0.1:8", 1.0, "v0002"),))
    state = State(version="v0003", log=str(tmp_path), stage="starting", share=0.1, engine=engine, before=arms)
    state.store(tmp_path)
    refresh.prune_unused(tmp_path, 1, None, "v0005", Console(file=io.StringIO()))
    assert [version.name for version in list_versions(tmp_path)] == ["v0001", "v0002", "v0003", "v0005"]


@pytest.mark.parametrize(("outcome", "name"), [("not needed", "v0001"), ("published", "v0002")])
def test_an_ended_refresh_does_not_block_a_new_one(tmp_path: Path, outcome: str, name: str) -> None:
    ended = tmp_path / "tiny-refresh-v0001"
    ended.mkdir()
    (ended / "refresh.json").write_text(json.dumps({"stage": outcome, "parent": "v0001"}))
    options = RefreshOptions(tmp_path, traffic=tmp_path, drafts=tmp_path / "drafts")
    with refresh_folder(options, tmp_path / "tiny-refresh-", tmp_path / "drafts", "v0001", Console()) as folder:
        assert folder == tmp_path / f"tiny-refresh-{name}"
