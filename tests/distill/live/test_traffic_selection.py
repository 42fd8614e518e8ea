"""Selection of requests: reasons, groups, time split, caps."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic_log import SAMPLING, record_of

from distill.live.traffic.selection import CONTINUED, Wanted, capped, fault_of, groups_of, split_by_time

WANTED = Wanted({"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"target"}, 10, 100)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"sampling": {**SAMPLING, "top_k": -1, "max_tokens": 5}}, ""),
        ({"finish": "length", "draft_version": "other"}, ""),
        ({"prompt_ids": None}, "no text"),
        ({"target_version": "another"}, "another target version (another)"),
        ({"constrained": True}, "a constraint on the text"),
        ({"finish": "cancelled"}, "finish cancelled"),
        ({"sampling": None}, "unknown sampling settings"),
        ({"sampling": {**SAMPLING, "temperature": 0.8}}, "other sampling settings"),
        ({"sampling": {**SAMPLING, "top_p": None}}, "other sampling settings"),
        ({"sampling": {**SAMPLING, "temperature": 0}}, "other sampling settings"),
        ({"response_ids": ()}, "empty"),
        ({"response_ids": (7, 8, 100, 2)}, "ids beyond the target's vocabulary"),
        ({"prompt_ids": tuple(range(11))}, "too long"),
    ],
)
def test_why_a_response_is_not_trained_on(changes: dict[str, Any], fault: str) -> None:
    assert fault_of(record_of(1, **changes), WANTED) == fault


def test_greedy_has_one_setting_only() -> None:
    greedy = dataclasses.replace(WANTED, sampling={**WANTED.sampling, "temperature": 0})
    assert fault_of(record_of(1, sampling={**SAMPLING, "temperature": 0.0, "top_p": 0.5}), greedy) == ""


def test_near_equal_prompts_and_turns_of_a_conversation_are_one_group() -> None:
    answer = tuple(range(50, 50 + CONTINUED))
    first = record_of(0, prompt_ids=(1, 2), response_ids=(*answer, 2), accepted=None)
    second = record_of(1, prompt_ids=(1, 2, *answer, 9, 3), response_ids=(*answer, 2), accepted=None)
    third = record_of(2, prompt_ids=(*second.prompt_ids, *answer, 3), response_ids=(4,), accepted=None)
    retold = record_of(3, prompt_ids=(8, 8))  # other tokens of the same text
    later = record_of(5, prompt_ids=(70, 71), conversation="cd" * 32)  # its template removed the response's reasoning
    second = dataclasses.replace(second, conversation="cd" * 32)
    other = record_of(4, prompt_ids=(1, 2, 3))  # begins like the first, but does not continue its response
    texts = ["c", "other", "Hello, you!", "b", "hello you", "d"]
    groups = groups_of([third, other, retold, second, first, later], texts)
    assert len(set(groups)) == 2
    assert groups.count(groups[0]) == 5
    assert groups[1] not in (groups[0], groups[2])


@given(st.data())
def test_groups_are_those_of_comparing_all_with_all(data: st.DataObject) -> None:
    ids, answers = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for _ in range(data.draw(st.integers(2, 8))):
        before = data.draw(st.sampled_from([(), *(one + other for one, other in zip(ids, answers, strict=True))]))
        ids.append((*before[: data.draw(st.integers(0, len(before)))], data.draw(st.integers(0, 1))))
        answers.append(tuple(data.draw(st.lists(st.integers(0, 1), min_size=CONTINUED - 1, max_size=CONTINUED + 1))))
    both = list(zip(ids, answers, strict=True))
    records = [record_of(n, prompt_ids=one, response_ids=two, accepted=None) for n, (one, two) in enumerate(both)]
    keys = [one + two[:CONTINUED] if len(two) >= CONTINUED else None for one, two in both]
    found = list(range(len(ids)))
    for i, j in list(itertools.product(range(len(ids)), repeat=2)) * len(ids):
        key = keys[i]
        begun = key is not None and any(one is not None and one[: len(key)] == key for one in (ids[j], keys[j]))
        if begun or ids[i] == ids[j]:
            found[i] = found[j] = min(found[i], found[j])
    groups = groups_of(records, list(map(str, ids)))
    assert [[one == other for other in groups] for one in groups] == [
        [one == other for other in found] for one in found
    ]


@given(
    st.lists(st.integers(0, 30), min_size=10, max_size=60), st.integers(2, 8), st.sets(st.integers(0, 30), max_size=5)
)
def test_the_past_is_trained_on_and_the_latest_held_out(groups: list[int], heldout: int, trained: set[int]) -> None:
    train, held = split_by_time(groups, heldout, trained)
    assert len(held) <= heldout
    assert not {groups[number] for number in train} & {groups[number] for number in held}
    assert not {groups[number] for number in held} & trained
    assert len({groups[number] for number in held}) == len(held)
    if held:
        assert max(train, default=-1) < min(held)
        assert min(held) >= len(groups) - len(groups) // 5


def test_new_questions_are_held_out_before_old_ones() -> None:
    groups = [0, 1, 2, 3, 4, 5, 6, 0, 7, 1, *range(8, 13), 0, 6, 20, 21, 0]  # of the last four, 20 and 21 are new
    assert split_by_time(groups, 2) == (list(range(17)), [17, 18])
    train, held = split_by_time(groups, 3)
    assert held == [17, 18, 19], "then what was asked before, which is no longer trained on"
    assert train == [number for number in range(17) if groups[number] != 0]


def test_a_cap_takes_the_first_in_order() -> None:
    order = [f"{number:02d}" for number in range(20, 0, -1)]
    assert capped(range(20), [0] * 10 + [1] * 10, order) == [*range(2, 10), *range(12, 20)]
