"""The rules that a program can read: which package imports which, and how things may be called."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

from distill.engines.protocol.engine import known_engines
from speculative.rules.rule import RULES

ROOT = Path(__file__).resolve().parents[2]
# Each may import those to its right, and itself.
PACKAGES = ("distill", "data", "speculative")
# Inside a package, layers from the top down: a file may import its own folder and the layers below, never beside or above.
LAYERS = {
    "distill": (
        ("cli",), ("live", "train"), ("commands",), ("verdict",), ("export", "respond"), ("report", "training"),
        ("run", "engines"), ("models",), ("config",), ("loss",),
        ("faults",),
    ),
    "data": (("responses",), ("signals",), ("batches",), ("prompts",), ("shards",), ("files", "hub")),
    "speculative": (
        ("evaluate",), ("explain",), ("measure",), ("decode",), ("decoder",), ("drafters",), ("engine",), ("rules",),
        ("errors", "progress"),
    ),
}  # fmt: skip
MOST_ENTRIES = 15
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MOST_PARAMETERS = 8
FORBIDDEN_NAMES = {"utils", "common", "helpers", "base", "util", "helper", "misc"}
FORBIDDEN_PARAMETERS = {"p", "q"}
FORBIDDEN_BELOW = {"accelerate", "peft", "datasets", "wandb"}  # speculative/ knows nothing of training


@functools.lru_cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


parsed = functools.lru_cache(maxsize=1)(ast.parse)  # one file is read for several rules


def names_imported(source: str, package: str) -> list[str]:
    """Dotted names of everything imported, at the top, inside functions, and by name in a call; relative ones count as our own."""
    names: list[str] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = {0: node.module or "", 1: package}.get(node.level, "distill")
            files = [f"{above}.{alias.name}" for alias in node.names]
            names += [name for name in files if (ROOT / f"{name.replace('.', '/')}.py").exists()] or [above]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            by_name = called in ("import_module", "__import__", "resolve_name")
            names += [str(node.args[0].value).partition(":")[0]] if by_name else []
    return names


@functools.cache
def modules_imported(path: Path) -> set[str]:
    """Dotted names of our modules that a file imports."""
    return {
        name
        for name in names_imported(source_of(path), path.relative_to(ROOT).parts[0])
        if name.split(".")[0] in PACKAGES
    }


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def points_back(module: str, imported: str) -> bool:
    """Whether an import goes to a package on the left, or inside one package beside or above its own layer."""
    (package, part, *_), (other, *rest) = module.split("."), imported.split(".")
    if package != other:
        return PACKAGES.index(other) < PACKAGES.index(package)
    level = {name: number for number, layer in enumerate(LAYERS[package]) for name in layer}
    return bool(rest) and part in level and part != rest[0] and level[rest[0]] <= level[part]


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def parameters_of(node: Function) -> list[str]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return [one.arg for one in every if one is not None]


def parameters_called(source: str, forbidden: set[str]) -> list[tuple[int, str]]:
    """(line, name) of functions' parameters with a forbidden name, lambdas included."""
    functions = [node for node in ast.walk(parsed(source)) if isinstance(node, Function)]
    return [(node.lineno, name) for node in functions for name in parameters_of(node) if name in forbidden]


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, the first named twice; empty when there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import distill", ["distill"]),
        ("from data.responses.store import Row", ["data.responses.store"]),
        ("def f():\n    from distill.config import load\n", ["distill.config.load"]),
        ("if TYPE_CHECKING:\n    import distill.config.load as c\n", ["distill.config.load"]),
        ("importlib.import_module('distill.train')", ["distill.train"]),
        ("from ..distill import config", ["distill"]),
        ("from . import store", ["data"]),
        ("import datasets\nx.distill", ["datasets"]),
    ],
)
def test_the_reader_sees_every_kind_of_import(source: str, imported: list[str]) -> None:
    assert names_imported(source, "data") == imported


@pytest.mark.parametrize(
    ("module", "imported", "back"),
    [
        ("data.files", "distill", True),
        ("speculative.decode", "data.responses.store", True),
        ("distill.loss.objective", "distill.training.trainer", True),
        ("distill.report.page", "distill.training.trainer", True),
        ("distill.training.trainer", "distill.loss.objective", False),
        ("distill.training.trainer", "distill.training.batches", False),
        ("distill.training.trainer", "speculative.evaluate", False),
        ("speculative.rules.verify", "speculative.decode", True),
    ],
)
def test_the_reader_tells_layers_apart(module: str, imported: str, back: bool) -> None:
    assert points_back(module, imported) is back


def names_compared(source: str, names: frozenset[str]) -> list[str]:
    """Comparisons with a string of `names`: what differs between rules or engines belongs to their own files."""
    return [
        ast.unparse(node)
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Compare)
        and any(isinstance(part, ast.Constant) and part.value in names for part in (node.left, *node.comparators))
    ]


