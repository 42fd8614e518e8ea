"""Columns: templates over several, conversations however they are stored, answers as turns; nothing is left out without a word."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from data.prompts.prompt import PromptRow, PromptSource
from data.prompts.sources import load_source

ALPACA = [
    {
        "instruction": "Sort these.",
        "input": "pear fig",
        "output": "fig pear",
        "text": "Below is ... ### Response: fig pear",
    },
    {"instruction": "Name a colour.", "input": "", "output": "blue", "text": "Below is ... ### Response: blue"},
]
USER, REPLY = {"role": "user", "content": 'It\'s "2 + 2"?'}, {"role": "assistant", "content": "4\n"}
TURNS = [USER, REPLY]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(**keys) -> list[PromptRow]:
    return load_source(PromptSource(**keys))


@pytest.mark.parametrize(
    ("rows", "template", "texts"),
    [
        (ALPACA, "{instruction}\n\n{input}", ["Sort these.\n\npear fig", "Name a colour."]),
        (
            [
                {"instruction": "Sum up.", "context": "A text.", "response": "-"},
                {"instruction": "Hi.", "context": None},
            ],
            "{instruction}\n\n{context}",
            ["Sum up.\n\nA text.", "Hi."],
        ),
        (
            [{"context": "Ann won.", "question": "Who?", "answers": {"text": ["Ann"]}}, {"question": "Why?"}],
            "{context}\n\n{question}",
            ["Ann won.\n\nWho?", "Why?"],
        ),
    ],
)
def test_columns_that_are_one_prompt_are_joined_and_this_is_reported(tmp_path, caplog, rows, template, texts):
    path = write(tmp_path / "p.jsonl", rows)
    assert [row.text for row in load(path=path)] == texts
    assert f"a prompt is {json.dumps(template)}" in caplog.text
    assert [row.text for row in load(path=path, prompt_column=template)] == texts
    single = "question" if "question" in template else "instruction"
    caplog.clear()
    other = [row[single] for row in rows if row.get(single)]
    bad: list = []
    assert [row.text for row in load_source(PromptSource(path=path, prompt_column=single), bad_rows=bad)] == other
    assert f"to join them set prompt_column: {json.dumps(template)}" in caplog.text


def test_an_empty_column_leaves_out_the_text_before_it(tmp_path):
    rows = [{"a": "A", "b": "{a}", "n": 3}, {"a": "A", "b": " ", "n": 3}, {"b": "B", "n": 3}, {"a": "A"}]
    keys = {"path": write(tmp_path / "p.jsonl", rows), "prompt_column": "First {a}\\nThen {b} #{n}{}."}
    texts = ["First A\nThen {a} #3{}.", "First A #3{}.", "Then B #3{}.", "First A{}."]
    assert [row.text for row in load(**keys)] == texts
    write(tmp_path / "p.jsonl", [*rows, {"a": "", "c": "C"}])
    assert refused(load, **keys).startswith(f"{keys['path']}:5: column 'First ")
    write(tmp_path / "p.jsonl", [*rows, {"a": ["A"]}])
    assert refused(load, **keys).startswith(f"{keys['path']}:5: column 'a' contains a list")
    assert "no column 'instruct' (near: instruction, input)" in refused(
        load, path=write(tmp_path / "q.jsonl", ALPACA), prompt_column="{instruct}: {input}"
    )


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_message_that_is_not_read_is_reported(tmp_path, caplog, name):
    for row in ({"question": "Why?"}, {"messages": TURNS}):
        path = write(tmp_path / f"{len(row)}{next(iter(row))}.jsonl", [row | {name: "Be brief."}])
        load(path=path)
        assert f"{path}: column {name!r} is not part of the prompts" in caplog.text
        caplog.clear()
        load(path=path, system="Be kind.")
        assert caplog.text == ""


def conversations() -> dict[str, object]:
    """The same two turns as datasets store them."""
    sharegpt = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": REPLY["content"]}]
    return {
        "list": TURNS,
        "JSON": json.dumps(TURNS),
        "JSON twice": json.dumps(json.dumps(TURNS)),
        "JSON of each": [json.dumps(turn) for turn in TURNS],
        "object": {"messages": TURNS},
        "JSON of an object": json.dumps({"conversations": sharegpt}),
        "ShareGPT": json.dumps(sharegpt),
        "lists": {"role": ["user", "assistant"], "content": [USER["content"], REPLY["content"]]},
    }


@pytest.mark.parametrize("stored", conversations())
def test_a_conversation_is_read_however_it_is_stored(tmp_path, stored):
    value = conversations()[stored]
    write(tmp_path / "p.jsonl", [{"messages": value}])
    pq.write_table(pa.Table.from_pylist([{"messages": value}]), tmp_path / "p.parquet")
    names = ["p.jsonl", "p.parquet"]
    if isinstance(value, str):
        with (tmp_path / "p.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["messages"], [value]])
        names.append("p.csv")
    for name in names:
        (row,) = load(path=str(tmp_path / name))
        assert (row.text, row.messages, row.reference) == (None, (USER,), REPLY["content"]), name
        # A prompt column with a conversation is a conversation too, never the text of its JSON.
        renamed = [{"prompt": value}]
        assert load(path=write(tmp_path / "q.jsonl", renamed))[0].messages == (USER,)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"role": "user", "content"', "a str; give a list of turns with role and content, or its JSON"),
        ('{"a": 1}', "a str; give a list of turns with role and content, or its JSON"),
        ("[" * 100_000, "a str; give a list of turns with role and content, or its JSON"),
        ('[{"role": "usr", "content": "a"}]', "turn 1 of 'messages' has the role 'usr'"),
    ],
)
def test_a_bad_conversation_in_text_is_named(tmp_path, text, complaint):
    path = write(tmp_path / "p.jsonl", [{"messages": TURNS}, {"messages": text}])
    assert refused(load, path=path).startswith(f"{path}:2: ")
    assert complaint in refused(load, path=path)


ABOUT_JSON = [
    json.dumps({"messages": TURNS, "task": "Fix this JSON"}),
    json.dumps({"role": ["user"], "content": ["Hi."], "task": ["Fix this JSON"]}),
    '{"role": ["a"], "content": ["b"]}',
    '[{"role": "admin", "content": "b"}]',
    '[{"from": "Oslo", "to": "Rome"}]',
    '[{"role": ["user"], "content": "b"}]',
]


@pytest.mark.parametrize(
    "text", ["[1, 2]: what is next?", '{"a": 1}', '"Quoted."', "[{'role': x}]", '["role"]', *ABOUT_JSON]
)
def test_a_prompt_that_only_looks_like_a_conversation_stays_text(tmp_path, text):
    assert load(path=write(tmp_path / "p.jsonl", [{"prompt": text}]))[0].text == text


def test_prompt_and_completion_of_turns(tmp_path):
    call = {"role": "assistant", "content": "Wait.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    rows = [
        {"prompt": [USER], "completion": [REPLY], "tools": [{"name": "f"}]},
        {"prompt": json.dumps([USER]), "completion": json.dumps([call, {"role": "tool", "content": "4"}, REPLY])},
        {"prompt": [USER], "completion": [USER, call, USER, REPLY]},  # a whole conversation, as preferences have it
        {"prompt": [USER], "completion": " 4"},
        {"prompt": "Why?", "completion": " So.", "tools": [{"name": "f"}]},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    for keys in ({}, {"prompt_column": "prompt"}):
        found = load(path=path, reference_column="completion", **keys)
        assert [row.messages for row in found] == [(USER,)] * 4 + [None]
        assert [row.reference for row in found] == [REPLY["content"], "Wait.", REPLY["content"], " 4", " So."]
        assert [row.tools for row in found] == [({"name": "f"},), None, None, None, None]
    write(tmp_path / "p.jsonl", [*rows[:4], {"prompt": [USER], "completion": [{"role": "assistant", "content": ""}]}])
    assert refused(load, path=path, reference_column="completion") == (
        f"{path}:5: column 'completion' is empty; fill it or remove the row"
    )
