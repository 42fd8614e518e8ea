"""The house's rules that a program can read: which room imports which, and how things may be called."""

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each may import those to its right, and itself.
ROOMS = ("distill", "data", "speculative")
# Inside a package, floors from the top down: a file may import its own room and the floors below, never beside or above.
FLOORS = {
    "distill": (
        ("cli",), ("live",), ("commands", "train"), ("verdict",), ("report", "respond"), ("export", "training"), ("run", "loss"), ("models",),
        ("config",), ("faults",),
    ),
    "data": (("responses",), ("signals",), ("batches",), ("prompts",), ("files",)),
    "speculative": (
        ("evaluate",), ("explain",), ("measure",), ("decode",), ("decoder",), ("drafters",), ("engine",), ("rules",), ("errors",),
    ),
}  # fmt: skip
MOST_ENTRIES = 14
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "common", "helpers", "base", "util", "helper", "misc"}
FORBIDDEN_PARAMETERS = {"p", "q"}


parsed = functools.lru_cache(maxsize=1)(ast.parse)  # one file is read for several rules


def imported_rooms(tree: ast.AST, room: str) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of one of our packages, at the top, inside functions, and by name in a call."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else [room if node.level == 1 else "?"]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        for name in names:
            top = name.split(".")[0]
            if top in ROOMS or top == "?":
                yield node.lineno, top


def back_arrows(source: str, room: str) -> list[tuple[int, str]]:
    """Imports that point to the left."""
    allowed = ROOMS[ROOMS.index(room) :]
    return [(line, found) for line, found in imported_rooms(parsed(source), room) if found not in allowed]


def modules_imported(source: str) -> set[str]:
    """Dotted names of our modules that a file imports anywhere; `from room import file` counts as `room.file`."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            as_module = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {name for name in as_module if (ROOT / f"{name.replace('.', '/')}.py").exists()}
            found |= files or {node.module}
    return {name for name in found if name.split(".")[0] in ROOMS}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def climbs(module: str, imported: str) -> bool:
    """Whether an import inside one package goes beside or above its own floor."""
    (package, room, *_), (other, *rest) = module.split("."), imported.split(".")
    if package != other or room == (rest or [room])[0]:
        return False
    level = {name: number for number, floor in enumerate(FLOORS[package]) for name in floor}
    return level[rest[0]] <= level[room]


def parameters_called(source: str, forbidden: set[str]) -> list[tuple[int, str]]:
    """(line, name) of functions' parameters with a forbidden name, lambdas included."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            found += [(node.lineno, one.arg) for one in every if one is not None and one.arg in forbidden]
    return found


def test_there_is_something_to_read() -> None:
    assert len(FILES) > 30
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ROOMS)


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("import distill", "data"),
        ("from data.responses.store import Row", "speculative"),
        ("def f():\n    from distill.config.load import RunConfig\n", "speculative"),
        ("if TYPE_CHECKING:\n    import distill.config.load as c\n", "data"),
        ("importlib.import_module('distill.training.loop')", "data"),
        ("from ..distill import config", "data"),
    ],
)
def test_the_reader_sees_back_arrows(source: str, room: str) -> None:
    assert back_arrows(source, room) != []


@pytest.mark.parametrize(
    "source", ["import datasets", "from speculative.errors import UserError", "from . import store", "x.distill"]
)
def test_the_reader_does_not_see_what_is_not_there(source: str) -> None:
    assert back_arrows(source, "data") == []


def test_every_room_has_a_floor() -> None:
    for package, floors in FLOORS.items():
        rooms = {path.relative_to(ROOT / package).with_suffix("").parts[0] for path in FILES if package in path.parts}
        assert rooms - {"__init__"} == {name for floor in floors for name in floor}


@pytest.mark.parametrize(
    ("module", "imported", "up"),
    [
        ("distill.loss.objective", "distill.training.loop", True),
        ("distill.export.card", "distill.training.loop", True),
        ("distill.training.loop", "distill.loss.objective", False),
        ("distill.training.loop", "distill.training.batches", False),
        ("distill.training.loop", "speculative.evaluate", False),
        ("speculative.rules.verify", "speculative.decode", True),
    ],
)
def test_the_reader_tells_floors_apart(module: str, imported: str, up: bool) -> None:
    assert climbs(module, imported) is up


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, the first named twice; empty when there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_in_a_circle() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []
    assert circle_in({module_of(path): modules_imported(path.read_text(encoding="utf-8")) for path in FILES}) == []


def test_programs_are_no_libraries() -> None:
    """What training, answering and the command line do is reached by running them; only the command line calls the other two."""
    for path in FILES:
        programs = modules_imported(path.read_text(encoding="utf-8")) & {
            "distill.train",
            "distill.respond",
            "distill.cli",
        }
        assert not programs or path == ROOT / "distill" / "cli.py", path


def test_the_live_loop_is_a_leaf() -> None:
    """Nothing but the command line imports it: it can be deleted by deleting its folder, its commands and its tests."""
    outside = [path for path in FILES if ROOT / "distill" / "live" not in path.parents]
    importing = [
        path for path in outside if "distill.live" in " ".join(modules_imported(path.read_text(encoding="utf-8")))
    ]
    assert importing == [ROOT / "distill" / "cli.py"]


def test_a_folder_is_read_at_a_glance() -> None:
    for folder in {path.parent for path in FILES}:
        entries = [path for path in folder.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")]
        assert len(entries) <= MOST_ENTRIES, folder


def test_speculative_leans_on_no_training_library() -> None:
    for path in (ROOT / "speculative").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"accelerate", "peft", "datasets", "wandb"}, path


def test_files_are_named_for_what_they_hold() -> None:
    assert [path for path in FILES if path.stem in FORBIDDEN_NAMES] == []
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "tests" / "data").exists()


def test_the_reader_sees_such_parameters() -> None:
    assert parameters_called("def f(a, *, q=1): ...\ng = lambda p: p\n", FORBIDDEN_PARAMETERS) == [(1, "q"), (2, "p")]


def test_the_initialisers_hold_a_docstring_and_nothing_else() -> None:
    for folder in {path.parent for path in FILES}:
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1, folder


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_keeps_the_rules_of_the_house(path: Path) -> None:
    source, module = path.read_text(encoding="utf-8"), module_of(path)
    assert back_arrows(source, path.relative_to(ROOT).parts[0]) == [], "imports point to the right"
    if path.stem != "__init__":
        assert [name for name in modules_imported(source) if climbs(module, name)] == [], "floors go one way"
    assert parameters_called(source, FORBIDDEN_PARAMETERS) == []
    assert source.count("\n") <= 450, "split the file by what it holds"
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long to read at once"
