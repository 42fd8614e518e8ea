"""Understudy in a project that has a `data` of its own: refused in one line or at work, and the user's own programs with it."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import run_child, until
from refusals import refused

from distill import train
from distill.config.command_line import LaunchOptions
from distill.run.launcher import launch_if_asked

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("data", "distill", "speculative")
BIN = Path(sys.executable).parent
KINDS = {"package": "data/__init__.py", "module": "data.py", "folder": "data/theirs.py", "none": "notes.txt"}
REFUSED = ("package", "module")


@pytest.fixture(params=KINDS)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """(kind, the user's file) of a project."""
    return request.param, new_project(tmp_path, request.param)


def new_project(folder: Path, kind: str) -> Path:
    file = folder / KINDS[kind]
    file.parent.mkdir(exist_ok=True)
    file.write_text("value = 1\n", encoding="utf-8")
    return file


def started(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def is_refusal(text: str, file: Path) -> bool:
    return text.startswith(f"understudy: {file} hides our package") and "run `understudy train CONFIG`" in text


@pytest.mark.parametrize("module", ["distill.train", "distill.respond", "distill.cli", "distill.export.merge"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_of_ours_says_in_one_line_what_stands_in_its_way(tmp_path: Path, kind: str, module: str) -> None:
    file = new_project(tmp_path, kind)
    done = started(tmp_path, sys.executable, "-m", module, "nowhere.yaml")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert is_refusal(done.stderr, file)


def test_a_launched_module_says_so_too(tmp_path: Path) -> None:
    file = new_project(tmp_path, "package")
    done = started(tmp_path, BIN / "accelerate", "launch", "-m", "distill.train", "nowhere.yaml")
    assert done.returncode == 1, "the launcher's own status of any failure"
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("understudy: "))
    assert is_refusal(line, file)
    assert "returned non-zero exit status 2" in done.stderr


def test_another_program_that_imports_us_gets_an_exception_and_a_search_path_a_line(tmp_path: Path) -> None:
    file = new_project(tmp_path, "module")
    done = started(tmp_path, sys.executable, "-c", "import distill")
    assert f"ImportError: understudy: {file} hides our package" in done.stderr
    done = started(tmp_path, "env", f"PYTHONPATH={tmp_path}", BIN / "understudy", "--help")
    assert (done.returncode, is_refusal(done.stderr, file)) == (2, True)


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        ("package", "import data as theirs"),
        ("module", "import data as theirs"),
        ("folder", "import data.theirs as theirs, data.files"),
    ],
)
def test_a_users_own_program_keeps_its_data(tmp_path: Path, kind: str, program: str) -> None:
    file = new_project(tmp_path, kind)
    done = started(tmp_path, sys.executable, "-c", f"{program}; print(theirs.__file__)")
    assert done.stdout.strip() == str(file), done.stderr


def _start(folder: Path, first: str, words: list[str]) -> None:
    """As Python starts a program, but with the libraries imported: torch alone takes seconds."""
    os.chdir(folder)
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path[:] = [first, *(place for place in sys.path if place and not Path(place).is_relative_to(ROOT / "tests"))]
    sys.argv = words
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


@pytest.mark.parametrize("words", [["-m", "distill.train"], [str(BIN / "understudy"), "train"]])
def test_a_program_starts_beside_any_data_that_is_not_in_its_way(
    project: tuple[str, Path], words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, file = project
    first = str(tmp_path) if words[0] == "-m" else str(BIN)
    assert run_child(_start, tmp_path, first, [*words, "nowhere.yaml"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    if kind in REFUSED and words[0] == "-m":
        assert is_refusal(said, file)
    else:
        assert said.startswith("understudy: nowhere.yaml: cannot read the config"), "all imports are passed"


def test_no_program_of_ours_starts_a_module_of_ours_from_the_working_directory() -> None:
    for path in (path for top in (*PACKAGES, "bench") for path in (ROOT / top).rglob("*.py")):
        for safe in re.findall(r'("-P",)?\s+"-m",\s+"distill[.]', path.read_text(encoding="utf-8")):
            # The second gives the words to torchrun, in the checkout.
            assert safe or path.name in ("training_process.py", "runs.py"), path


SLEEPER = """
import os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[1]) / os.environ["RANK"]
def end(number, _):
    place.write_text(str(number))
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
place.write_text(f"{os.getpid()} {sys.flags.safe_path}")
time.sleep(600)
"""


LAUNCH = """
import sys
from distill.config.command_line import LaunchOptions
from distill.run.launcher import launch_if_asked
launch_if_asked(LaunchOptions(num_processes=2), "sleeper", *sys.argv[1:])
"""


@pytest.mark.ranks
def test_the_command_becomes_the_launcher_so_that_signals_reach_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_project(tmp_path, "package")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    notes = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen([sys.executable, "-P", "-c", LAUNCH, str(tmp_path)], cwd=tmp_path) as launcher:
        until(lambda: all(note.exists() and note.stat().st_size for note in notes), 120.0)
        told = [note.read_text(encoding="utf-8").split() for note in notes]
        assert {int(pid) for pid, _ in told} == {child.pid for child in psutil.Process(launcher.pid).children()}
        assert [safe for _, safe in told] == ["True", "True"], "the working directory is not on a rank's path"
        launcher.terminate()
        assert launcher.wait(60) == 1, "as of `accelerate launch`"
    assert [note.read_text(encoding="utf-8") for note in notes] == [str(int(signal.SIGTERM))] * 2
    assert not any(psutil.pid_exists(int(pid)) for pid, _ in told)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lrr=1", "--num-processes", "2"], "unknown key `optim.lrr`"),
        (["--config-file", "nowhere.yaml"], "nowhere.yaml: cannot read"),
        (["--config-file", "one.yaml"], "one.yaml: distributed_type NO starts one process"),
        (["--config-file", "unquoted.yaml"], "unquoted.yaml: distributed_type NO starts one process"),
        (["--config-file", "odd.yaml"], "odd.yaml: A `distributed_type` must be specified"),
    ],
)
def test_a_mistake_in_what_is_launched_is_one_line_before_the_launcher_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(os, "execve")
    Path("run.yaml").write_text("{name: a, target: {path: x}, data: {train: [{path: x}]}}", encoding="utf-8")
    Path("one.yaml").write_text("{distributed_type: 'NO', num_processes: 1}", encoding="utf-8")
    Path("unquoted.yaml").write_text("{distributed_type: NO, num_processes: 1}", encoding="utf-8")
    Path("odd.yaml").write_text("{num_processes: 2}", encoding="utf-8")
    assert train.main(["run.yaml", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_rank_is_not_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delattr(os, "execve")
    launch_if_asked(LaunchOptions(), "distill.train")
    assert "a launcher started this process" in refused(
        launch_if_asked, LaunchOptions(num_processes=2), "distill.train"
    )
