"""The whole of Understudy in one file: distil a draft, measure its acceptance, and say whether it pays off.

    python examples/loop.py                     # about two minutes on 2 CPU cores
    python examples/loop.py --steps 300         # a better draft
    python examples/loop.py --help

It uses the packages flat, without config, run folder, ranks or resume; `understudy train` adds those. The target answers prompts,
a student of one of its layers learns the target's next-token distributions, and both decode held-out prompts together.

Shapes: B sequences, T positions, R predicted tokens.
"""

import itertools
import time
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.batches.collate import Batch, Example, collate
from data.batches.packing import plan_epoch
from data.prompts import stdlib
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve
from distill.models.load import load_model, load_tokenizer
from distill.training.module import DraftModule
from distill.training.teacher import Teacher
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Prompt, Response
from speculative.drafters.draft import Draft
from speculative.measure.cost import best_gamma, measure_costs
from speculative.measure.metrics import live_metrics, ratio_with_interval, rule_curve
from speculative.measure.token_scores import score_tokens
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

RULE = Rule.named("sample")  # how the engine accepts: a drafted token stays with probability min(1, target / draft)
SERVING = SamplingSettings(0.7, top_p=0.95)


def prompts_of(tokenizer: PreTrainedTokenizerBase, heldout: bool, count: int, longest: int) -> list[Prompt]:
    """Heads of documented functions of Python's standard library; held-out ones come from other modules."""
    heads = [head for _, head in stdlib.function_head_rows(heldout)]
    chosen = np.random.default_rng(0).permutation(len(heads))
    ids = (tokenizer(heads[number] + "\n")["input_ids"] for number in chosen)
    short = ((str(number), one) for number, one in enumerate(ids) if len(one) <= longest)
    return list(itertools.islice(short, count))


def responses_of(target: PreTrainedModel, prompts: list[Prompt], settings: DecodeSettings) -> list[Response]:
    """The target's own text, with the log-probability of each token. It is what a served draft will have to predict."""
    return decode(target, None, prompts, settings, batch_size=64)[0]


def batches_of(responses: list[Response], batch_size: int) -> Iterator[Batch]:
    """Batches without end. The loss counts response tokens only."""
    examples = [
        Example(
            np.array([*response.prompt_ids, *response.response_ids]),
            np.arange(len(response.prompt_ids) + len(response.response_ids)) >= len(response.prompt_ids),
        )
        for response in responses
    ]
    lengths = [len(example.input_ids) for example in examples]
    epoch = 0
    while True:
        for numbers in plan_epoch(lengths, batch_size, 0, epoch):
            yield collate([examples[number] for number in numbers])
        epoch += 1


