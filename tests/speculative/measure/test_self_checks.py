"""The self-check takes what memory there is, and judges against the rounding that the target's dtype really has."""

import inspect
import math

import pytest
import torch
from tiny_models import prompts_of, tiny_model

from speculative.decode import decode
from speculative.decoder import decision
from speculative.decoder.responses import DecodeSettings, Response
from speculative.engine import memory
from speculative.errors import TooLittleMemory
from speculative.measure import self_checks as module
from speculative.measure.self_checks import LEAST_NOISE, Noise, SelfCheckError, measure_noise, near_tie, self_checks
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

TARGET = tiny_model(num_hidden_layers=1)
PROMPTS = prompts_of([5, 9, 4, 7])
SETTINGS = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=8)


def test_where_all_rows_do_not_fit_half_as_many_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 9 + 8 + 3 + 2
    two_rows = 2 * memory.cache_bytes(TARGET, 2, longest) + 2 * memory.block_bytes(TARGET, 2, 4)
    monkeypatch.setattr(memory, "free_bytes", lambda device: two_rows)
    found = self_checks(TARGET, PROMPTS, SETTINGS, batch_size=4)
    assert (found["batch_size"], found["greedy_equal"], found["warnings"]) == (2, 4, [])
    monkeypatch.setattr(memory, "free_bytes", lambda device: two_rows // 4)
    with pytest.raises(TooLittleMemory, match="decoding 1 rows"):
        self_checks(TARGET, PROMPTS, SETTINGS, batch_size=4)


def test_a_near_tie_makes_one_rows_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a whole context of 128 k tokens would be 40 GB."""
    kept, forward = [], TARGET.forward

    def spied(*args: object, logits_to_keep: int = 0, **kwargs: object) -> object:
        out = forward(*args, logits_to_keep=logits_to_keep, **kwargs)
        kept.append(out.logits.shape[1])
        return out

    spied.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(TARGET, "forward", spied)
    texts = [Response("one", [3, 4, 5], response_ids=[6, first]) for first in (7, 8)]
    with pytest.raises(SelfCheckError, match="token 1 of prompt 'one'"):
        near_tie(TARGET, *texts, Noise(0.0, 0.0))
    assert kept == [1]


def test_noise_is_what_the_shape_of_a_call_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that adds 0.5 to one logit in calls of 8 rows: the overlap it lacks is that of two softmaxes, by hand."""
    target = tiny_model(num_hidden_layers=1)
    plain, _ = decode(target, None, PROMPTS[:1], DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=5))
    quiet = measure_noise(target, plain, SETTINGS.sampling)
    assert quiet == LEAST_NOISE[torch.float32]

    def shifted(_: object, args: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 0.5 * torch.nn.functional.one_hot(torch.tensor(3), logits.shape[-1]) * (logits.shape[0] == 8)

    target.lm_head.register_forward_hook(shifted)
    noise = measure_noise(target, plain, SETTINGS.sampling, 8)
    ids = torch.tensor([[*plain[0].prompt_ids, *plain[0].response_ids[:-1]]])
    lacks, moved = [], []
    for logits in target(ids).logits[0, -5:].tolist():
        others = [value + 0.5 * (token == 3) for token, value in enumerate(logits)]
        one, two = ([math.exp(v) / sum(map(math.exp, row)) for v in row] for row in (logits, others))
        lacks.append(1 - sum(map(min, one, two)))
        moved.append(2 * 0.5 / max(map(abs, logits)))
    assert noise.overlap == pytest.approx(sum(lacks) / 5, rel=1e-3)
    assert noise.gap == pytest.approx(max(moved), rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "overlap", "said"),
    [
        (torch.bfloat16, 0.2, 1),
        (torch.bfloat16, 0.05, 1),
        (torch.bfloat16, 0.01, None),
        (torch.float32, 0.2, None),  # float32 rounds less, whatever the model's own calls differ by
    ],
)
def test_beyond_the_noise_is_a_warning_and_beyond_three_times_a_stop(
    dtype: torch.dtype, overlap: float, said: int | None, monkeypatch: pytest.MonkeyPatch, blocks_in_python: None
) -> None:
    """A rule that thinks the target a tenth less likely rejects about a tenth of its own tokens."""
    target = tiny_model(num_hidden_layers=1, dtype=dtype)
    verify = decision.verify
    monkeypatch.setattr(decision, "verify", lambda target, *others, **lossy: verify(0.9 * target, *others, **lossy))
    monkeypatch.setattr(module, "measure_noise", lambda *_: Noise(overlap, 1e-4))
    settings = DecodeSettings(SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=32)
    if said is None:
        with pytest.raises(
            SelfCheckError, match=rf"by live decoding; it must be within .* of 1.000, 3 times the noise of {dtype}"
        ):
            self_checks(target, PROMPTS, settings)
    else:
        found = self_checks(target, PROMPTS, settings)
        assert len(found["warnings"]) == said
        assert found["alpha_tolerance"] == pytest.approx(3 * 0.05), "more noise than that excuses nothing"
