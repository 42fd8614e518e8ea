"""A run's prompts: rendered once by the main process, split by content, the same whatever is judged and whatever is added."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from tiny_training import tiny_tokenizer, write_prompts

from data.files import write_manifest
from data.responses.rendered import RenderedPrompt
from distill.config.layout import CHECKPOINTS, PROMPTS
from distill.config.sections import DataConfig
from distill.run import prompts as run_prompts
from distill.run.prompts import PromptSets, load_heldout, load_prompts
from speculative.errors import UserError

TOKENIZER = tiny_tokenizer()


def data_of(folder: Path, count: int = 40, **keys: Any) -> DataConfig:
    path = write_prompts(folder / "prompts.jsonl", count)
    return DataConfig.model_validate({"train": ({"path": str(path)},), "template": {"mode": "plain"}, **keys})


def of_folder(run: Path) -> Any:
    """A run as its main process sees it."""
    run.mkdir(exist_ok=True)
    return SimpleNamespace(folder=run, once=lambda _, make: make(), await_seen=lambda *_: None)


def loaded(data: DataConfig, judged: int = 4, run: Path | None = None, context: int = 100) -> PromptSets:
    return load_prompts(data, TOKENIZER, context, 10, judged, run=run and of_folder(run))


def held_out(data: DataConfig, count: int, run: Path, context: int = 100) -> list[RenderedPrompt]:
    return load_heldout(data, TOKENIZER, context, 10, count, folder=run)


def ids(prompts: Any) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_prompts, "load_source", lambda *_, **__: pytest.fail("sources were read"))


def test_training_prompts_do_not_depend_on_how_many_are_judged(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    few, many = loaded(data, 3), loaded(data, 6)
    assert list(few.train) == list(many.train)
    assert many.heldout[:3] == few.heldout
    assert (len(few.train), len(many.heldout)) == (32, 6)
    assert not set(ids(many.train)) & set(ids(many.heldout))


def test_what_does_not_fit_is_left_out_before_the_split(tmp_path: Path) -> None:
    lengths = sorted(len(prompt.prompt_ids) for prompt in loaded(data_of(tmp_path)).train)
    most = lengths[len(lengths) // 2]
    sets = loaded(data_of(tmp_path, too_long="drop"), 100, context=most + 10)
    everything = [*sets.train, *sets.heldout]
    assert max(len(prompt.prompt_ids) for prompt in everything) == most
    assert len(everything) < 40
    assert len(sets.heldout) == len(everything) // 5, "a fifth of those that fit"
    assert f"{40 - len(everything)} left out (too long)" in sets.report
    assert "judge.prompts = 100, but no more are held out" in sets.report


def test_prompts_are_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, data = tmp_path / "run", data_of(tmp_path)
    first = loaded(data, run=run)
    twin = loaded(data)
    assert (list(first.train), first.heldout) == (list(twin.train), twin.heldout)
    with monkeypatch.context() as patched:
        no_reading(patched)
        sets = loaded(data, run=run)
        assert (list(sets.train), sets.heldout, sets.report) == (list(first.train), first.heldout, first.report)
        assert loaded(data, 8, run=run).heldout[:4] == first.heldout, "another number to judge"
        other: Any = SimpleNamespace(folder=run, once=lambda *_: None, await_seen=lambda *_: None)
        assert list(load_prompts(data, TOKENIZER, 100, 10, 4, run=other).train) == list(first.train)
        (tmp_path / "prompts.jsonl").unlink()
        assert held_out(data, 4, run) == first.heldout, "the sources are not needed"
        again = loaded(data, run=run)
        assert (list(again.train), again.heldout) == (list(first.train), first.heldout)
    assert {path.name for path in (run / PROMPTS).iterdir()} == {"train.arrow", "heldout.arrow", "manifest.json"}


@pytest.mark.parametrize("change", ["source", "context", "damage", "manifest", "judged"])
def test_they_are_rendered_again_when_something_is_another(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    sources: dict[str, Any] = {}
    if change == "judged":
        path = write_prompts(tmp_path / "heldout.jsonl", 340)
        path.write_text("".join(path.read_text().splitlines(keepends=True)[40:]))
        sources = {"heldout": ({"path": str(path)},)}
    data = data_of(tmp_path, 40, **sources)
    first = loaded(data, run=run)
    counted: list[RenderedPrompt] = []
    with pytest.MonkeyPatch.context() as patched:
        render = run_prompts._Renderer.__call__
        patched.setattr(
            run_prompts._Renderer,
            "__call__",
            lambda *given, **how: (made := render(*given, **how), counted.append(made))[0],
        )
        if change == "source":
            data = data_of(tmp_path, 42)
        path = run / PROMPTS / ("manifest.json" if change == "manifest" else "train.arrow")
        if change in ("damage", "manifest"):
            content = path.read_bytes()
            path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
        sets = loaded(data, 280 if change == "judged" else 4, run=run, context=99 if change == "context" else 100)
        assert counted, "rendered again"
    if change not in ("source", "judged"):
        assert (list(sets.train), sets.heldout) == (list(first.train), first.heldout)


def test_a_run_with_checkpoints_keeps_its_prompts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = loaded(data_of(tmp_path), run=run)
    (run / CHECKPOINTS).mkdir()
    data = data_of(tmp_path)  # the file is written again: the same prompts
    assert list(loaded(data, run=run).train) == list(first.train)
    said = refused(loaded, data_of(tmp_path, 41), run=run)
    assert all(part in said for part in ("the prompts differ", str(run), "name="))
    assert json.loads((run / PROMPTS / "manifest.json").read_text())["heldout"] == 8, "nothing is lost"


def test_checkpoints_of_unknown_prompts_are_refused(tmp_path: Path) -> None:
    """As an earlier version left them: a new split could judge what they were trained on."""
    run, data = tmp_path / "run", data_of(tmp_path)
    (run / CHECKPOINTS).mkdir(parents=True)
    for load in (lambda: loaded(data, run=run), lambda: held_out(data, 4, run)):
        said = refused(load)
        assert re.search(r"prompts/manifest\.json: is missing.*another name=", said)
    assert not (run / PROMPTS).exists()
    path = write_prompts(tmp_path / "heldout.jsonl", 30)
    own = data.model_copy(
        update={"heldout": tuple(source.model_copy(update={"path": str(path)}) for source in data.train)}
    )
    assert len(held_out(own, 4, run)) == 4


def test_heldout_alone_looks_at_no_more_than_is_needed(tmp_path: Path) -> None:
    """From sources of its own: nothing of the training prompts is read, nothing is kept."""
    path = write_prompts(tmp_path / "heldout.jsonl", 30)
    data = DataConfig.model_validate(
        {"train": ({"path": "nowhere.jsonl"},), "heldout": ({"path": str(path)},), "template": {"mode": "plain"}}
    )
    run = tmp_path / "run"
    assert ids(held_out(data, 5, run)) == sorted(ids(held_out(data, 30, run)))[:5]
    assert not (tmp_path / "run").exists()


def test_held_out_prompts_of_another_number_of_sources(tmp_path: Path) -> None:
    """The run's own are not those of a config that has a source more."""
    run, data = tmp_path / "run", data_of(tmp_path)
    loaded(data, run=run)
    path = write_prompts(tmp_path / "heldout.jsonl", 30)
    other = data_of(tmp_path, heldout=({"path": str(path)},))
    assert ids(held_out(other, 5, run)) == ids(held_out(other, 5, tmp_path / "empty"))


