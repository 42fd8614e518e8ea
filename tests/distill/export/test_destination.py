"""Where an export may go: nothing that holds somebody's work is ever written over."""

import json

import pytest

from distill.export.destination import appearing_directory, check_destination
from speculative.errors import UserError


@pytest.fixture
def student_dir(tmp_path):
    directory = tmp_path / "runs" / "checkpoint-10"
    directory.mkdir(parents=True)
    return directory


def test_destinations_that_are_refused(tmp_path, student_dir):
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    cases = {
        "/": "root or home",
        "~": "root or home",
        tmp_path / "eagle3-draft": "vLLM",
        tmp_path / "DFlash" / "x": "vLLM",
        tmp_path / "file": "it is a file",
        tmp_path / "full": "not empty",
        student_dir: "overlaps",
        student_dir / "export": "overlaps",
        student_dir.parent: "overlaps",
    }
    for to, match in cases.items():
        with pytest.raises(UserError, match=match):
            check_destination(to, sources=[student_dir])
        with pytest.raises(UserError, match=match):
            check_destination(to, sources=[student_dir], overwrite=True)
    link = tmp_path / "link"
    link.symlink_to(student_dir)
    with pytest.raises(UserError, match="overlaps"):
        check_destination(link, sources=[student_dir])
    (tmp_path / "empty").mkdir()
    assert check_destination(tmp_path / "empty", sources=[student_dir]) == tmp_path / "empty"


def make_export(path, files=("serving.json", "config.json")):
    path.mkdir()
    for name in files:
        (path / name).write_text("{}")
    (path / "serving.json").write_text(json.dumps({"format": "understudy-serving", "files": list(files)}))


def test_an_earlier_export_is_replaceable_when_asked_and_untouched(tmp_path, student_dir):
    make_export(tmp_path / "out")
    with pytest.raises(UserError, match="pass --overwrite"):
        check_destination(tmp_path / "out", sources=[student_dir])
    assert check_destination(tmp_path / "out", sources=[student_dir], overwrite=True) == tmp_path / "out"
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"'notes\.txt' in it is not part of an earlier export"):
        check_destination(tmp_path / "out", sources=[student_dir], overwrite=True)


@pytest.mark.parametrize("content", ["not json", "[]", '{"format": "other"}'])
def test_a_foreign_serving_json_is_no_export(tmp_path, student_dir, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "serving.json").write_text(content)
    with pytest.raises(UserError, match="not an earlier export"):
        check_destination(tmp_path / "out", sources=[student_dir], overwrite=True)


def test_a_directory_appears_at_the_end_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "deep" / "out"
    for text in ("first", "second"):
        with appearing_directory(path) as working:
            (working / text).write_text(text)
            assert working.parent == path.parent
            assert working != path
        assert [entry.name for entry in path.iterdir()] == [text]
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("earlier", [False, True])
def test_an_exception_leaves_what_was_there(tmp_path, earlier):
    path = tmp_path / "out"
    if earlier:
        make_export(path)

    def interrupted():
        with appearing_directory(path) as working:
            (working / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [entry.name for entry in tmp_path.iterdir()] == (["out"] if earlier else [])
    assert not (path / "half").exists()


def test_a_failing_rename_puts_the_old_directory_back(tmp_path, monkeypatch):
    import os

    path = tmp_path / "out"
    make_export(path)
    rename = os.rename

    def fail_for_the_new_one(source, destination):
        if ".partial-" in str(source):
            raise OSError("Input/output error")
        rename(source, destination)

    monkeypatch.setattr("os.rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="Input/output"), appearing_directory(path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (path / "config.json").exists()
