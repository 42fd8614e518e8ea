"""Prompts made by us: what is made of what, and what may not be among them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from data.prompts.prompt import PromptRow, Template
from data.prompts.template import render_opening, render_prompt
from data.responses.rendered import RenderedPrompt
from data.responses.synthetic import mixed_rows, sampled_rows, synthetic_rows
from distill.models.load import load_tokenizer
from speculative.errors import UserError


def asked(*texts: str) -> list[PromptRow]:
    return [PromptRow(text, None, None, "d", f"row:{number}") for number, text in enumerate(texts)]


def talk(*texts: str) -> PromptRow:
    """A conversation; the user begins and ends it."""
    roles = ("user", "assistant")
    turns = tuple({"role": roles[number % 2], "content": text} for number, text in enumerate(texts))
    return PromptRow(None, turns, None, "d", "talk")


def given(*rows: PromptRow):
    """Candidates that are there already."""
    return lambda wanted: (rows[:wanted], Counter())


def test_each_candidate_that_may_not_be_is_counted_by_its_fault() -> None:
    own, heldout = asked("How many are there?"), [*asked("Who won in 1990?"), talk("Hello you", "yes", "and now")]
    candidates = [
        *asked("", "how many ARE there", "who won in 1990", "a much too long one", "What is it", "what is it?", "Why"),
        talk("hello you!", "no", "what else"),
        talk("Good day", "yes", "and now"),
    ]
    kept, counts = synthetic_rows(
        own, heldout, 8, given(*candidates), lambda row: row.text is None or len(row.text.split()) < 5
    )
    assert [row.text or row.messages[-1]["content"] for row in kept] == ["What is it", "Why", "and now"]  # type: ignore[index]
    assert counts == {"made": 9, "kept": 3, "empty": 1, "duplicates": 2, "held out": 2, "too long": 1}


def test_a_held_out_question_is_not_asked_later_nor_by_many() -> None:
    def under(system: str, question: str) -> PromptRow:
        turns = {"role": "system", "content": system}, {"role": "user", "content": question}
        return PromptRow(None, turns, None, "d", "talk")

    own = [talk("hi", "yes", "who are you"), *(under(f"s{number}", f"q{number}") for number in range(40))]
    # So many that split_groups takes it for an instruction, other under another system message.
    candidates = [talk("hi", "yes", "who WON"), *(under(f"s{number}", "who won?") for number in range(40))]
    kept, counts = synthetic_rows(own, [under("other", "Who won?")], 41, given(*candidates), lambda row: True)
    assert (kept, counts["held out"]) == ([], 41)


def test_more_candidates_are_made_until_there_are_enough() -> None:
    wanted: list[int] = []

    def candidates(count: int) -> tuple[Sequence[PromptRow], Counter[str]]:
        wanted.append(count)
        return asked(*(f"question {number // 3}" for number in range(count))), Counter()

    kept, counts = synthetic_rows([], asked("other"), 20, candidates, lambda row: True)
    assert wanted == [25, 50, 100]
    assert [row.text for row in kept] == [f"question {number}" for number in range(20)]
    assert counts["kept"] == 20
    kept, _ = synthetic_rows([], asked("other"), 20, given(*asked("one", "two")), lambda row: True)
    assert len(kept) == 2, "fewer where there are no more"


def test_no_prompt_of_the_held_out_set_is_ever_made() -> None:
    texts = [f"show the {noun} of the {other}" for noun in ("name", "age", "town") for other in ("man", "team", "club")]
    own, heldout = asked(*texts[:6]), asked(*(text.title() + "?!" for text in texts[6:]))
    candidates = mixed_rows([*own, *asked(*texts[6:])], 0)  # even where the words of all are mixed
    kept, counts = synthetic_rows(own, heldout, 200, candidates, lambda row: True)
    assert not {row.text for row in kept} & set(texts)
    assert counts["held out"] > 0


def test_a_mix_begins_like_one_prompt_and_ends_like_another() -> None:
    own = asked("what is the name of the man", "tell me the name of a  club", "nothing alike")
    made, _ = mixed_rows(own, 3)(20)
    again, _ = mixed_rows(own, 3)(40)
    assert again[:20] == made, "fewer are among more"
    assert {row.text for row in made} == {"what is the name of a  club", "tell me the name of the man"}
    behind, _ = mixed_rows([talk("hi", "yes", "the name of it"), talk("oh", "no", "say the name twice")], 0)(9)
    for row in behind:
        assert row.messages is not None
        assert [turn["content"] for turn in row.messages] in (
            ["hi", "yes", "the name twice"],
            ["oh", "no", "say the name of it"],
        )
    with pytest.raises(UserError, match="share two neighbouring words"):
        mixed_rows(asked("one two", "three four"), 0)


def test_an_opening_ends_where_the_user_would_write(chat_target: Path) -> None:
    tokenizer = load_tokenizer(str(chat_target))
    row = talk("hi there", "yes", "what now")
    opening = render_opening(row, tokenizer, Template())
    assert tokenizer.decode(opening) == "user: hi there;assistant: yes;user: "
    whole = tokenizer.decode(render_prompt(row, tokenizer, Template(mode="chat")))
    assert whole.startswith("user: hi there;assistant: yes;user: what now;")


def test_a_sampled_turn_comes_after_the_turns_before_it(chat_target: Path) -> None:
    tokenizer, end = load_tokenizer(str(chat_target)), 2
    own = [talk("hi", "yes", "what now"), talk("only one"), talk("another one")]
    asked_for: list[tuple[int, int]] = []

    def sampler(openings: Sequence[RenderedPrompt], samples: int) -> list[tuple[str, list[int]]]:
        asked_for.append((len(openings), samples))
        said = [[*tokenizer("and then ", add_special_tokens=False).input_ids, end], [5, 6]]
        return [(opening.prompt_id, said[sample % 2]) for opening in openings for sample in range(samples)]

    made, left_out = sampled_rows(own, tokenizer, sampler, {end}, 0, Template())(4)
    assert asked_for == [(2, 2)], "questions without anything before them have one opening"
    assert left_out == {"too long": 2}, "the turns that did not end"
    contents = sorted([turn["content"] for turn in row.messages or ()] for row in made)
    assert contents == [["and then"], ["hi", "yes", "and then"]]
