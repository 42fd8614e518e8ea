"""`understudy traffic review`: which requests cost most, what is said of them, and where that goes."""

import io
import json
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from rich.console import Console
from test_traffic import own_run, traffic_of
from traffic_log import record_of, write_log

from data.responses.rendered import StoredPrompts
from distill.live.options import ExportTrafficOptions, ReviewOptions
from distill.live.traffic.export import export_traffic
from distill.live.traffic.exported import PROMPT_FILES, row_id
from distill.live.traffic.forget import forget
from distill.live.traffic.record import read_salt
from distill.live.traffic.review import REVIEWS, costliest, read_reviews, review_traffic

__all__ = ["own_run"]


def reviewed(options: ReviewOptions) -> str:
    console = Console(file=io.StringIO(), width=200)
    review_traffic(options, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 9)), min_size=1, max_size=30))
def test_what_requests_lost_is_what_others_of_their_slice_gained(told: list[tuple[str, int]]) -> None:
    records = [record_of(number, slice=name, accepted=kept) for number, (name, kept) in enumerate(told)]
    found = costliest(records)
    for name in ("a", "b"):
        own = [kept for slice_, kept in told if slice_ == name]
        average = sum(own) / max(1, len(own))
        lost = sum(cost for record, cost in found if record.slice == name)
        assert lost == pytest.approx(sum(max(0.0, average - kept) for kept in own))
    assert [cost for _, cost in found] == sorted((cost for _, cost in found), reverse=True)


def test_constrained_requests_and_those_without_counts_cost_nothing() -> None:
    records = [record_of(0, accepted=9), record_of(1, accepted=0, constrained=True), record_of(2, accepted=1)]
    records.append(record_of(3, accepted=None, drafted=None, blocks=None))
    assert [record.id for record, _ in costliest(records)] == ["request-0002"]


def test_a_review_shows_the_costliest_first_with_text_where_it_is_kept(tmp_path: Path, tiny_target: Path) -> None:
    kept = record_of(1, accepted=0)
    log = write_log(tmp_path, [record_of(0, accepted=9), kept, record_of(2, accepted=1).without_text()])
    first, second = json.loads(reviewed(ReviewOptions(log, tokenizer=tiny_target, as_json=True)))
    assert (first["id"], first["lost"], first["review"]) == (kept.id, pytest.approx(10 / 3), "")
    assert first["prompt"]
    assert first["response"]
    assert second["prompt"] == second["response"] == ""
    assert len(json.loads(reviewed(ReviewOptions(log, most=1, as_json=True)))) == 1
    shown = reviewed(ReviewOptions(log))
    assert shown.index(kept.id) < shown.index("request-0002")
    assert "response" not in shown


def test_what_a_person_says_is_kept_without_ids_and_can_be_changed(tmp_path: Path) -> None:
    log = write_log(tmp_path, [record_of(number, accepted=number) for number in range(4)])
    reviewed(ReviewOptions(log, say="bad", id=["request-0000", "request-0001"]))
    assert "request-0001: good" not in reviewed(ReviewOptions(log, say="good", id=["request-0001"]))
    told = {one["id"]: one["review"] for one in json.loads(reviewed(ReviewOptions(log, as_json=True)))}
    assert told == {"request-0000": "bad", "request-0001": "good"}
    assert "request" not in (log / REVIEWS).read_text()
    assert stat.S_IMODE((log / REVIEWS).stat().st_mode) == 0o600


def test_an_export_leaves_out_what_is_ignored_and_has_the_rest_as_a_column(tmp_path: Path, own_run: Path) -> None:
    records = traffic_of(own_run)
    log = write_log(tmp_path / "log", records)
    reviewed(ReviewOptions(log, say="ignore", id=[records[3].id]))
    reviewed(ReviewOptions(log, say="bad", id=[records[5].id, records[-1].id]))
    made = export_traffic(ExportTrafficOptions(log, own_run, tmp_path / "may", heldout=4))
    assert (made.train, made.heldout, made.left_out) == (55, 4, {"you ignore them": 1})
    salt = read_salt(log)
    train, heldout = (
        {one.prompt_id: one.review for one in StoredPrompts(tmp_path / "may" / name)} for name in PROMPT_FILES
    )
    assert row_id(salt, records[3].id) not in train
    assert {name for name, said in train.items() if said} == {row_id(salt, records[5].id)}
    assert heldout[row_id(salt, records[-1].id)] == "bad"
    forget(log, [records[7].id])  # rewrites the file; the column stays
    left = {one.prompt_id: one.review for one in StoredPrompts(tmp_path / "may" / PROMPT_FILES[0])}
    assert left == {name: said for name, said in train.items() if name != row_id(salt, records[7].id)}


def test_a_forgotten_request_loses_its_review(tmp_path: Path) -> None:
    log = write_log(tmp_path, [record_of(number) for number in range(4)])
    reviewed(ReviewOptions(log, say="bad", id=["request-0000", "request-0002"]))
    forget(log, ["request-0002"])
    assert list(read_reviews(log)) == [row_id(read_salt(log), "request-0000")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"say": "fine", "id": ["request-0000"]}, "--as fine: choose good, bad, ignore"),
        ({"say": "bad"}, "--as and --id belong together"),
        ({"id": ["request-0000"]}, "--as and --id belong together"),
        ({"say": "bad", "id": ["request-0000", "other"]}, "--id other: no request of"),
    ],
)
def test_a_wrong_review_is_refused_and_changes_nothing(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    log = write_log(tmp_path, [record_of(number) for number in range(2)])
    assert words in refused(lambda: reviewed(ReviewOptions(log, **changes)))  # type: ignore[arg-type]
    assert not (log / REVIEWS).exists()


def test_a_damaged_file_of_reviews_is_named(tmp_path: Path) -> None:
    log = write_log(tmp_path, [record_of(0, accepted=0), record_of(1, accepted=9)])
    for damaged in ('{"a": "fine"}', "[", '{"a": 1}'):
        (log / REVIEWS).write_text(damaged)
        assert f"{log / REVIEWS}: damaged" in refused(lambda: reviewed(ReviewOptions(log)))
    shutil.rmtree(log)
    assert "no traffic log" in refused(lambda: reviewed(ReviewOptions(log)))
