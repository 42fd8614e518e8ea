"""Prompts and text from the Python standard library, which is on every machine.

As a corpus it trains the embedded target: whole modules, and each documented function as its own document, so that the model learns
where a function ends. As a source of prompts it gives function heads: signature and docstring.
"""

import ast
import contextlib
import os
import sysconfig
import textwrap
from collections import deque
from collections.abc import Iterator
from pathlib import Path

# Tests are not library code. The rest are generated tables or vendored copies, from which a model learns only numbers.
_FOLDERS = """
test tests idle_test site-packages dist-packages __pycache__ encodings pydoc_data _bundled
"""
EXCLUDED_FOLDERS = frozenset(_FOLDERS.split())
_MODULES = """
html/entities.py msilib/schema.py msilib/sequence.py msilib/text.py stringprep.py
"""
EXCLUDED_MODULES = frozenset(_MODULES.split())
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata", "lib2to3/pgen2/", "turtledemo/")

# Never trained on, and present in every supported Python. A name stands for a module or a package.
_HELDOUT = """
calendar configparser csv difflib fractions heapq random shutil smtplib socketserver statistics textwrap zipfile
"""
HELDOUT_MODULES = frozenset(_HELDOUT.split())

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def library_folder() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def modules(heldout: bool) -> Iterator[tuple[str, str]]:
    """(path under the library, source text) of each module of one side, sorted, without files that are not UTF-8 or do not parse."""
    for name, source in _sources(heldout):
        with contextlib.suppress(SyntaxError):
            ast.parse(source)
            yield name, source


def _sources(heldout: bool) -> Iterator[tuple[str, str]]:
    """Like `modules`, including files that do not parse."""
    root, paths = library_folder(), list[Path]()
    for folder, inner, files in os.walk(root):
        # Skip thousands of installed files.
        inner[:] = [name for name in inner if name not in EXCLUDED_FOLDERS]
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        is_heldout = name.split("/")[0].removesuffix(".py") in HELDOUT_MODULES
        if name in EXCLUDED_MODULES or name.startswith(EXCLUDED_PREFIXES) or is_heldout != heldout:
            continue
        with contextlib.suppress(UnicodeDecodeError, OSError):
            if (source := path.read_text(encoding="utf-8")).strip():
                yield name, source


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, without expressions, which contain no functions and are most of a tree."""
    queue = deque([tree])
    while queue:
        yield (node := queue.popleft())
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            queue.extend(getattr(node, field, ()))


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(head, whole function) of each documented function with a body: dedented source text.

    The head runs from ``def`` to the docstring's closing quotes; the whole function starts with the head. The head has no
    line break at its end: in text, a line break and the indentation after it are one token, so the model has seen a bare line
    break only at the end of a function.
    """
    lines = source.splitlines(keepends=True)
    for node in _statements(ast.parse(source)):
        if not isinstance(node, FunctionNode) or not ast.get_docstring(node) or len(node.body) < 2:
            continue
        docstring = node.body[0]
        start, end = node.lineno - 1, node.end_lineno or node.lineno
        # A head and body that share a line (``def f(): "doc"; return 1``) cannot be cut at a line's end.
        if (docstring.end_lineno or 0) >= node.body[1].lineno:
            continue
        whole = textwrap.dedent("".join(lines[start:end])).rstrip() + "\n"
        head_lines = (docstring.end_lineno or 0) - start
        head = "".join(whole.splitlines(keepends=True)[:head_lines]).rstrip()
        if head and whole.startswith(head) and head.lstrip().startswith(("def ", "async def ")):
            yield head, whole


def function_head_rows(heldout: bool) -> list[tuple[str, str]]:
    """(module path, function head) of each documented function of one side, in module order, without exact repeats."""
    modules_of: dict[str, str] = {}
    for name, source in _sources(heldout):
        with contextlib.suppress(SyntaxError):
            for head, _ in functions(source):
                modules_of.setdefault(head, name)
    return [(name, head) for head, name in modules_of.items()]


def corpus_documents(heldout: bool) -> list[str]:
    """Training text of one side: every module, then every documented function as a document of its own."""
    documents = []
    for _, source in modules(heldout):
        documents.append(source)
        documents.extend(whole for _, whole in functions(source))
    return documents
