"""Static shapes, compiled calls and recorded graphs give the tokens of the plain call."""

import pyarrow.parquet as pq
import pytest
import torch
from cpu_graphs import CpuGraphRunner, tensors_of
from tiny_models import generated, perturbed, prompts_of, texts, tiny_model

from distill.models.load import EMBEDDED_FOLDER, load_tokenizer
from speculative.decode import decode, generate
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.gamma import FixedGamma
from speculative.engine import cached_model, memory
from speculative.engine.runners import Recording, make_runner, resolve_runner
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings

PROMPTS = prompts_of([9, 1, 23, 4, 70, 2, 15])
GREEDY_3 = DecodeSettings(GREEDY, 3, Rule.named("greedy"), max_tokens=24)


class HearsSeconds(FixedGamma):
    """Keeps the times that a policy is told."""

    def __init__(self, gamma):
        super().__init__(gamma)
        self.heard = []

    def record(self, width, active_R, drafted_R, accepted_R, seconds):
        self.heard.append(seconds)


@pytest.fixture
def recorded(monkeypatch):
    """Decoding with runner="graph" on a CPU; the list holds the runners made."""
    made = []

    def make(kind):
        made.append(CpuGraphRunner() if kind == "graph" else make_runner(kind))
        return made[-1]

    monkeypatch.setattr(memory, "make_runner", make)
    monkeypatch.setattr(cached_model, "STATIC_PREFIX", 128)  # several prefixes in a short text
    return made


@pytest.mark.parametrize(("kind", "batch_size"), [("llama", 1), ("llama", 3), ("gpt2", 3), ("gemma2", 3)])
def test_recorded_calls_give_the_tokens_of_plain_ones(recorded, kind, batch_size):
    """Whole blocks, and, for a policy that hears of each block, its calls one by one."""
    target = tiny_model(kind, **({"sliding_window": 6} if kind == "gemma2" else {}))
    draft, prompts = perturbed(target), PROMPTS if batch_size > 1 else PROMPTS[4:]
    settings = [(GREEDY, "greedy"), (SamplingSettings(1.0), "sample"), (SamplingSettings(1.0), "block")]
    for sampling, rule in settings:
        asked = DecodeSettings(sampling, 3, Rule.named(rule), max_tokens=16, eos_ids=(5, 9))
        plain, _ = decode(target, ModelDrafter(draft), prompts, asked, batch_size=batch_size)
        for policy in (None, HearsSeconds(3)):
            static, timing = decode(
                target, ModelDrafter(draft), prompts, asked, batch_size=batch_size, runner="graph", policy=policy
            )
            assert texts(static) == texts(plain)
            assert [text.accepted_counts for text in static] == [text.accepted_counts for text in plain]
            assert (timing.block_seconds > 0) == (policy is None)


def test_what_a_reader_asks_for_comes_from_recorded_blocks_too(recorded, tmp_path):
    """Stop strings, text, the log of proposals, a context that is too short; the stream may be left early."""
    target = tiny_model(vocab_size=400, max_position_embeddings=96)
    draft, tokenizer = perturbed(target), load_tokenizer(str(EMBEDDED_FOLDER))
    asked = DecodeSettings(
        SamplingSettings(1.0), 3, Rule.named("sample"), max_tokens=40, stop=("ing", "("), fit_context=True
    )
    tables, responses = [], []
    for runner in ("eager", "graph"):
        with ProposalLog(tmp_path / f"{runner}.parquet") as log:
            found, timing = decode(
                target, ModelDrafter(draft), PROMPTS, asked, batch_size=3, tokenizer=tokenizer, log=log, runner=runner
            )
        responses.append([(one.response_ids, one.text, one.finish_reason, one.drafted_counts) for one in found])
        order = [("prompt", "ascending"), ("block", "ascending"), ("place", "ascending")]
        tables.append(pq.read_table(tmp_path / f"{runner}.parquet").sort_by(order).to_pydict())
    assert timing.block_seconds > 0
    assert responses[0] == responses[1]
    assert {reason for _, _, reason, _ in responses[0]} == {"stop", "length"}
    for name, expected in tables[0].items():
        # A recorded block feeds the draft one token more, so kernels of another shape round.
        assert tables[1][name] == (pytest.approx(expected, rel=1e-4) if name.endswith("_prob") else expected)
    stream = generate(target, ModelDrafter(draft), PROMPTS, asked, batch_size=3, tokenizer=tokenizer, runner="graph")
    next(stream)
    stream.close()
    assert memory.holds(target, 3, 32)


def test_early_exit_works_with_recorded_calls(recorded):
    target = tiny_model("llama", num_hidden_layers=4)
    responses, _ = decode(target, EarlyExit(target, 3), PROMPTS, GREEDY_3, batch_size=3, runner="graph")
    assert texts(responses) == generated(target, PROMPTS, 24)


def test_buffers_made_in_inference_mode_serve_nobody_outside(recorded):
    target, draft = tiny_model(), perturbed(tiny_model())
    with torch.inference_mode():
        expected, _ = decode(target, ModelDrafter(draft), PROMPTS, GREEDY_3, batch_size=3, runner="graph")
    responses, _ = decode(target, ModelDrafter(draft), PROMPTS, GREEDY_3, batch_size=3, runner="graph")
    assert texts(responses) == texts(expected)


def refused_capture(function, inputs):
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def wrong_capture(function, inputs):
    output = function()
    return Recording(lambda: [part.fill_(7.0) for part in tensors_of(output)], inputs, output)


def empty_capture(function, inputs):
    """As on a device that is not the current one: its buffers hold what the capture left there."""
    return Recording(lambda: None, inputs, function())


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        (refused_capture, "cannot be captured in a CUDA graph .operation not permitted"),
        (wrong_capture, "different logits when replayed"),
        (empty_capture, "different logits when replayed"),
    ],
)
def test_a_model_whose_captures_fail_runs_eagerly_with_one_warning(recorded, monkeypatch, capture, said):
    monkeypatch.setattr(CpuGraphRunner, "_record", lambda self, function, inputs, device: capture(function, inputs))
    target = tiny_model()
    with pytest.warns(UserWarning, match=said) as seen:
        responses, _ = decode(
            target, None, PROMPTS, DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=24), runner="graph"
        )
    assert len(seen) == 1
    assert texts(responses) == generated(target, PROMPTS, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["greedy", "sample", "block"])
def test_graphs_give_the_tokens_of_plain_calls_on_cuda(rule):
    sampling = GREEDY if rule == "greedy" else SamplingSettings(1.0)
    target, draft = tiny_model().cuda(), perturbed(tiny_model()).cuda()
    settings = DecodeSettings(sampling, 3, Rule.named(rule), max_tokens=24)
    for batch_size in (1, 3):
        plain, _ = decode(target, ModelDrafter(draft), PROMPTS, settings, batch_size=batch_size, runner="eager")
        graphed, _ = decode(target, ModelDrafter(draft), PROMPTS, settings, batch_size=batch_size, runner="graph")
        assert texts(graphed) == texts(plain)


def test_runners_are_named():
    assert resolve_runner("auto", torch.device("cpu")) == "compile"
    assert resolve_runner("auto", torch.device("cuda")) == "graph"
    assert resolve_runner("compile", torch.device("cpu")) == "compile"