@pytest.mark.parametrize("too_long", ["error", "drop"])
def test_other_limits_than_the_run_s_judge_nothing_that_it_trained_on(
    tmp_path: Path, too_long: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft of a shorter context: what the run holds out, as far as it fits; a split of what fits would be another."""
    run, data = tmp_path / "run", data_of(tmp_path, too_long=too_long)
    first = loaded(data, 8, run=run)
    assert len(first.heldout) == 8
    longest = sorted(len(prompt.prompt_ids) for prompt in first.heldout)[4]
    fitting = [prompt for prompt in first.heldout if len(prompt.prompt_ids) <= longest]
    assert any(len(prompt.prompt_ids) > longest for prompt in first.train)
    data_of(tmp_path, 41)  # a row that came later changes nothing of what the run holds out
    assert held_out(data, 8, run, context=longest + 10) == fitting
    assert f"{8 - len(fitting)} of 8 held-out prompts have more than {longest} tokens" in capsys.readouterr().err


CHAT = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% for turn in messages %}{% if turn.content == 'no' %}{{ raise_exception('refused') }}{% endif %}"
    "<{{ turn.role }}>{{ turn.content }}{% endfor %}<assistant>"
)


def chat_data(folder: Path, conversations: list[dict[str, Any]], **keys: Any) -> tuple[DataConfig, Any]:
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations), encoding="utf-8")
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = CHAT
    source = {"path": str(path), **{key: keys.pop(key) for key in ("turns",) if key in keys}}
    return DataConfig.model_validate({"train": (source,), **keys}), tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_bad_rows_are_counted_those_that_the_template_refuses_too(tmp_path: Path) -> None:
    conversations = [{"messages": [user(f"question {number}")]} for number in range(8)]
    conversations[2:2] = [{"messages": [user(" ")]}, {"messages": [user("no")]}, {"messages": []}]
    data, tokenizer = chat_data(tmp_path, conversations, bad_rows="drop")
    sets = load_prompts(data, tokenizer, 100, 10, 2)
    assert len(sets.train) + len(sets.heldout) == 8
    assert "3 left out (bad rows, the first " in sets.report
    assert "chat.jsonl:3: turn 1 of 'messages' is empty" in sets.report
    with pytest.raises(UserError, match=r"chat.jsonl:3: turn 1 of 'messages' is empty"):
        load_prompts(data.model_copy(update={"bad_rows": "error"}), tokenizer, 100, 10, 2)


def test_only_bad_rows_are_dropped_as_bad_rows(tmp_path: Path) -> None:
    conversations = [{"messages": [user(f"question {number}" * (1 + 20 * (number > 5)))]} for number in range(8)]
    data, tokenizer = chat_data(tmp_path, conversations, bad_rows="drop")
    with pytest.raises(UserError, match=r"chat.jsonl:7: .* do not fit .* set data.too_long: drop"):
        load_prompts(data, tokenizer, 100, 10, 2)
    sets = load_prompts(data.model_copy(update={"too_long": "drop"}), tokenizer, 100, 10, 2)
    assert "2 left out (too long)" in sets.report
    assert "bad rows" not in sets.report
    with pytest.raises(UserError, match=r"serving\.max_tokens = 100 leaves no space"):
        load_prompts(data, tokenizer, 100, 100, 2)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("template", "has no chat template"),
        ("long", "every prompt is too long (8 left out)"),
        ("alone", "data.train: no prompt is left to train on beside one to hold out"),
    ],
)
def test_a_mistake_that_all_rows_share_is_reported_though_bad_rows_are_dropped(
    tmp_path: Path, mistake: str, words: str
) -> None:
    conversations = [{"messages": []}, *({"messages": [user(f"question {number}")]} for number in range(8))]
    data, tokenizer = chat_data(tmp_path, conversations, bad_rows="drop", too_long="drop")
    if mistake == "alone":
        data, tokenizer = chat_data(tmp_path, conversations[1:2], too_long="drop")
    if mistake == "template":
        tokenizer.chat_template = None
    with pytest.raises(UserError, match=re.escape(words)):
        load_prompts(data, tokenizer, 15 if mistake == "long" else 100, 10, 2)


def test_conversations_and_questions_are_not_split(tmp_path: Path) -> None:
    conversations = []
    for number in range(12):
        turns = [user(f"question {number}"), {"role": "assistant", "content": "yes"}, user("and?")]
        conversations += [{"messages": turns}, {"messages": [{"role": "system", "content": "Brief."}, turns[0]]}]
    data, tokenizer = chat_data(tmp_path, conversations, turns="all")
    sets = load_prompts(data, tokenizer, 100, 10, 8)

    def questions(prompts: Any) -> set[str]:
        return {
            next(turn["content"] for turn in json.loads(one.turns)["messages"] if turn["role"] == "user")
            for one in prompts
        }

    assert len(sets.train) + len(sets.heldout) >= 36 - 3, (
        "three prompts of each question; only whole questions may be unjudged"
    )
    assert not questions(sets.train) & questions(sets.heldout)
    assert len(questions(sets.train)) * 3 == len(sets.train)


def test_tools_reach_the_template(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "search"}}
    conversations = [{"messages": [user(f"question {number}")], "tools": [tool]} for number in range(6)]
    data, tokenizer = chat_data(tmp_path, conversations)
    prompt = load_prompts(data, tokenizer, 100, 10, 2).train[0]
    assert tokenizer.decode(list(prompt.prompt_ids)).startswith("[search]<user>question")
    assert json.loads(prompt.turns)["tools"] == [tool]


def test_another_run_takes_the_prompts_as_they_were_rendered(tmp_path: Path) -> None:
    old = loaded(data_of(tmp_path), run=tmp_path / "old", judged=8)
    sources = {name: ({"path": str(tmp_path / "old" / PROMPTS / f"{name}.arrow")},) for name in ("train", "heldout")}
    again = DataConfig.model_validate({**sources, "template": {"mode": "plain"}})
    new = loaded(again, run=tmp_path / "new", judged=8)
    assert [(one.prompt_id, one.prompt_ids) for one in new.train] == [
        (one.prompt_id, one.prompt_ids) for one in old.train
    ]
    assert {one.prompt_id: one.prompt_ids for one in new.heldout} == {
        one.prompt_id: one.prompt_ids for one in old.heldout
    }
    manifest = tmp_path / "old" / PROMPTS / "manifest.json"
    told = json.loads(manifest.read_text())
    told.pop("sha256")
    told["made_with"]["tokenizer"] = "another"
    write_manifest(manifest.parent, told)
    with pytest.raises(UserError, match="from another tokenizer"):
        loaded(again, run=tmp_path / "newer")


def test_ids_of_an_unknown_or_another_tokenizer_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt_id": f"{number:016x}", "prompt": "def f():", "prompt_ids": [5, 6, number]} for number in range(20)]
    data = DataConfig.model_validate(
        {"train": ({"path": str(tmp_path / "rows.jsonl")},), "template": {"mode": "plain"}}
    )
    for more, refusal in (
        ({}, r"rows.jsonl:1: nothing says of which tokenizer its prompt_ids are .*; set prompt_column"),
        ({"tokenizer": "another"}, r"its token ids are from another tokenizer \(another, now"),
        ({"tokenizer": 7}, r"rows.jsonl:1: prompt_id, text, turns, tokenizer or domain is not text"),
    ):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | more) + "\n" for row in rows))
        with pytest.raises(UserError, match=refusal):
            loaded(data)
