"""The choice of arms: stable, in proportion to the shares, and monotone when a share grows."""

import itertools
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.live.arms import Arm, Arms, read_arms, write_arms
from speculative.errors import UserError

KEY = b"the log's secret"
TALKS = [f"conversation {number}".encode() for number in range(4000)]


def two(share: float) -> Arms:
    return Arms("flags", (Arm("a", "http://h:1", 1 - share, "v1"), Arm("b", "http://h:2", share, "v2")))


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=5), st.floats(1.01, 5))
def test_among_many_arms_nothing_moves_but_to_the_one_that_grows(weights: list[float], factor: float) -> None:
    grown = [weights[0] * factor, *weights[1:]]
    before, after = (
        Arms(
            "flags", tuple(Arm(f"arm{i}", f"http://h:{i + 1}", weight / sum(all_of)) for i, weight in enumerate(all_of))
        )
        for all_of in (weights, grown)
    )
    for talk in TALKS[:200]:
        was, now = before.choose(talk, KEY).name, after.choose(talk, KEY).name
        assert now in (was, "arm0")


def test_arms_get_their_shares_and_a_conversation_its_arm_in_every_process() -> None:
    chosen = [two(0.1).choose(talk, KEY).name for talk in TALKS]
    assert abs(chosen.count("b") / len(TALKS) - 0.1) < 4 * (0.1 * 0.9 / len(TALKS)) ** 0.5
    # Conversations must keep their arm when the gateway is restarted or updated.
    assert [two(0.5).choose(talk, KEY).name for talk in TALKS[:12]] == list("bbabaababaaa")


def test_without_the_key_no_client_can_choose_its_arm() -> None:
    keys = [f"log {number}".encode() for number in range(4)]
    chosen = [[two(0.5).choose(talk, key).name for talk in TALKS] for key in keys]
    for one, other in itertools.combinations(chosen, 2):
        same = sum(map(str.__eq__, one, other)) / len(TALKS)
        assert abs(same - 0.5) < 5 * (0.25 / len(TALKS)) ** 0.5


def test_under_load_the_arm_without_a_draft_serves() -> None:
    arms = Arms("flags", (*two(0.5).arms, Arm("plain", "http://h:3", 0, "none", drafts=False)))
    assert {arms.choose(talk, KEY, shed=True).name for talk in TALKS[:9]} == {"plain"}
    assert "plain" not in {arms.choose(talk, KEY).name for talk in TALKS}
    assert two(1.0).choose(b"x", KEY, shed=True).name == "b"


def test_arms_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "arms.json"
    write_arms(path, two(0.25))
    assert read_arms(path) == two(0.25)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"share": 0.5}, "add up to 1.4"),
        ({"share": 1.5}, "arms.0.share: .* 1 .not '1.5'."),
        ({"share": "0.1"}, "arms.0.share"),
        ({"url": "file:///etc/passwd"}, "arms.0.url: give an address"),
        ({"name": "b"}, "two arms have the same name"),
        ({"port": 1}, "arms.0.port"),
        ({"draft_version": "a b"}, "arms.0.draft_version"),
    ],
)
def test_arms_that_cannot_be_are_refused_by_file_and_key(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "arms.json"
    write_arms(path, two(0.9))
    found = json.loads(path.read_text())
    found["arms"][0] |= change
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=rf"arms\.json: .*{said}"):
        read_arms(path)
    for odd in ("[]", "[" * 100_000):
        path.write_text(odd)
        with pytest.raises(UserError, match=r"arms\.json: "):
            read_arms(path)
