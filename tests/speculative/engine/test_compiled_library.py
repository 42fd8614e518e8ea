"""The library of compiled code on disk: built once, checked before it is loaded, built again when damaged, done without
where it cannot be.
"""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speculative.engine.compiled import library as module
from speculative.engine.compiled.layouts import STRUCTS, Block
from speculative.engine.compiled.library import NoLibrary, library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "understudy"


def opened() -> object:
    """As a new process would."""
    return library.__wrapped__()


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of nothing, which is built in no time."""
    source = tmp_path / "nothing.cpp"
    sizes = ", ".join(str(ctypes.sizeof(struct)) for struct in STRUCTS)
    functions = "void call_model() {} void run_blocks() {} void forget_all() {}"
    source.write_text(f'extern "C" {{ long struct_bytes[] = {{{sizes}}}; {functions} }}')
    monkeypatch.setattr(module, "SOURCES", (source,))


def test_it_is_built_once_and_found_again(folder: Path, quick: None, capsys: pytest.CaptureFixture) -> None:
    assert opened() is not None
    assert "once for this machine" in capsys.readouterr().err
    (built,) = folder.glob("*.so")
    assert folder.stat().st_mode & 0o777 == 0o700
    before = built.stat().st_mtime_ns
    assert opened() is not None
    assert built.stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["cut short", "changed", "no checksum", "empty checksum"])
def test_what_is_damaged_is_built_again(damage: str, folder: Path, quick: None) -> None:
    opened()
    (built,) = folder.glob("*.so")
    whole = built.read_bytes()
    checksum = built.with_suffix(".checksum")
    built.unlink()  # this process has it in its memory
    if damage == "cut short":  # loaded, it would end the process
        built.write_bytes(whole[: len(whole) // 2])
    else:
        built.write_bytes(whole if "checksum" in damage else whole[:-1] + bytes([whole[-1] ^ 1]))
    if damage == "no checksum":
        checksum.unlink()
    elif damage == "empty checksum":
        checksum.write_text("")
    assert opened() is not None
    assert module._is_whole(built)


def test_processes_that_build_at_the_same_time_get_whole_files(folder: Path, quick: None) -> None:
    compiler = module._compiler()
    folder.mkdir(mode=0o700)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: module._build(compiler, folder / "step-key.so"), range(3)))
    assert module._is_whole(folder / "step-key.so")
    assert sorted(path.name for path in folder.iterdir()) == ["step-key.checksum", "step-key.so"]


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("there-is-none", "no C\\+\\+ compiler \\(there-is-none\\) was found"),
        ("false", "false failed: status 1"),
    ],
)
def test_without_a_compiler_models_run_as_they_are(
    compiler: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(UserWarning, match=f"run without compiled code and take about three times as long: .*{said}"):
        assert opened() is None


def test_flags_in_cxx_give_a_library_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module._key(module._compiler())
    monkeypatch.setenv("CXX", f"{module._compiler()[0]} -mno-avx512f")
    assert module._key(module._compiler()) != plain


def test_a_folder_that_others_write_to_is_not_used(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NoLibrary, match="writable by others: set XDG_CACHE_HOME"):
        module._folder()


def test_a_process_that_is_killed_while_it_builds_leaves_nothing_that_is_loaded(folder: Path) -> None:
    """A temporary folder may stay; the name that is loaded does not appear before the file is whole."""
    program = (
        "from speculative.engine.compiled import library as m\n"
        "import os\n"
        "m.subprocess.run = lambda *a, **k: os._exit(9) if '-o' in a[0] else type('R', (), {'stdout': ''})()\n"
        "m.library()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], timeout=120)
    assert ended.returncode == 9
    assert list(folder.glob("*.so")) == []


def test_a_library_of_another_layout_is_not_called(folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = module.SOURCES
    source.write_text(source.read_text().replace(str(ctypes.sizeof(Block)), "8"))
    with pytest.warns(UserWarning, match="its structs have .* 8\\] bytes, which is not what layouts.py says"):
        assert opened() is None
