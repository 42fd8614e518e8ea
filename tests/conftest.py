"""Shared settings: one thread, no network, no child that outlives its test, and one tiny finished run that several files look at."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs that tests start
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else its pool of processes stays

from pretend_cuda import library  # before anything that imports torch

# isort: split
import contextlib
import gc
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import processes
import pytest
from filelock import FileLock
from function_heads import write_heads

# torch, and what imports it, is imported where it is used: workers start when the process that hands out tests has read this.
gc.disable()  # until all tests are imported: that takes a fifth longer with it
_device = contextlib.ExitStack()
APART = (
    "device",
    "engine",
    "loop",
    "ranks",
    "real",
)  # marks of tests that `make test` runs by themselves, or not at all
# The same examples each time; `make explore` draws new ones. Here, because a test's own settings start from the loaded profile.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("fixed")


def seed_everything() -> None:
    """So that what a test draws depends neither on which tests ran before it nor on the worker."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    processes.keep_family_together()
    if library.LOADED:
        from pretend_cuda.device import pretend_cuda

        _device.enter_context(pretend_cuda())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Importing all tests takes longer than running some of them.
    asked = config.getoption("markexpr")
    if not any(mark in asked for mark in APART) or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    if asked in APART:
        return f"mark.{asked}" not in text or None
    return (
        any(
            f"not {mark}" in asked and re.search(rf"^pytestmark = \[?pytest\.mark\.{mark}\b", text, re.M)
            for mark in APART
        )
        or None
    )


def pytest_collection_finish() -> None:
    # What is imported by now stays: looking through it for garbage again and again takes a quarter of the tests' time.
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    _device.close()
    # What a crashed worker or an interrupted test left.
    processes.end(processes.descendants())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    from speculative.measure import intervals

    intervals.MOST_RESAMPLES = 4000  # The few prompts of a tiny run would ask for a hundred thousand.
    # Tiny models lose more to thread hand-over than they gain.
    torch.set_num_threads(1)
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif item.get_closest_marker("device") and "gpu" not in item.keywords and not library.LOADED:
            reason = library.why_not() or "tests of the pretend device run by themselves: pytest -m device"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        seed_everything()  # What is made as the file is imported.


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    if fixturedef.scope != "function":
        seed_everything()  # It is made by whichever test asks first.


@pytest.fixture(autouse=True)
def _each_test_draws_its_own_numbers() -> None:
    seed_everything()


@pytest.fixture(autouse=True)
def _no_child_outlives_its_test() -> Iterator[None]:
    before = processes.descendants()
    yield
    left = processes.end(processes.started_since(before))
    assert not left, f"the test left processes behind: {left}"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as a terminal gives it: in the background (`make test &`) the shell has SIGINT ignored, here and in children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def made_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder that is filled once for all workers: they read it, and write into copies."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with FileLock(folder.with_suffix(".lock")):
        if not folder.with_suffix(".whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            folder.with_suffix(".whole").touch()
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random three-layer Llama with the embedded target's tokenizer, as a directory."""
    return made_once(tmp_path_factory, "tiny-target", write_tiny_target)


def write_tiny_target(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from distill.models.load import EMBEDDED_FOLDER, load_tokenizer

    tokenizer = load_tokenizer(str(EMBEDDED_FOLDER))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


@pytest.fixture(scope="session")
def chat_target(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """`tiny_target` with a chat template: each turn is `role: content;`, and `assistant:` asks for the next one."""
    folder = tmp_path_factory.mktemp("chat-target") / "target"
    shutil.copytree(tiny_target, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return folder


def write_tiny_prompts(folder: Path) -> None:
    # A few modules: `path: stdlib` would parse the whole library for each run.
    write_heads(folder / "train.jsonl", ["ast", "inspect", "subprocess", "typing"], 64)
    write_heads(folder / "heldout.jsonl", ["random", "statistics", "shutil", "csv"], 60)


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A config of a run of seconds on `tiny_target`; `output` is a folder of its own."""
    prompts = made_once(tmp_path_factory, "tiny-prompts", write_tiny_prompts)
    folder = tmp_path_factory.mktemp("tiny-run")
    path = folder / "tiny.yaml"
    path.write_text(
        f"""
name: tiny
output: {folder}/runs
target: {{path: {tiny_target}}}
student: {{init: carved, layers: [0, -1]}}
data:
  train: [{{path: {prompts}/train.jsonl, domain: stdlib}}]
  heldout: [{{path: {prompts}/heldout.jsonl, domain: stdlib}}]
  template: {{mode: plain}}
  max_prompt_tokens: 60
serving: {{temperature: 0.7, max_tokens: 16, shard_size: 16, batch_size: 16}}
loss: {{name: forward_kl, chunk_tokens: 64}}
optim: {{lr: 3.0e-3}}
train: {{steps: 12, batch_size: 16, micro_batch_size: 4}}
judge: {{every: 4, prompts: 10, gamma: 3, speed_prompts: 2, speed_seconds: 0.1}}
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def server() -> Iterator[tuple[str, Any]]:
    """(url, how it behaves) of a local server of `model_server`."""
    from model_server import running_server

    with running_server() as found:
        yield found


@pytest.fixture
def without_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end behind their last checkpoint: verdict, report and plot are what takes longest in a tiny run."""
    from distill.verdict import conclusion

    monkeypatch.setattr(conclusion, "conclude_run", lambda *_: None)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end with a verdict, but draw nothing."""
    from distill.verdict import conclusion

    monkeypatch.setattr(conclusion, "plot_run", lambda run: None)
    monkeypatch.setattr(conclusion, "write_page", lambda run: None)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of reports have no figures: drawing them takes longer than the rest."""
    from distill.report import page

    monkeypatch.setattr(page, "figures_of", lambda view: {})


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_config: Path) -> Path:
    """The finished run of `tiny_config`."""

    def finish(folder: Path) -> None:
        from tiny_training import forget_accelerators

        from distill import train

        forget_accelerators()  # of whichever test ran before in this worker
        assert train.main([str(tiny_config), f"output={folder}"]) == 0

    made = made_once(tmp_path_factory, "tiny-finished", finish)
    own = tiny_config.parent / "runs" / "tiny"
    shutil.copytree(made / "tiny", own, symlinks=True)
    return own


@pytest.fixture
def blocks_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that a test plants in the rules of speculative/rules are in what runs."""
    from speculative.decoder import device_loop
    from speculative.decoder.block_loop import BlockLoop

    monkeypatch.setattr(device_loop, "CompiledLoop", BlockLoop)