def test_nobody_compares_the_name_of_a_rule_or_an_engine() -> None:
    engines = {name for engine in known_engines().values() for name in (engine.name, engine.key)}
    for folder, names in (("speculative/rules", frozenset(RULES)), ("distill/engines", frozenset(engines))):
        assert names_compared(f"if way == {min(names)!r}: ...", names) != []
        outside = [path for path in FILES if ROOT / folder not in path.parents]
        assert {path: found for path in outside if (found := names_compared(source_of(path), names))} == {}


def unsettled(source: str) -> list[int]:
    """Lines that read a config with a user's overrides and do not ask its engine."""
    tree, least = ast.parse(source), {"load_config": 2, "load_trusted": 3}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "id", ""), call) for call in calls]
    settled = {id(call.args[0]) for name, call in named if name == "for_engine"}
    return [call.lineno for name, call in named if len(call.args) >= least.get(name, 99) and id(call) not in settled]


def test_a_command_that_takes_overrides_lets_the_engine_set_its_rule() -> None:
    """`distill/config` cannot: engines are above it. Excepted: the demo's paths, and a config that is written for `train`."""
    assert unsettled("load_config(path, words)\nfor_engine(load_config(path, words))\nload_config(path)\n") == [1]
    above = [path for path in FILES if ROOT / "distill" / "config" not in path.parents]
    readers = [path.relative_to(ROOT).as_posix() for path in above if unsettled(source_of(path))]
    assert readers == ["distill/cli.py", "distill/live/refresh/plan.py"]


def test_the_reader_sees_parameters_and_circles() -> None:
    assert parameters_called("def f(a, *, q=1): ...\ng = lambda p: p\n", FORBIDDEN_PARAMETERS) == [(1, "q"), (2, "p")]
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_every_part_has_a_layer() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)
    for package, layers in LAYERS.items():
        own = {
            path.relative_to(ROOT / package).with_suffix("").parts[0]
            for path in FILES
            if path.is_relative_to(ROOT / package)
        }
        assert own - {"__init__"} == {name for layer in layers for name in layer}


def test_no_file_imports_itself_in_a_circle() -> None:
    assert circle_in({module_of(path): modules_imported(path) for path in FILES}) == []


def test_programs_are_no_libraries() -> None:
    """What training, answering and the command line do is reached by running them; only the command line calls the other two."""
    programs = {"distill.train", "distill.respond", "distill.cli"}
    assert [path for path in FILES if modules_imported(path) & programs] in ([], [ROOT / "distill" / "cli.py"])


def test_the_live_loop_is_a_leaf() -> None:
    """Nothing but the command line imports it: it can be deleted by deleting its folder, its commands and its tests."""
    outside = [path for path in FILES if ROOT / "distill" / "live" not in path.parents]
    importing = [path for path in outside if "distill.live" in " ".join(modules_imported(path))]
    assert importing == [ROOT / "distill" / "cli.py"]


def test_a_folder_is_read_at_a_glance() -> None:
    for folder in {path.parent for path in FILES}:
        entries = [path for path in folder.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")]
        assert len(entries) <= MOST_ENTRIES, folder


def test_files_are_named_for_what_they_hold() -> None:
    assert [path for path in FILES if path.stem in FORBIDDEN_NAMES] == []
    assert not (ROOT / "tests" / "__init__.py").exists()
    assert not (ROOT / "tests" / "data").exists()


def test_the_initialisers_hold_a_docstring_and_nothing_else() -> None:
    """But for what makes three packages with usual names live beside a user's: tests/house/test_foreign_data.py."""
    for folder in {path.parent for path in FILES}:
        tree = ast.parse(source_of(folder / "__init__.py"))
        assert ast.get_docstring(tree), folder
        assert len(tree.body) == 1 or folder in (ROOT / "data", ROOT / "distill"), folder
        assert not any(
            name.split(".")[0] in PACKAGES for name in names_imported(source_of(folder / "__init__.py"), folder.name)
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_keeps_the_rules_of_the_repository(path: Path) -> None:
    source, module = source_of(path), module_of(path)
    back = [name for name in modules_imported(path) if points_back(module, name)]
    assert path.stem == "__init__" or back == [], "imports go one way"
    if module.startswith("speculative"):
        assert not {name.split(".")[0] for name in names_imported(source, "speculative")} & FORBIDDEN_BELOW
    assert parameters_called(source, FORBIDDEN_PARAMETERS) == []
    assert source.count("\n") <= 450, "split the file by what it holds"
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long to read at once"
            own = set(parameters_of(node)) - {"self", "cls"}
            # A kernel is given each tensor and each constant.
            few = len(own) <= MOST_PARAMETERS or module.endswith(".kernels")
            assert few, f"{node.name} has too many parameters"
