"""bench/peers.py: what is counted, who is left out, and how it talks with a worker; no foreign engine is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_modules import ROOT, bench

from speculative.errors import UserError

peers = bench("peers")
SETTING = peers.Setting("target", "draft", 4, 1, 2, 3, 16, (2,))
PROMPTS = [[number, 5] for number in range(4)]


class Fake:
    """Says the prompt's first id, in seconds told beforehand."""

    def __init__(self, seconds: list[float], wrong: tuple[int, ...] = (), fails_at: int = -1) -> None:
        self.seconds, self.wrong, self.fails_at, self.calls, self.closed = seconds, wrong, fails_at, 0, 0

    def open(self, setting: object) -> None:
        self.calls = 0

    def decode(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise UserError("it broke")
        texts = [[99 if ids[0] in self.wrong else ids[0]] * 3 for ids in prompts]
        return texts, self.seconds[(self.calls - 1) % len(self.seconds)]

    def close(self) -> None:
        self.closed += 1


def test_rates_ratios_and_equal_texts() -> None:
    # The first call of each is a warm-up; then chunks 0, 1, 0, 1, 0, 1.
    contestants = {"ours": Fake([9, 1, 1, 2, 1, 3, 1]), "peer": Fake([9, 4, 2, 4, 2, 4, 2], wrong=(3,))}
    scores = peers.compete(contestants, SETTING, PROMPTS, rounds=3)
    ours, peer = peers.cells_of(scores, SETTING, "small")
    assert (ours["tokens_per_second"], ours["best_tokens_per_second"]) == (12 / 3, 12 / 2)
    assert (peer["tokens_per_second"], peer["ours_over_peer"], peer["best_ours_over_peer"]) == (2, 2, 3)
    assert (ours["texts_equal"], peer["texts_equal"], peer["draft"]) == (4, 3, "small")
    assert [one.closed for one in contestants.values()] == [1, 1]


@pytest.mark.parametrize("call", [0, 2])
def test_a_failing_way_costs_its_own_row_alone(call: int, capsys: pytest.CaptureFixture[str]) -> None:
    contestants = {"ours": Fake([1.0]), "peer": Fake([1.0], fails_at=call)}
    scores = peers.compete(contestants, SETTING, PROMPTS, rounds=2)
    assert list(scores) == ["ours"]
    assert len(scores["ours"].seconds[1]) == 2
    assert contestants["peer"].closed == 1
    assert "left out: it broke" in capsys.readouterr().out


def test_a_worker_answers_line_by_line_and_prints_nothing_between(tmp_path: Path) -> None:
    script = tmp_path / "echo_worker.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'bench/peer_workers')!r})\n"
        "from worker import serve\n"
        "class Echo:\n"
        "    def open(self, setting): print('noise'); self.gamma = setting.gamma\n"
        "    def decode(self, prompts): return prompts, float(self.gamma)\n"
        "    def close(self): pass\n"
        "    def versions(self): raise ValueError('none')\n"
        "serve(Echo())\n"
    )
    setting = {
        "target": "t",
        "draft": None,
        "gamma": 3,
        "threads": 1,
        "batch": 1,
        "max_tokens": 2,
        "context": 9,
        "eos_ids": [],
    }
    opened = json.dumps({"do": "open"} | setting)
    asked = f'{opened}\n{{"do": "decode", "prompts": [[1, 2]]}}\n{{"do": "versions"}}\n'
    said = subprocess.run([sys.executable, script], input=asked, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [
        "{}",
        '{"responses": [[1, 2]], "seconds": 3.0}',
        '{"error": "ValueError: none"}',
    ]
    assert "noise" in said.stderr


def test_a_missing_environment_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = sys.modules["peer_workers.child"]
    monkeypatch.setattr(child, "ROOT", tmp_path)
    with peers.ExitStack() as stack, pytest.raises(UserError, match=r"no \.venv-openvino; `make peers` builds it"):
        child.Child("OpenVINO GenAI", tmp_path, {}, "float32", stack)
