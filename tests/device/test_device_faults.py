"""Faults that a decoder on the device invites are planted here, one by one: each is seen."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_models import perturbed, prompts_of, texts, tiny_model

from speculative import decode as decoding
from speculative.decode import decode
from speculative.decoder import device_loop
from speculative.decoder.device_loop import DeviceLoop
from speculative.decoder.responses import DecodeSettings, StageClock
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.gamma import FixedGamma
from speculative.engine import memory
from speculative.engine.cached_model import CachedModel
from speculative.engine.runners import GRAPHED, GraphRunner
from speculative.errors import TooLittleMemory, UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

pytestmark = pytest.mark.device

TARGET = tiny_model(num_hidden_layers=1)
DRAFT = perturbed(TARGET)
PROMPTS = prompts_of([7, 3, 60, 12, 5])
SETTINGS = DecodeSettings(SamplingSettings(0.9, top_p=0.95), 3, Rule.named("sample"), max_tokens=12, eos_ids=(5,))


class Hears(FixedGamma):
    """A policy that wants to know of each block: its calls are recorded one by one."""


def decoded(policy: FixedGamma | None = None) -> Any:
    target, draft = copy.deepcopy(TARGET).to("cuda"), copy.deepcopy(DRAFT).to("cuda")
    for _ in range(2):  # The second call finds everything recorded.
        responses, _ = decode(
            target, ModelDrafter(draft), PROMPTS, SETTINGS, batch_size=2, runner="graph", policy=policy
        )
    return texts(responses)


EXPECTED = texts(decode(TARGET, ModelDrafter(DRAFT), PROMPTS, SETTINGS, batch_size=2)[0])


def stale_input(plant: Any) -> None:
    """A recorded call reads what its first caller gave."""

    def run(self: GraphRunner, function: Any, tensors: Any, constants: Any) -> Any:
        key = (tuple(tensor.shape for tensor in tensors), constants)
        if key in self._recorded:
            self._recorded[key].replay()
            return self._recorded[key].output.clone()
        return honest(self, function, tensors, constants)

    honest = GraphRunner.run
    plant(GraphRunner, "run", run)


def text_not_sent(plant: Any) -> None:
    """A row that changed hands goes on with the text of who sat there before."""
    honest = device_loop.upload
    plant(device_loop, "upload", lambda array, device: honest(np.ones_like(array), device))


def output_not_copied(plant: Any) -> None:
    """The host is handed the recording's own memory."""
    plant(device_loop, "_on_the_way", lambda block: block.packed)


def read_too_early(plant: Any) -> None:
    """Nobody waits for the copy."""
    plant(StageClock, "seconds", lambda self: {})


def wrong_block(plant: Any) -> None:
    """The block that is on its way is taken for the one that was read."""

    def land(self: DeviceLoop, flight: Any) -> Any:
        return honest(self, self._flight or flight)

    honest = DeviceLoop._land
    plant(DeviceLoop, "_land", land)


def stranger_in_the_seat(plant: Any) -> None:
    """A block that was launched before a row changed hands is given to who sits there now."""
    plant(DeviceLoop, "_seated", lambda self, flight: self.active_R)


def wrong_bucket(plant: Any) -> None:
    """Attention reads fewer positions than there are."""
    plant(CachedModel, "static_prefix", lambda self, stop: 64)


def rows_compacted(plant: Any) -> None:
    """Rows are moved though recordings know them by address."""
    plant(decoding, "UNRECORDED", (GRAPHED,))


@pytest.mark.parametrize(
    ("fault", "policy"),
    [
        (stale_input, Hears(3)),
        (text_not_sent, None),
        (wrong_block, None),
        (stranger_in_the_seat, None),
        (wrong_bucket, None),
        (wrong_bucket, Hears(3)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_planted_fault_gives_other_text(
    fault: Callable[[Any], None], policy: FixedGamma | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch.setattr)
    assert decoded(policy) != EXPECTED


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (output_not_copied, TypeError, "convert cuda"),
        (read_too_early, UserError, "NaN or infinite logits"),
        (rows_compacted, AssertionError, "a recording knows its rows"),
    ],
)
def test_a_planted_fault_is_refused(
    fault: Callable[[Any], None], kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch.setattr)
    with pytest.raises(kind, match=words):
        decoded()


@pytest.mark.parametrize("policy", [None, Hears(3)])
def test_without_a_fault_there_is_nothing_to_see(policy: FixedGamma | None) -> None:
    assert decoded(policy) == EXPECTED


def test_memory_is_planned_with_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier call of the same shape left is not asked for again; for another shape it is given up first."""
    target, draft = copy.deepcopy(TARGET).to("cuda"), copy.deepcopy(DRAFT).to("cuda")
    wanted = memory.cache_bytes(target, 2, 128) + memory.cache_bytes(draft, 2, 128)
    logits = memory.block_bytes(target, 2, 4) + memory.block_bytes(draft, 2, 4)
    free = wanted + logits
    memory.release()
    monkeypatch.setattr(
        memory,
        "free_bytes",
        lambda device: free - sum(states.nbytes for kept in memory.idle_memories() for states in kept.cache.buffers),
    )

    def run(rows: int, prompts: Any) -> int:
        return decode(target, ModelDrafter(draft), prompts, SETTINGS, batch_size=rows, runner="graph")[
            1
        ].recording_calls

    assert run(2, PROMPTS) > 0
    assert run(2, PROMPTS) == 0
    assert run(1, PROMPTS) > 0
    assert run(2, PROMPTS) > 0  # Both do not fit beside each other.
    with pytest.raises(TooLittleMemory):
        run(5, PROMPTS)
