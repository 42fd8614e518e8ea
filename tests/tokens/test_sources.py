"""Sources: every kind of file gives the same rows, and every mistake of the user is named in one line."""

import bz2
import gzip
import json
import logging
import lzma
import tracemalloc
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refused

from data.prompts.prompt import PromptRow, PromptSource, Template
from data.prompts.sources import load_source
from data.prompts.split import content_hash, deduplicate
from data.prompts.template import render_prompt
from data.responses.rendered import RenderedPrompt, write_prompts
from speculative.errors import UserError

ROWS = [
    {"question": "What is 2 + 2?", "answer": "4", "topic": "sums"},
    {"question": "Name a colour.", "answer": "blue", "topic": "words"},
    {"question": "And now?", "answer": "Later.", "topic": "words"},
]


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress}


def write(path: Path, content: str | bytes | list) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(content))
    return str(path)


def load(**keys) -> list[PromptRow]:
    return load_source(PromptSource(**keys))


def refusal(**keys) -> str:
    return refused(load, **keys)


def test_every_format_gives_the_same_rows(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl.gz", ROWS)
    write(tmp_path / "c.json", json.dumps(ROWS, indent=2))
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "d.parquet"))
    write(tmp_path / "e.csv", "question,answer,topic\n" + "".join(",".join(row.values()) + "\n" for row in ROWS))
    mapping = {"prompt_column": "question", "reference_column": "answer", "domain_column": "topic"}
    packed = [f"f{number}.jsonl{suffix}" for number, suffix in enumerate(COMPRESS)]
    for name in packed:
        write(tmp_path / name, ROWS)
    assert refusal(path=write(tmp_path / "prompts.data", ROWS)).endswith(
        "set format to jsonl, json, parquet, txt, csv, arrow"
    )
    assert len(load(path=str(tmp_path / "prompts.data"), format="jsonl")) == 3
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.parquet", "e.csv", *packed):
        path = str(tmp_path / name)
        expected = [
            PromptRow(row["question"], None, row["answer"], row["topic"], f"{path}:{number}")
            for number, row in enumerate(ROWS, start=1)
        ]
        assert load(path=path, **mapping) == expected


def test_turns_of_unequal_keys_come_as_they_were_written(tmp_path, monkeypatch):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    user = {"role": "user", "content": "2 + 2?"}
    turns = [user, call, {"role": "tool", "content": "4", "name": "add"}, user]
    made = datasets.Dataset.from_list([{"messages": turns}, {"messages": turns[:1]}], on_mixed_types="use_json")
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    for path in (str(tmp_path / "a.parquet"), str(arrow), "some-org/chats"):
        assert [row.messages for row in load(path=path)] == [tuple(turns), (user,)], path


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("strings.json", '["a", "b"]', {1: "a", 2: "b"}),
        ("long.csv", f"text,n\n{'a' * 200_000},1\n", {1: "a" * 200_000}),
        ("old.csv", 'text,n\ra,1\r"b\rc\r\nd",2\r', {1: "a", 2: "b\rc\r\nd"}),
        ("old.txt", "a\rb\u2028b\r\n\rc\x0b\n", {1: "a", 2: "b\u2028b", 4: "c\x0b"}),
    ],
)
def test_odd_files_are_read(tmp_path, name, content, prompts):
    rows = load(path=write(tmp_path / name, content), prompt_column="text")
    assert {int(row.origin.rpartition(":")[2]): row.text for row in rows} == prompts


def test_text_is_one_prompt_a_line_without_blank_lines(tmp_path):
    path = write(tmp_path / "p.txt", "\ufefffirst\n\n  \nsecond\u2028still second\r\nthird")
    rows = load(path=path)
    assert [row.text for row in rows] == ["first", "second\u2028still second", "third"]
    assert [row.origin for row in rows] == [f"{path}:{n}" for n in (1, 4, 5)]
    assert rows[0].domain == "p"


def test_glob_directory_and_limit(tmp_path):
    write(tmp_path / "set" / "b.jsonl", ROWS[1:])
    write(tmp_path / "set" / "a.jsonl", ROWS[:1])
    for path in (str(tmp_path / "set" / "*.jsonl"), str(tmp_path / "set")):
        rows = load(path=path)
        assert [row.text for row in rows] == [row["question"] for row in ROWS]
        assert {row.domain for row in rows} == {"set"}
        limited = load(path=path, limit=2)
        assert len(limited) == 2
        assert [row for row in rows if row in limited] == limited, "in their order"
    assert "matches no file" in refusal(path=str(tmp_path / "*.parquet"))


