"""Splits: laws that hold for any rows (partition, stability, no overlap), and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from data.prompts.prompt import PromptRow
from data.prompts.split import content_hash, deduplicate, held_out, normalised_hash, remove_overlap, split_groups
from speculative.errors import UserError


def text_row(text: str, origin: str = "f:1") -> PromptRow:
    return PromptRow(text, None, None, "d", origin)


def chat_row(*turns: tuple[str, str]) -> PromptRow:
    return PromptRow(None, tuple({"role": role, "content": content} for role, content in turns), None, "d", "f:1")


# Few letters, so that equal and nearly equal prompts come up often.
TEXTS = st.text(alphabet="aAb .!-\u00e9\uff21", min_size=1, max_size=5)
PLAIN_ROWS = TEXTS.map(text_row)
CHAT_ROWS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=2).map(
    lambda turns: chat_row(*turns)
)
ROWS = st.lists(st.one_of(PLAIN_ROWS, CHAT_ROWS), min_size=2, max_size=30)
# Too few to share a first turn that counts as an instruction.
FEW_ROWS = st.lists(st.one_of(PLAIN_ROWS, CHAT_ROWS), min_size=2, max_size=8)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def test_content_hash_is_the_exact_content():
    # Prompt ids are in stores on people's disks: the value itself is the promise.
    assert content_hash(text_row("hello")) == "2cf24dba5fb0a30e"
    assert content_hash(text_row("hello")) == content_hash(PromptRow("hello", None, "ref", "other", "elsewhere:9"))
    assert content_hash(text_row("hello")) != content_hash(text_row("hello "))
    first = PromptRow(None, ({"role": "user", "content": "a"},), None, "d", "o")
    swapped = PromptRow(None, ({"content": "a", "role": "user"},), None, "d", "o")
    assert content_hash(first) == content_hash(swapped)
    assert content_hash(first) != content_hash(chat_row(("system", "a")))
    assert len(content_hash(text_row("lone surrogate \ud800"))) == 16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hello, world!", "  hello\tWORLD "),
        ("\uff28ello", "hello"),  # full-width
        ("\u2121 1", "tel 1"),  # one sign that stands for capitals
        ("Stra\u00dfe", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),  # composed and combining accent
        ('"Why?" (he asked)', "why he asked"),
    ],
)
def test_normalised_hash_sees_the_same_prompt(one, other):
    assert normalised_hash(text_row(one)) == normalised_hash(text_row(other))
    assert content_hash(text_row(one)) != content_hash(text_row(other))
    assert normalised_hash(chat_row(("user", one))) == normalised_hash(text_row(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3/2?", "What is 3-2?"),
        ("What is 3 / 2?", "What is 3 - 2?"),
        ("Is it -2?", "Is it 2?"),
        ("f(a, b)", "f(a_b)"),
        ("Write it in C#.", "Write it in C."),
        ("Round 3.5", "Round 35"),
        ("?", "!"),
    ],
)
def test_normalised_hash_keeps_meaning_apart(one, other):
    assert normalised_hash(text_row(one)) != normalised_hash(text_row(other))


def test_one_prompt_repeated_is_refused():
    message = refused(deduplicate, [text_row("a", "f:3"), text_row("a"), text_row("A!")])
    assert "3 rows, 1 unique (first at f:3)" in message
    assert len(deduplicate([text_row("a")])[0]) == 1


@quick
@given(ROWS)
def test_deduplicate_is_idempotent_and_leaves_no_twins(rows):
    if len({normalised_hash(row) for row in rows}) == 1:
        return
    kept, repeats = deduplicate(rows)
    assert deduplicate(kept) == (kept, 0)
    assert len({normalised_hash(row) for row in kept}) == len(kept)
    assert {normalised_hash(row) for row in kept} == {normalised_hash(row) for row in rows}
    assert repeats + len(kept) == len(rows)
    assert [row for row in rows if row in kept][:1] == kept[:1]


IDS = st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=30, unique=True)


def test_the_held_out_prompts_never_change():
    # Runs are compared on the same held-out prompts: the choice itself is the promise.
    ids = [content_hash(text_row(f"prompt {number}")) for number in range(40)]
    assert sorted(held_out(ids, 4)) == [6, 11, 20, 38]


def asked(row: PromptRow) -> str:
    """What a user said first, normalised as a prompt of that alone is."""
    first = next((turn for turn in row.messages or () if turn["role"] == "user"), (row.messages or ({},))[0])
    return normalised_hash(text_row(row.text if row.text is not None else first["content"]))


@quick
@given(FEW_ROWS, FEW_ROWS)
def test_no_question_is_on_both_sides_after_removal(train, heldout):
    held = {asked(row) for row in heldout}
    if all(asked(row) in held for row in train):
        assert f"all {len(train)} training prompts" in refused(remove_overlap, train, heldout)
        return
    kept, removed = remove_overlap(train, heldout)
    assert [row for row in train if asked(row) not in held] == kept
    assert len(kept) + removed == len(train)
    assert remove_overlap(kept, heldout) == (kept, 0)


def test_turns_of_a_conversation_and_a_question_under_another_system_message_are_together():
    rows = [
        chat_row(("user", "Where?")),
        chat_row(("user", "Where?"), ("assistant", "Here."), ("user", "Why?")),
        chat_row(("system", "Be brief."), ("user", "Where?")),
        text_row("Where?"),
        chat_row(("user", "Why?")),
        chat_row(("user", "where")),
    ]
    groups = split_groups(rows)
    assert len(set(groups[:4])) == 1
    assert len({groups[0], groups[4], groups[5]}) == 3
    assert len(set(split_groups(rows, normalised=True))) == 2, "where is Where?"


def test_an_instruction_that_all_rows_begin_with_does_not_hold_them_together():
    rows = [chat_row(("system", f"Text {number // 2}"), ("user", "Summarise it.")) for number in range(40)]
    groups = split_groups(rows)
    assert len(set(groups)) == 20
    assert all(groups[number] == groups[number + 1] for number in range(0, 40, 2))


def test_a_question_that_becomes_common_moves_only_rows_under_system_messages():
    greetings = [chat_row(("user", "Hello"), ("assistant", "Hi."), ("user", f"And {n}?")) for n in range(18)]
    others = [chat_row(("user", f"Question {n}")) for n in range(40)]
    under = [chat_row(("system", f"Text {n}"), ("user", "Hello")) for n in range(16)]
    few, many = [*others, *greetings[:16]], [*others, *greetings[:17]]
    assert split_groups(many)[:-1] == split_groups(few)
    asked_often, asked_more = [*few[:-8], *under[:8]], [*few[:-8], *under]
    same = len(asked_often) - 8
    assert split_groups(asked_more)[:same] == split_groups(asked_often)[:same]
    assert len(set(split_groups(asked_often)[same - 1 :])) == 1
    assert len(set(split_groups(asked_more)[same - 1 :])) == 17, "each text is another matter"


@quick
@given(IDS, st.text(min_size=5, max_size=6), st.data())
def test_a_new_prompt_takes_the_place_of_one_group_at_most(ids, new, data):
    groups = data.draw(st.lists(st.sampled_from("abcdefghij"), min_size=len(ids) + 1, max_size=len(ids) + 1))
    count = data.draw(st.integers(1, len(ids) - 1))
    try:
        before, after = held_out(ids, count, groups[:-1]), held_out([*ids, new], count, groups)
    except UserError:
        return  # one group reaches to the end
    assert set(after) - set(before) <= {len(ids)}
    left = {groups[number] for number in set(before) - set(after)}
    assert left <= {groups[before[-1]]}


@quick
@given(IDS, st.data())
def test_a_group_is_on_one_side_and_a_larger_count_holds_out_more(ids, data):
    groups = data.draw(st.lists(st.sampled_from("abcde"), min_size=len(ids), max_size=len(ids)))
    count = data.draw(st.integers(1, len(ids) - 1))
    if len(set(groups)) == 1:
        assert "lower data.heldout_count" in refused(held_out, ids, count, groups)
        return
    try:
        numbers = held_out(ids, count, groups)
    except UserError:
        return  # the last group reaches to the end
    inside = {groups[number] for number in numbers}
    assert not inside & {group for number, group in enumerate(groups) if number not in numbers}
    assert len(numbers) >= count
    smaller = held_out(ids, data.draw(st.integers(1, count)), groups)
    assert numbers[: len(smaller)] == smaller
