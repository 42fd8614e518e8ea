"""The embedded domain: which modules, which function heads, and that the held-out ones stay held out."""

import ast
from pathlib import Path

import pytest

from data.prompts import stdlib
from distill.models.load import load_tokenizer

SAMPLE = '''
import os

def plain(first, second=2):
    """Adds.

    Two lines more.
    """
    return first + second


class Thing:
    @property
    async def method(
        self,
        wide: int,
    ) -> int:
        "One line."
        if wide:
            return 1
        return 2

    def undocumented(self):
        return 3

    def only_words(self):
        """Nothing else."""

    def crowded(self): "On one line."; return 4

    def nests(self):
        """Outer."""
        def inner():
            """Inner."""
            return 5
        return inner
'''


@pytest.fixture(scope="module")
def training() -> dict[str, str]:
    """Also what does not parse: parsing takes seconds."""
    return dict(stdlib._sources(heldout=False))


@pytest.fixture(scope="module")
def heldout() -> dict[str, str]:
    return dict(stdlib.modules(heldout=True))


@pytest.fixture(scope="module")
def heldout_rows() -> list[tuple[str, str]]:
    return stdlib.function_head_rows(heldout=True)


def test_functions_of_a_sample() -> None:
    found = dict(stdlib.functions(SAMPLE))
    assert sorted(head.split("(")[0] for head in found) == ["async def method", "def inner", "def nests", "def plain"]
    for head, whole in found.items():
        assert whole.startswith(head)
        assert head.rstrip().endswith('"')
        ast.parse(whole)
    plain = next(head for head in found if head.startswith("def plain"))
    assert plain == 'def plain(first, second=2):\n    """Adds.\n\n    Two lines more.\n    """'
    assert found[plain] == plain + "\n    return first + second\n"
    method = next(whole for head, whole in found.items() if "method" in head)
    assert method.endswith("    return 2\n"), "dedented to the margin, and ends with the function"


def test_what_does_not_parse_or_is_not_text_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in {
        "good.py": b"x = 1\n",
        "bad.py": b"def f(:\n",
        "latin.py": b"# \xe9\n",
        "csv.py": b"y = 2\n",
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(stdlib, "library_folder", lambda: tmp_path)
    assert dict(stdlib.modules(heldout=False)) == {"good.py": "x = 1\n"}
    assert dict(stdlib.modules(heldout=True)) == {"csv.py": "y = 2\n"}


def test_the_two_sides_share_no_module(training: dict[str, str], heldout: dict[str, str]) -> None:
    assert not set(training) & set(heldout)
    tops = {name.split("/")[0].removesuffix(".py") for name in heldout}
    assert tops == stdlib.HELDOUT_MODULES, "each held-out module exists on this Python"
    assert not {name for name in training if name.split("/")[0].removesuffix(".py") in stdlib.HELDOUT_MODULES}


def test_no_heldout_text_is_in_the_training_corpus(
    training: dict[str, str], heldout_rows: list[tuple[str, str]]
) -> None:
    corpus = "\n".join(training.values())
    # Short heads ("Close the file.") do recur in the library; a long docstring is a fingerprint. The corpus holds methods
    # indented, so the longest single line is what to look for.
    lines = {max(head.splitlines(), key=len).strip() for _, head in heldout_rows if len(head) > 400}
    assert len(lines) > 50
    found = [line for line in lines if len(line) > 60 and line in corpus]
    # Python 3.11 still has distutils, with its own copy of shutil.make_archive.
    assert [line for line in found if not line.startswith("def make_archive")] == []


def test_heads_begin_functions_and_end_with_their_docstring(
    heldout: dict[str, str], heldout_rows: list[tuple[str, str]]
) -> None:
    sources = {name: stdlib.functions(source) for name, source in heldout.items()}
    wholes = {(name, head): whole for name, pairs in sources.items() for head, whole in pairs}
    for name, head in heldout_rows:
        assert head.lstrip().startswith(("def ", "async def ")), (name, head[:60])
        assert head.rstrip().endswith(('"', "'")), (name, head[-60:])
        assert not head.endswith("\n")
        whole = wholes[name, head]
        assert whole.startswith(head)
        assert len(whole) > len(head), "something is left to write"
        if not head[0].isspace():
            (node,) = ast.parse(head).body
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            assert len(node.body) == 1
            assert ast.get_docstring(node)


def test_corpus_has_modules_then_their_functions(heldout: dict[str, str]) -> None:
    documents = stdlib.corpus_documents(heldout=True)
    assert [document for document in documents if document in set(heldout.values())] == list(heldout.values())
    assert len(documents) > len(heldout) + 200


def test_a_head_ends_where_the_embedded_tokenizer_ends_a_token(heldout_rows: list[tuple[str, str]]) -> None:
    # Otherwise the prompt's last token is one that the model never saw in the middle of a function.
    tokenizer = load_tokenizer("embedded")
    wholes = {head: whole for _, source in stdlib.modules(heldout=True) for head, whole in stdlib.functions(source)}
    for _, head in heldout_rows:
        head_ids = tokenizer(head, verbose=False).input_ids
        assert tokenizer(wholes[head], verbose=False).input_ids[: len(head_ids)] == head_ids, head
