"""The wheel holds what the tree holds."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("distill", "speculative", "data")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # A copy, because setuptools leaves a build folder behind.
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name, follow_symlinks=False)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", source]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return next((folder / "dist").glob("*.whl"))


def test_the_wheel_holds_every_file_of_the_three_packages_and_no_other(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    link = "distill/config/shipped"
    assert (ROOT / link).resolve() == ROOT / "configs"
    shipped = {f"{link}/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert packed == shipped | {name for name in tracked if (ROOT / name).is_file()}


def test_an_installed_wheel_finds_the_configs_that_commands_name(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which sees the libraries and not the repository; the project has a `data` of its own."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    libraries = "\n".join(place for place in sys.path if place.endswith(("site-packages", "dist-packages")))
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "libraries.pth").write_text(libraries, encoding="utf-8")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-compile", str(wheel)], check=True, capture_output=True)
    (tmp_path / "data.py").touch()

    def said(*command: str | Path) -> str:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    assert "[default: configs/demo.yaml]" in said(python.with_name("understudy"), "demo", "--help")
    # What `sweep --dry-run` lists, without torch.
    program = "from pathlib import Path; from distill.commands.sweep.plan import plan; print(plan(Path('configs/sweeps/grid.yaml')))"
    assert "Trial(" in said(python, "-P", "-c", program)


def test_the_wheel_names_the_console_script_and_the_users_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "understudy = distill.cli:main" in entry_points
    for package in ("torch", "transformers", "datasets", "accelerate", "peft", "wandb"):
        assert f"Requires-Dist: {package}" in metadata


def test_every_dependency_says_why_it_is_there() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("dependencies = [")
    listed = lines[start + 1 : lines.index("]", start)]
    assert len(listed) >= 6
    assert all("#" in line for line in listed)


def test_make_alone_explains_itself() -> None:
    text = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "target", "check", "test", "prove", "bench", "clean"):
        assert any(line.startswith(target) and len(line) > len(target) + 10 for line in text.splitlines()), target