def test_directory_of_a_downloaded_hub_dataset(tmp_path):
    config = "---\nconfigs:\n- config_name: {}\n  data_files:\n  - split: train\n    path: one/*.jsonl\n{}---\n"
    second = "- config_name: two\n  data_files:\n  - split: test\n    path: two/t.jsonl\n"
    write(tmp_path / "README.md", config.format("one", second))
    write(tmp_path / "one" / "x.jsonl", ROWS)
    write(tmp_path / "two" / "t.jsonl", ROWS[:1])
    assert len(load(path=str(tmp_path), subset="one")) == 3
    assert len(load(path=str(tmp_path), subset="two", split="test")) == 1
    assert "['one', 'two']" in refusal(path=str(tmp_path))
    assert "no split 'tests' (near: test); it has test" in refusal(path=str(tmp_path), subset="two", split="tests")
    (tmp_path / "void").mkdir()
    assert "doesn't contain any data files" in refusal(path=str(tmp_path / "void"))


def test_usual_column_is_taken_and_reported_only_when_it_is_the_only_one(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="data.prompts.columns")
    path = write(tmp_path / "p.jsonl", ROWS)
    assert load(path=path)[0].text == "What is 2 + 2?"
    assert "taking column 'question' as the prompt" in caplog.text

    both = refusal(path=write(tmp_path / "two.jsonl", [{"prompt": "a", "input": "b"}]))
    assert "2 columns match (prompt, input)" in both
    none = refusal(path=write(tmp_path / "none.jsonl", [{"ask": "a", "say": "b"}]))
    assert "no column has a common name" in none
    assert "ask, say" in none
    # A column that has a role already is not a candidate.
    row = load(path=write(tmp_path / "ref.jsonl", [{"prompt": "a", "text": "b"}]), reference_column="text")[0]
    assert (row.text, row.reference) == ("a", "b")