def distil(target: PreTrainedModel, student: PreTrainedModel, batches: Iterator[Batch], steps: int) -> None:
    """Train the student in place on the target's next-token distributions.

    First forward KL, because the gradient of a total variation is tiny while both models disagree; then the LK hybrid,
    which turns to the acceptance rate as it rises (2602.23881).
    """
    teacher = Teacher(target)
    warmup, objective = (Objective({name: 1.0}, serving=SERVING, rule=RULE) for name in ("forward_kl", "lk_hybrid"))
    module = DraftModule(student, warmup).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        module.objective = warmup if step <= steps // 10 else objective
        batch = next(batches)
        # Sums over the R predicted tokens, divided once by their number: a mean of means would weigh short responses more.
        loss, accepted, _ = module(batch, teacher.signal(batch))
        (loss / len(batch.labels_R)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            tokens = len(batch.labels_R)
            print(
                f"step {step}: loss {float(loss.detach()) / tokens:.3f}, alpha of the batch {float(accepted) / tokens:.3f}"
            )
    student.eval()


def replayed(student: PreTrainedModel, heldout: list[Response], gamma: int) -> tuple[float, dict[int, float]]:
    """(alpha, tau by gamma) from one pass of the student over the target's held-out responses; no target is needed."""
    keys = [tuple(response.prompt_ids) for response in heldout]
    curve = rule_curve(score_tokens(student, heldout, SERVING), keys, RULE, range(1, 9), survival_gamma=gamma)
    low, high = curve.alpha_ci
    print(
        f"replay: alpha {curve.alpha:.3f} [{low:.3f}, {high:.3f}] on {curve.tokens} tokens of {curve.prompts} prompts"
    )
    return curve.alpha, dict(zip(curve.gammas, curve.tau, strict=True))


def speed_up(
    target: PreTrainedModel, student: PreTrainedModel, prompts: list[Prompt], settings: DecodeSettings, gamma: int
) -> tuple[float, tuple[float, float]]:
    """Tokens per second with the draft over those without, on the same prompts in turn, and its interval over prompts."""
    ways = {"draft": (Draft(student).drafter(), settings.under(RULE, gamma)), "target alone": (None, settings)}
    seconds_per_token: dict[str, list[float]] = {way: [] for way in ways}
    drafted: list[Response] = []
    for drafter, how in ways.values():
        decode(target, drafter, prompts[:2], how, batch_size=1)  # compiles and checks the fast path once
    for prompt in prompts:
        for way, (drafter, how) in ways.items():
            began = time.perf_counter()
            responses, _ = decode(target, drafter, [prompt], how, batch_size=1)
            seconds_per_token[way].append((time.perf_counter() - began) / len(responses[0].response_ids))
            drafted += responses if way == "draft" else []
    numbers = live_metrics(drafted, gamma)
    low, high = numbers["tau_ci"]
    print(f"live: tau {numbers['tau']:.3f} [{low:.3f}, {high:.3f}] at gamma {gamma}")
    keys = [key for key, _ in prompts]
    return ratio_with_interval(np.array(seconds_per_token["target alone"]), np.array(seconds_per_token["draft"]), keys)


def main(
    target: Annotated[
        str, typer.Option(help="directory or hub id of the target; `embedded` is in the package")
    ] = "embedded",
    prompts: Annotated[int, typer.Option(help="training prompts", min=8)] = 400,
    heldout_prompts: Annotated[int, typer.Option(help="held-out prompts", min=4)] = 48,
    max_prompt_tokens: Annotated[int, typer.Option(help="leave out prompts with more tokens", min=4)] = 160,
    max_tokens: Annotated[int, typer.Option(help="tokens of a response at most", min=8)] = 64,
    steps: Annotated[int, typer.Option(help="training steps", min=2)] = 120,
    batch_size: Annotated[int, typer.Option(help="responses of a step", min=1)] = 16,
    gamma: Annotated[int, typer.Option(help="drafted tokens of a block where replay's survival is read", min=1)] = 3,
) -> None:
    """Distil a one-layer draft for the target and say whether it pays off on this machine."""
    torch.manual_seed(0)
    model, tokenizer = load_model("target", target), load_tokenizer(target)
    settings = DecodeSettings(SERVING, max_tokens=max_tokens, eos_ids=(tokenizer.eos_token_id,))
    training = responses_of(model, prompts_of(tokenizer, False, prompts, max_prompt_tokens), settings)
    unseen = prompts_of(tokenizer, True, heldout_prompts, max_prompt_tokens)
    heldout = responses_of(model, unseen, settings)
    print(f"the target wrote {sum(len(one.response_ids) for one in training)} tokens to learn from")

    student = carve(model, (0,))
    replayed(student, heldout, gamma)
    distil(model, student.requires_grad_(True), batches_of(training, batch_size), steps)
    alpha, tau_by_gamma = replayed(student, heldout, gamma)

    # Acceptance alone does not pay: a draft step costs c target steps, and a call that verifies more tokens takes longer.
    costs = measure_costs(model, Draft(student), settings)
    best, predicted = best_gamma(tau_by_gamma, costs)
    if best == 0:
        print(
            f"verdict: alpha {alpha:.3f}; no gamma is predicted to be faster than the target alone (c {costs.cost_ratio:.2f})"
        )
        return
    print(f"predicted: {predicted:.2f}x at gamma {best}, tau {tau_by_gamma[best]:.3f}, c {costs.cost_ratio:.2f}")
    timed, (low, high) = speed_up(model, student, unseen, settings, best)
    pays = "pays off" if low > 1 else "slows the target down" if high < 1 else "may or may not pay off"
    print(f"verdict: alpha {alpha:.3f}; {timed:.2f}x [{low:.2f}, {high:.2f}]: the draft {pays} here")


if __name__ == "__main__":
    typer.run(main)