def test_misspelt_column_names_the_nearest(tmp_path):
    path = write(tmp_path / "p.jsonl", ROWS)
    for role in ("prompt_column", "messages_column"):
        assert "no column 'qestion' (near: question); it has" in refusal(path=path, **{role: "qestion"})
    assert "near: answer" in refusal(path=path, reference_column="anser")
    assert "near: topic" in refusal(path=path, domain_column="topics")
    assert "exclude each other" in refusal(path=path, prompt_column="question", messages_column="answer")


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
@pytest.mark.parametrize(
    ("bad_line", "complaint"),
    [
        (b'{"prompt": "b"', "not valid JSON"),
        (b'["b"]', "a line must be a JSON object"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 (byte 0xe9)"),
        (b'{"prompt": "a", "prompt": "b"}', "not valid JSON ('prompt' is specified twice)"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit (4300 digits)"),
        (b'{"prompt": ' + b"[" * 200_000, "not valid JSON (maximum recursion depth exceeded"),
    ],
)
def test_malformed_line_is_named(tmp_path, name, bad_line, complaint):
    path = write(tmp_path / name, b'{"prompt": "a"}\n\n' + bad_line + b'\n{"prompt": "c"}\n')
    assert refusal(path=path).startswith(f"{path}:3: {complaint}")


def test_empty_sources(tmp_path):
    for name in ("a.jsonl", "b.txt", "c.jsonl.gz"):
        for content in ("", " \n\n"):
            assert "the source is empty" in refusal(path=write(tmp_path / name, content))
    assert "the source is empty" in refusal(path=write(tmp_path / "d.json", "[]"))


def test_missing_file_names_near_ones(tmp_path, monkeypatch):
    write(tmp_path / "data" / "train.jsonl", ROWS)
    assert "(near: train.jsonl)" in refusal(path=str(tmp_path / "data" / "trian.jsonl"))
    assert "nor a folder" in refusal(path=str(tmp_path / "dta" / "train.jsonl"))
    # Relative paths of two parts look like hub ids but for their suffix, even an unknown one.
    monkeypatch.chdir(tmp_path)
    assert "(near: train.jsonl)" in refusal(path="data/train.jsnl")
    assert "no such file" in refusal(path="train", format="jsonl")
    assert "~nobody-of-this-name/p.jsonl: no such file" in refusal(path="~nobody-of-this-name/p.jsonl")
    assert "streaming is for hub datasets" in refusal(path="data/train.jsonl", streaming=True)


def test_domains(tmp_path):
    rows = [{"prompt": "a", "d": ["x", "y"]}, {"prompt": "b", "d": None}, {"prompt": "c", "d": []}]
    path = write(tmp_path / "p.jsonl", rows)
    assert [row.domain for row in load(path=path, domain_column="d")] == ["x+y", "p", "p"]
    assert [row.domain for row in load(path=path, domain_column="d", domain="rest")] == ["x+y", "rest", "rest"]
    assert load(path=path, domain="all")[0].domain == "all"
    numbers = write(tmp_path / "n.jsonl", [{"prompt": "a", "d": 7}])
    assert load(path=numbers, domain_column="d")[0].domain == "7"
    nested = write(tmp_path / "o.jsonl", [{"prompt": "a", "d": {"k": 1}}])
    assert "domain column 'd' contains a dict" in refusal(path=nested, domain_column="d")


def test_system_message_makes_a_conversation_and_keeps_an_existing_one(tmp_path):
    plain = load(path=write(tmp_path / "p.jsonl", ROWS), reference_column="answer", system="Be kind.")[0]
    assert plain.text is None
    assert plain.reference == "4"
    assert plain.messages == ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2 + 2?"})

    own = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path / "m.jsonl", [{"messages": own}, {"messages": own[1:]}])
    first, second = load(path=path, system="Be kind.")
    assert [first.messages[0]["content"], second.messages[0]["content"]] == ["Be terse.", "Be kind."]


def test_tool_turns_keep_what_templates_read(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock", "arguments": "{}"}]}
    turns = [
        {"role": "user", "content": "Time?"},
        call,
        {"role": "tool", "name": "clock", "content": "noon", "id": "9"},
    ]
    row = load(path=write(tmp_path / "t.jsonl", [{"messages": turns}]))[0]
    assert row.messages[1] == {**call, "content": ""}
    assert row.messages[2] == {"role": "tool", "content": "noon", "name": "clock"}


@pytest.mark.parametrize(
    ("column", "value", "complaint"),
    [
        ("prompt", None, "column 'prompt' is empty"),
        ("prompt", " \n", "column 'prompt' is empty"),
        ("prompt", 3, "column 'prompt' contains a int, not a string"),
        ("prompt", ["a"], "if it contains conversations, set it as messages_column"),
        ("messages", [], "an empty list"),
        ("messages", None, "nothing"),
        ("messages", "Hi", "a str; give a list of turns with role and content, or its JSON"),
        ("messages", '[{"role": "user"', "a str; give a list of turns with role and content, or its JSON"),
        ("messages", ["Hi"], "turn 1 of 'messages' is a str"),
        ("messages", [{"role": "usr", "content": "Hi"}], "turn 1 of 'messages' has the role 'usr'"),
        ("messages", [{"role": "user", "content": None}], "has no content"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "text"}]}],
            "turn 1 of 'messages' has a part of type 'text', which is not text",
        ),
        (
            "messages",
            [{"role": "user", "content": ["Look.", {"type": "image_url", "image_url": {"url": "x"}}]}],
            "a part of type 'image_url'",
        ),
        ("messages", [{"role": "user", "content": " "}], "turn 1 of 'messages' is empty"),
        ("messages", [{"role": "assistant", "content": "Hi"}], "no user turn"),
        ("messages", [{"role": "system", "content": "Hi"}], "no user turn"),
        ("tools", "[{]", "column 'tools' is not JSON"),
        ("tools", '["f"]', "tools are a list of objects"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path, column, value, complaint):
    good = {"prompt": "Hi"} if column == "prompt" else {"messages": [{"role": "user", "content": "Hi"}]}
    path = write(tmp_path / "m.jsonl", [good, good | {column: value}])
    message = refusal(path=path)
    assert message.startswith(f"{path}:2: ")
    assert complaint in message


def test_every_assistant_turn_may_be_a_prompt(tmp_path):
    said = [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here."},
        {"role": "assistant", "content": "Or there."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "tool", "content": "4"},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": said}) + "\n")
    found = load(path=str(path), turns="all")
    assert [len(row.messages) for row in found] == [2, 5, 7]
    assert [row.reference for row in found] == ["Here.", "So.", None]
    assert [row.origin.rpartition("/")[2] for row in found] == ["chat.jsonl:1#3", "chat.jsonl:1#6", "chat.jsonl:1#8"]
    (last,) = load(path=str(path))
    assert (len(last.messages), last.origin.rpartition("/")[2]) == (7, "chat.jsonl:1")


def test_bad_rows_are_left_out_and_reported_where_that_is_wanted(tmp_path):
    good = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    bad = [[{"from": "human", "value": " "}], [], [{"from": "bing", "value": "a"}], [{"from": "gpt", "value": "b"}]]
    path = tmp_path / "sharegpt.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [good, *({"conversations": one} for one in bad), good]))
    told = []
    found = load_source(PromptSource(path=str(path)), bad_rows=told)
    assert [row.origin.rpartition(":")[2] for row in found] == ["1", "6"]
    assert [str(error).split(": ")[0].rpartition(":")[2] for error in told] == ["2", "3", "4", "5"]
    with pytest.raises(UserError, match="turn 1 of 'conversations' is empty"):
        load(path=str(path))
    path.write_text("".join(json.dumps({"conversations": one}) + "\n" for one in bad[:1] * 3))
    with pytest.raises(UserError, match="turn 1 of 'conversations' is empty"):  # all of them: a mistake, not dirt
        load_source(PromptSource(path=str(path)), bad_rows=[])


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_come_as_they_were_written(tmp_path, as_json):
    search = {
        "type": "function",
        "function": {"name": "search", "parameters": {"properties": {"words": {"type": "string"}}}},
    }
    add = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"first": {"type": "number"}}}}}
    path = tmp_path / "tools.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": name}], "tools": json.dumps(tools) if as_json else tools}
        for name, tools in (("a", [search]), ("b", [add, search]), ("c", []))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.tools for row in load(path=str(path))] == [(search,), (add, search), None]


def test_hub_id_goes_to_the_hub_with_every_setting(monkeypatch):
    asked = {}

    def load_dataset(path, **options):
        asked.update(path=path, **options)
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    row = load(path="some-org/maths-2.5", split="train[:3]", subset="main", revision="abc")[0]
    assert asked.pop("streaming") is False
    assert asked == {"path": "some-org/maths-2.5", "name": "main", "split": "train[:3]", "revision": "abc"}
    assert (row.text, row.domain, row.origin) == ("What is 2 + 2?", "maths-2.5", "some-org/maths-2.5[train[:3]]:1")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ConnectionError("no route"), "hf download some/set --repo-type dataset"),
        (datasets.exceptions.DatasetNotFoundError("Dataset 'some/set' doesn't exist"), "hf auth login"),
        (ValueError("Config name is missing.\nPlease pick one among ['a', 'b']"), "pick one among ['a', 'b']"),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch, tmp_path, error, advice):
    def load_dataset(path, **options):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    assert advice in refusal(path="some/set")
    (tmp_path / "some" / "sett").mkdir(parents=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    assert "some/set: no such file in" in refusal(path="some/set")
    assert "(near: sett)" in refusal(path="some/set")


def test_prompts_that_were_rendered_before_keep_ids_and_tokens(tmp_path):
    path, ask = tmp_path / "train.arrow", '{"messages": [{"role": "user", "content": "Hi"}]}'
    rendered = [
        RenderedPrompt("a" * 16, "sums", (5, 6), "2 + 2"),
        RenderedPrompt("b" * 16, "sums", (5, 6), "2 + 2"),  # the same question, asked by another request
        RenderedPrompt("c" * 16, "words", (7,), "Hi", turns=ask),
    ]
    write_prompts(path, rendered)
    rows = load(path=str(path))
    assert [(content_hash(row), row.prompt_ids, row.domain, row.text) for row in rows] == [
        ("a" * 16, (5, 6), "sums", "2 + 2"),
        ("b" * 16, (5, 6), "sums", "2 + 2"),
        ("c" * 16, (7,), "words", None),
    ]
    assert rows[2].messages == ({"role": "user", "content": "Hi"},)
    assert deduplicate([*rows, rows[0]])[0] == rows, "how often a question may come was chosen by who rendered it"
    assert render_prompt(rows[0], None, Template(mode="chat")) == [5, 6]
    write_prompts(path, [RenderedPrompt("", "sums", (5, 6))])
    assert "no prompt_id" in refusal(path=str(path))


def sample_of(rows: list[PromptRow], limit: int) -> list[PromptRow]:
    """The slow twin of `limit`: all rows in memory, sorted by content hash."""
    chosen = sorted(rows, key=content_hash)[:limit]
    return [row for row in rows if row in chosen]


def test_a_streamed_hub_dataset_gives_the_same_rows_and_the_same_sample(monkeypatch, tmp_path):
    rows = [{"question": f"What is {number}?", "other": number} for number in range(3000)]
    folder = tmp_path / "set"
    for part in range(3):
        write(folder / f"train-{part}.jsonl", rows[part::3])
    load_dataset, streamed = datasets.load_dataset, []

    def from_disk(path, **options):
        streamed.append(options["streaming"])
        return load_dataset(str(folder), cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", from_disk)
    whole, stream = (load(path="some/set", prompt_column="question", streaming=one) for one in (False, True))
    assert streamed == [False, True]
    assert whole == stream
    assert len(whole) == 3000
    first = load(path="some/set", prompt_column="question", streaming=True, limit=10)
    assert first == sample_of(whole, 10)
    assert "no column 'qestion'" in refusal(path="some/set", prompt_column="qestion", streaming=True)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet", "p.csv", "p.txt"])
def test_a_limited_source_keeps_only_its_sample_in_memory(tmp_path, name):
    rows = [{"prompt": f"question {number} " + "x" * 1000} for number in range(4000)]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=200)
    elif name.endswith("csv"):
        path.write_text("prompt\n" + "".join(f"{row['prompt']}\n" for row in rows))
    elif name.endswith("txt"):
        path.write_text("".join(f"{row['prompt']}\n" for row in rows))
    else:
        write(path, rows)
    limited = load(path=str(path), limit=5)  # imports and caches come first
    tracemalloc.start()
    assert load(path=str(path), limit=5) == limited
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    whole = load(path=str(path))
    assert limited == sample_of(whole, 5)
    assert peak < 2_000_000, "all rows have 4 MB of text alone"


# Questions of our own in the columns of the benchmark.
SPEC_BENCH = [
    {"question_id": 1, "category": "writing", "turns": ["Write a haiku about rain.", "Now about snow."]},
    {"question_id": 2, "category": "math_reasoning", "turns": ["What is 6 * 7?"], "reference": ["42"]},
]


def test_questions_of_benchmarks_are_prompts_and_their_categories_domains(tmp_path):
    spec = write(tmp_path / "question.jsonl", SPEC_BENCH)
    for keys in ({"path": spec}, {"path": spec, "prompt_column": "turns", "domain_column": "category"}):
        found = load(**keys)
        # The second turn of a question follows an answer that only the target can write.
        assert [row.text for row in found] == [row["turns"][0] for row in SPEC_BENCH]
        assert [row.domain for row in found] == ["writing", "math_reasoning"]
    assert {row.domain for row in load(path=spec, domain="all")} == {"all"}
    (first, _) = load(path=spec, system="Be brief.")
    assert [turn["role"] for turn in first.messages] == ["system", "user"]
    # Elsewhere a list of strings is still no prompt.
    lists = write(tmp_path / "lists.jsonl", [{"turns": ["a", "b"]}])
    assert "contains a list, not a string" in refusal(path=lists, prompt_column="turns")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.json", b'[\n{"prompt": "a"},\n{"prompt": \n]', ":4: not valid JSON"),
        ("b.parquet", b"no parquet", ": cannot be read as parquet"),
        ("c.jsonl", b'{"prompt": "a", "prompt": "b"}\n', ":1: not valid JSON ('prompt' is specified twice)"),
        ("d.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9], ": damaged file"),
        ("e.txt", b"a\ncaf\xe9\n", ":2: not UTF-8"),
        ("f.jsonl", gzip.compress(b'{"prompt": "a"}\n', mtime=0), ": a compressed file; rename it to f.jsonl.gz"),
        (
            "g.jsonl.xz",
            lzma.compress(b'{"prompt": "a"}\n'),
            ": xz files are not read; unpack it, or compress it as .gz",
        ),
        ("h.jsonl", b"PK\x03\x04", ": zip files are not read"),
        ("i.tar.gz", gzip.compress(b"a", mtime=0), ": tar files are not read"),
    ],
)
def test_a_malformed_file_is_named(tmp_path, name, content, complaint):
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(path=str(path)).startswith(f"{path}{complaint}")


def test_text_may_begin_as_an_archive_does(tmp_path):
    (tmp_path / "keys.csv").write_text("PK,prompt\n1,Hello\n")
    assert [row.text for row in load(path=str(tmp_path / "keys.csv"), prompt_column="prompt")] == ["Hello"]
