"""What a given time of distillation on this machine achieves: alpha, tau and argmax agreement on held-out responses.

    python bench/yardstick.py --target DIR --draft DIR --data DIR --domain wikisql --cpu-minutes 2.5 --seeds 0,1,2 --out FILE
    python bench/yardstick.py --target DIR --data DIR --domain wikisql --student carved --out FILE
    python bench/yardstick.py ... --modes ours objective=forward_kl optimizer=adamw lr=1e-3 signal=online   # any recipe
    python bench/yardstick.py ... --modes ours --vary prompt_weight=0,.1,.3,1                               # several values of one key

Protocol: 1,500 training prompts and 200 held-out ones of a domain, with one response of the target to each, sampled at
temperature 1 without truncation, at most 96 tokens. They are generated once, before timing, and kept in --cache. Then
the draft trains for the given minutes of wall clock, or of CPU time of the process, which is reproducible on a shared machine.
The time includes all work of the target that training needs. alpha is the mean over the held-out response positions of
sum_v min(target, draft), computed dense; tau is from replay.

All modes run for each seed in turn. Each mode's gain in alpha over the first one is paired by seed, with its 95 % t-interval.
With --out the results are written after each run, and the same command resumes.

`plain` is the baseline: AdamW 1e-3, batches of 32, the target in every step, forward KL over the
logits of all response positions, float32, no schedule. `ours` is the recipe given by `key=value` (see `Recipe`), with
the product's loss, teacher signals and optimizers; its learning rate follows the clock.
"""

from __future__ import annotations

from distill.faults import run_script

import contextlib
import copy
import dataclasses
import gzip
import hashlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from scipy import stats

from data.batches.collate import Batch, Example, collate
from data.batches.examples import as_examples
from data.batches.packing import plan_epoch
from data.prompts.prompt import PromptRow, Template
from data.prompts.template import loss_mask, render_prompt
from data.responses.rendered import RenderedPrompt
from data.responses.synthetic import mixed_rows, sampled_rows, synthetic_rows
from data.signals.store import SignalStore, signal_manifest
from distill.config.sections import OptimConfig
from distill.loss.definitions import Objective, overlap
from distill.loss.offsets import Survival, drawn_depths
from distill.models.carving.layers import carve, layer_list
from distill.models.heads import SplitModel
from distill.models.load import load_model, load_tokenizer, model_fingerprint
from distill.models.vocabulary import vocabulary_rows
from distill.run.provenance import describe_run
from distill.training.module import DraftModule
from distill.training.optim import make_optimizers, weight_average
from distill.training.teacher import CapturingTeacher, Teacher
from result_file import command_line, write_result
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.engine.models import end_token_ids, mask_token_of
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.replay import replay
from speculative.measure.token_scores import score_responses
from speculative.rules.sampling import SamplingSettings

GAMMAS = (3, 5)
Prompts = list[list[int]]
Now = Callable[[], float]  # seconds, from anywhere


@dataclass(frozen=True)
class Recipe:
    """How a draft is trained for a stretch of time. Ratios are shares of that time."""

    objective: str = "forward_kl"  # or a sum such as forward_kl+tv
    warm_objective: str = "forward_kl"  # objective of the first `warm_ratio`
    warm_ratio: float = 0.0
    temperature: float = 1.0
    eta: float = 3.0
    gamma: int = 5  # of accepted_length
    optimizer: str = "muon"  # adamw, muon, adamw8bit
    lr: float = 1e-2
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    batch: int = 16
    schedule: str = "cosine"  # or constant
    warmup: float = 0.03
    final: float = 0.05  # learning rate at the end / peak
    autocast: bool = True  # bf16, of the target's forward too
    signal: str = "capture"  # online: the target in every step; capture: once per sequence, its top-k kept on disk
    k: int = 256
    prompt_weight: float = 0.0  # of a prompt's token; a response's has 1
    synthetic: int = 0  # prompts made by us, answered before the clock starts
    synthetic_method: str = "magpie"  # or mix
    parallel: int = 0  # tokens of a block that are learnt in one pass; the student's config names its mask token
    retain: float = 0.7  # of the conditional drop there
    ema: float = 0.0
    chunk: int = 0  # response tokens whose logits exist at once; 0 = ours to choose
    compile: bool = False
    layers: str = "0,-1"  # of the target, for a carved student

    @classmethod
    def parse(cls, assignments: Sequence[str]) -> Recipe:
        """From `key=value` texts.

        Raises:
            UserError: an unknown key, a value of another type.
        """
        values: dict[str, Any] = {}
        kinds = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        for assignment in assignments:
            key, _, text = assignment.partition("=")
            if key not in kinds:
                raise UserError(f"{assignment}: no such key; there are {', '.join(kinds)}")
            try:
                values[key] = {"true": True, "false": False}[text] if kinds[key] is bool else kinds[key](text)
            except (ValueError, KeyError) as error:
                raise UserError(f"{assignment}: the value should be a {kinds[key].__name__}") from error
        return cls(**values)

    def objective_at(self, share: float) -> Objective:
        """The objective after a share of the time."""
        names = self.warm_objective if share < self.warm_ratio else self.objective
        weights = dict.fromkeys(names.split("+"), 1.0)
        return Objective(
            weights,
            self.temperature,
            eta=self.eta,
            gamma=self.gamma,
            chunk_tokens=self.chunk or None,
            compile=self.compile,
        )

    def lr_at(self, share: float) -> float:
        """The learning rate after a share of the time."""
        if share < self.warmup:
            return self.lr * share / self.warmup
        if self.schedule == "constant":
            return self.lr
        progress = min(1.0, (share - self.warmup) / (1.0 - self.warmup))
        return self.lr * (self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


PLAIN = Recipe(
    optimizer="adamw",
    lr=1e-3,
    weight_decay=0.0,
    batch=32,
    schedule="constant",
    warmup=0.0,
    autocast=False,
    signal="online",
)


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of the first jsonl file (gzipped or not) in a folder."""
    files = sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")))
    if not files:
        raise UserError(f"{folder}: no .jsonl or .jsonl.gz there; give the folder of the domain with --data")
    with gzip.open(files[0], "rt", encoding="utf-8") if files[0].suffix == ".gz" else files[0].open() as lines:
        for line in lines:
            yield json.loads(line)


def domain_prompts(folder: Path, tokenizer: Any, most_tokens: int, count: int) -> Prompts:
    """Ids of distinct prompts in the order of their hashes."""
    return [ids for _, ids in domain_rows(folder, tokenizer, most_tokens, count)]


def domain_rows(folder: Path, tokenizer: Any, most_tokens: int, count: int) -> list[tuple[PromptRow, list[int]]]:
    """(row, ids) of distinct prompts, ordered by hash: a question, or a dialogue up to a user's turn."""
    conversations: dict[str, list[dict[str, str]]] = {}
    for row in read_rows(folder):
        messages = row.get("messages") or [{"role": "user", "content": row["question"]}]
        turns = [place for place, message in enumerate(messages) if message["role"] == "user"]
        key = json.dumps(messages, sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()
        conversations[digest] = messages[: random.Random(digest).choice(turns) + 1]
    found: list[tuple[PromptRow, list[int]]] = []
    for digest in sorted(conversations):
        row = PromptRow(None, tuple(conversations[digest]), None, "", digest)
        ids = render_prompt(row, tokenizer, Template(mode="chat"))
        if len(ids) <= most_tokens and ids not in [earlier for _, earlier in found[-50:]]:
            found.append((row, ids))
        if len(found) == count:
            break
    return found


def synthetic_prompts(
    target: Any,
    tokenizer: Any,
    own: Sequence[PromptRow],
    heldout: Sequence[PromptRow],
    recipe: Recipe,
    most_tokens: int,
    cache: Path,
) -> tuple[Prompts, dict[str, int]]:
    """Ids of the recipe's synthetic prompts, and what was left out; a user's turn has at most 128 tokens."""

    def sampled(openings: Sequence[RenderedPrompt], samples: int) -> list[tuple[str, list[int]]]:
        wanted = [opening for _ in range(samples) for opening in openings]
        turns = respond(target, [list(opening.prompt_ids) for opening in wanted], 128, 3, False, cache)
        return [(opening.prompt_id, list(turn.response_ids)) for opening, turn in zip(wanted, turns, strict=True)]

    def ids(row: PromptRow) -> list[int]:
        return render_prompt(row, tokenizer, Template(mode="chat"))

    if recipe.synthetic_method == "mix":
        candidates = mixed_rows(own, 0)
    else:
        candidates = sampled_rows(own, tokenizer, sampled, end_token_ids(target), 0, Template())
    rows, counts = synthetic_rows(own, heldout, recipe.synthetic, candidates, lambda row: len(ids(row)) <= most_tokens)
    return [ids(row) for row in rows], counts


def respond(
    target: Any, prompts: Prompts, max_tokens: int, seed: int, greedy: bool, cache: Path
) -> list[HeldoutResponse]:
    """The target's responses, one to each prompt; read from the cache when they are there."""
    settings = DecodeSettings(
        SamplingSettings(0.0 if greedy else 1.0),
        0,
        "greedy" if greedy else "sample",
        max_tokens,
        end_token_ids(target),
        seed,
    )
    identity = json.dumps([model_fingerprint(target), prompts, max_tokens, seed, greedy, settings.eos_ids])
    path = cache / f"responses-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        keyed = [(str(number), prompt) for number, prompt in enumerate(prompts)]
        responses, _ = decode(target, None, keyed, settings, batch_size=64)
        rows = [[r.key, "", list(r.prompt_ids), list(r.response_ids), list(r.log_target_probs)] for r in responses]
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(rows), encoding="utf-8")
        partial.replace(path)
    return [HeldoutResponse(*row) for row in json.loads(path.read_text(encoding="utf-8"))]


def examples_of(responses: Sequence[HeldoutResponse], prompt_weight: float = 0.0) -> list[Example]:
    """Training sequences."""
    return [
        Example(
            np.array([*r.prompt_ids, *r.response_ids], dtype=np.int32),
            np.array(loss_mask(len(r.prompt_ids), len(r.prompt_ids) + len(r.response_ids))),
            prompt_weight=prompt_weight,
        )
        for r in responses
    ]


def _groups(examples: Sequence[Example], size: int = 32) -> Iterator[Batch]:
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].input_ids))
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        yield collate([examples[number] for number in numbers], 0, numbers)


@torch.no_grad()
def measure(target: Any, draft: Any, heldout: Sequence[HeldoutResponse]) -> dict[str, Any]:
    """{alpha, alpha_sampled, agreement, tau: {gamma: ...}, tokens} on sampled held-out responses.

    alpha: mean over positions of sum_v min(target, draft), dense. alpha_sampled: the mean of min(1, draft / target) of the
    tokens, an estimate of the same. agreement: share of positions whose two argmaxes are equal.
    """
    draft.eval()
    teacher, split = Teacher(target), SplitModel(draft)
    common = agreed = tokens = 0.0
    for batch in _groups(examples_of(heldout)):
        signal = teacher.signal(batch)
        hidden_BTD = split.hidden(batch.input_ids_BT)
        hidden_RD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[batch.rows_R]
        for start in range(0, len(hidden_RD), 512):
            rows = slice(start, start + 512)
            pair = [head(h[rows]).float() for head, h in ((signal.head, signal.hidden_RD), (split.head, hidden_RD))]
            common += float(overlap(pair[0].softmax(-1), pair[1].softmax(-1)).double().sum())
            agreed += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        tokens += len(hidden_RD)
    accept = score_responses(draft, heldout, SamplingSettings(1.0))
    return {
        "alpha": common / tokens,
        "alpha_sampled": float(np.concatenate(accept).mean()),
        "agreement": agreed / tokens,
        "tau": {str(gamma): tau for gamma, tau in replay(accept, GAMMAS).items()},
        "tokens": int(tokens),
    }


def greedy_agreement(draft: Any, heldout: Sequence[HeldoutResponse]) -> float:
    """Share of the tokens of greedy responses that are the draft's argmax: alpha at temperature 0."""
    scores = score_responses(draft.eval(), heldout, SamplingSettings(0.0), "greedy")
    return float(np.concatenate(scores).mean())


class Clock:
    """Time budget: a step that would exceed it is not started."""

    def __init__(self, seconds: float, now: Now) -> None:
        self.seconds, self.now, self.began, self.ends = seconds, now, now(), [0.0]

    def share(self) -> float:
        """Used share of the budget after the last step."""
        return self.ends[-1] / self.seconds

    def tick(self) -> bool:
        """Record the end of a step; returns whether another step of median length fits."""
        self.ends.append(self.now() - self.began)
        recent = np.diff(self.ends[-20:])
        return self.ends[-1] + float(np.median(recent)) <= self.seconds


def train_plain(
    student: Any, target: Any, examples: Sequence[Example], seconds: float, seed: int, now: Now = time.perf_counter
) -> dict[str, Any]:
    """The plain loop. {seconds, steps, tokens_trained: response tokens}."""
    generator = np.random.default_rng(seed)
    clock = Clock(seconds, now)
    optimizer = torch.optim.AdamW(student.parameters(), lr=PLAIN.lr)
    student.train()
    order: list[int] = []
    tokens, going = 0, True
    while going:
        if len(order) < PLAIN.batch:
            order = generator.permutation(len(examples)).tolist()
        numbers, order = order[: PLAIN.batch], order[PLAIN.batch :]
        batch = collate([examples[number] for number in numbers], 0)
        with torch.no_grad():
            target_log_probs_RV = (
                target(batch.input_ids_BT, use_cache=False).logits.flatten(0, 1)[batch.rows_R].log_softmax(-1)
            )
        student_log_probs_RV = (
            student(batch.input_ids_BT, use_cache=False).logits.flatten(0, 1)[batch.rows_R].log_softmax(-1)
        )
        loss = (target_log_probs_RV.exp() * (target_log_probs_RV - student_log_probs_RV)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += batch.labels_R.numel()
        going = clock.tick()
    return {"seconds": clock.ends[-1], "steps": len(clock.ends) - 1, "tokens_trained": tokens}


def batches(
    examples: Sequence[Example], size: int, seed: int, parallel: int = 0, retain: float = 1.0
) -> Iterator[Batch]:
    """The product's batches, epoch after epoch."""

    def asked(number: int) -> Example:
        example, generator = examples[number], np.random.default_rng((seed, epoch, number))
        return (
            example
            if not parallel
            else replace(example, depths=drawn_depths(generator, np.asarray(example.loss_mask), parallel, retain))
        )

    lengths = np.array([len(example.input_ids) for example in examples])
    for epoch in range(1 << 30):
        for numbers in plan_epoch(lengths, size, seed, epoch):
            yield collate([asked(number) for number in numbers], 0, numbers.tolist())


def captured(target: Any, examples: Sequence[Example], k: int, temperature: float, folder: str) -> CapturingTeacher:
    """A teacher whose target runs once per sequence."""
    manifest = signal_manifest(
        "topk",
        k,
        temperature=temperature,
        vocab_rows=vocabulary_rows(target.config),
        target="",
        target_dtype=str(target.dtype),
        seed=0,
    )
    store = SignalStore(Path(folder))
    store.open(manifest, as_examples(examples).predicted_N)
    return CapturingTeacher(Teacher(target), store)


def train_ours(
    student: Any,
    target: Any,
    examples: Sequence[Example],
    recipe: Recipe,
    seconds: float,
    seed: int,
    steps: int | None = None,
    now: Now = time.perf_counter,
) -> dict[str, Any]:
    """Train with the recipe for the given seconds or steps. {seconds, steps, tokens_trained, epochs, student}."""
    if recipe.parallel and mask_token_of(student.config) is None:
        raise UserError("parallel: config.json of the draft names no mask token (pard_token); see bench/parallel.py")
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(seconds, now)
        online = recipe.signal == "online"
        source: Any = Teacher(target) if online else captured(target, examples, recipe.k, recipe.temperature, folder)
        survival = Survival(recipe.parallel, recipe.retain) if recipe.parallel else None
        module = DraftModule(student, recipe.objective_at(0.0), survival)
        if recipe.compile:
            for layer in layer_list(student)[1]:
                layer.compile()
        optim = OptimConfig(
            name=recipe.optimizer, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay
        )
        optimizers = make_optimizers(module, optim)
        average = weight_average(student, recipe.ema) if recipe.ema else None
        tokens = 0
        for done, batch in enumerate(batches(examples, recipe.batch, seed, recipe.parallel, recipe.retain)):
            share = clock.share() if steps is None else done / steps
            one_step(module, source, batch, optimizers, recipe, share)
            if average is not None:
                average.update_parameters(student)
            tokens += batch.response_tokens
            going = clock.tick()
            if not going or done + 1 == steps:
                break
    epochs = (len(clock.ends) - 1) * recipe.batch / len(examples)
    trained = average.module if average is not None else student
    return {
        "seconds": clock.ends[-1],
        "steps": len(clock.ends) - 1,
        "tokens_trained": tokens,
        "epochs": epochs,
        "student": trained,
    }


def one_step(
    module: DraftModule, source: Any, batch: Batch, optimizers: Sequence[Any], recipe: Recipe, share: float
) -> None:
    """Forward, backward and update, at the learning rate and with the objective of a share of the time."""
    module.train()
    module.objective = recipe.objective_at(share)
    with torch.autocast("cpu", torch.bfloat16) if recipe.autocast else contextlib.nullcontext():
        signal = source.signal(batch)
        loss, *_ = module(batch, signal)
    (loss / batch.response_tokens).backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), recipe.clip)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr_at(share)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if module.survival is not None:
        module.survival.settle()


def make_draft(target: Any, draft: str | None, student: str, layers: str) -> Callable[[], Any]:
    """A function that makes a new copy of the untrained draft."""
    if student == "carved":
        return lambda: carve(target, [int(layer) for layer in layers.split(",")])
    if draft is None:
        raise UserError("--student draft needs --draft DIR")
    model = load_model("draft", draft)
    return lambda: copy.deepcopy(model)


def recipes_of(modes: str, recipe: Sequence[str], vary: str) -> dict[str, Recipe]:
    """Name of a mode -> its recipe; `vary` (KEY=VALUE,VALUE,...) makes one of each value, in addition to `plain` if that is among the modes.

    Raises:
        UserError: an unknown mode, key or value.
    """
    key, _, values = vary.partition("=")
    found: dict[str, Recipe] = {}
    for mode in modes.split(","):
        if mode not in ("plain", "ours"):
            raise UserError(f"--modes {mode}: there are plain and ours")
        if mode == "plain":
            found[mode] = PLAIN
        elif not vary:
            found[mode] = Recipe.parse(recipe)
        else:
            found |= {f"{key}={value}": Recipe.parse([*recipe, f"{key}={value}"]) for value in values.split(",")}
    return found


def with_earlier(out: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """The result, with recipes and runs of earlier calls with the same settings from its file.

    Raises:
        UserError: the file was made with other settings.
    """
    if out is None or not out.exists():
        return result
    found = json.loads(out.read_text(encoding="utf-8"))
    for key in ("domain", "student", "minutes", "clock", "train_responses"):
        if found.get(key) != result[key]:
            raise UserError(f"{out}: made with another {key}; delete it, or give another --out")
    for name, recipe in result["recipes"].items():
        if asdict(Recipe(**found["recipes"].get(name, recipe))) != recipe:  # a key that came later has its default
            raise UserError(f"{out}: {name} had another recipe; delete it, or give another --out")
    told = {"command": command_line(found.get("command", ""))}
    told |= {"recipes": found["recipes"] | result["recipes"], "runs": found["runs"], "gains": gains(found["runs"])}
    return result | told


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None]:
    """(mean, half width of its t-interval); no width from a single value."""
    if len(values) < 2:
        return statistics.mean(values), None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1) * error)


def gains(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mode -> {alpha: mean gain over the first mode, half: of its 95 % t-interval, seeds}, paired by seed."""
    by_mode: dict[str, dict[int, float]] = {}
    for run in runs:
        by_mode.setdefault(run["mode"], {})[run["seed"]] = run["alpha"]
    reference, found = next(iter(by_mode.values()), {}), {}
    for mode, alphas in list(by_mode.items())[1:]:
        pairs = [alphas[seed] - reference[seed] for seed in alphas if seed in reference]
        if pairs:
            mean, half = interval(pairs)
            found[mode] = {"alpha": mean, "half": half, "seeds": len(pairs)}
    return found


def main(
    recipe: Annotated[list[str] | None, typer.Argument(help="key=value of the recipe of `ours`")] = None,
    target: Annotated[str, typer.Option(help="directory or hub id")] = "embedded",
    draft: Annotated[str | None, typer.Option(help="directory or hub id, for --student draft")] = None,
    data: Annotated[Path, typer.Option(help="folder of the domains, or of the domain")] = Path(),
    domain: Annotated[str, typer.Option(help="subfolder of --data, and the name in the table")] = "wikisql",
    student: Annotated[str, typer.Option(help="draft: as it is; carved: layers of the target")] = "draft",
    minutes: Annotated[float, typer.Option(help="of training; 0 = none, the draft as it is", min=0)] = 2.5,
    cpu_minutes: Annotated[float, typer.Option(help="of the process's CPU time, instead of --minutes", min=0)] = 0.0,
    modes: Annotated[str, typer.Option(help="comma-separated: plain, ours")] = "plain,ours",
    vary: Annotated[str, typer.Option(help="KEY=VALUE,VALUE: `ours` once with each of these")] = "",
    seeds: Annotated[str, typer.Option(help="comma-separated: each is a run of each mode")] = "0",
    train_prompts: Annotated[int, typer.Option(min=1)] = 1500,
    heldout_prompts: Annotated[int, typer.Option(min=2)] = 200,
    max_tokens: Annotated[int, typer.Option(help="of a response", min=1)] = 96,
    max_prompt_tokens: Annotated[int, typer.Option(help="longer prompts are left out", min=1)] = 256,
    cache: Annotated[Path, typer.Option(help="where responses are kept")] = Path("runs/yardstick"),
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = torch's own choice", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON to write")] = None,
) -> None:
    """Trains and measures."""
    if threads:
        torch.set_num_threads(threads)
    recipes = recipes_of(modes, recipe or [], vary)
    model, tokenizer = load_model("target", target), load_tokenizer(target)
    folder = data / domain if (data / domain).is_dir() else data
    rows = domain_rows(folder, tokenizer, max_prompt_tokens, train_prompts + heldout_prompts)
    prompts = [ids for _, ids in rows]
    if len(prompts) < train_prompts + heldout_prompts:
        raise UserError(f"{folder}: {len(prompts)} prompts of at most {max_prompt_tokens} tokens are too few")
    heldout = respond(model, prompts[:heldout_prompts], max_tokens, 1, False, cache)
    responses = respond(model, prompts[heldout_prompts:], max_tokens, 0, False, cache)
    facts, console = describe_run(0), Console(width=120)
    result: dict[str, Any] = {
        "machine": {key: value for key, value in facts.items() if key not in ("uncommitted_changes", "argv")},
        "domain": domain,
        "student": student,
        "minutes": cpu_minutes or minutes,
        "clock": "cpu" if cpu_minutes else "wall",
        "recipes": {name: asdict(one) for name, one in recipes.items()},
        "train_responses": len(responses),
    }
    result = with_earlier(out, result | {"runs": []})
    result["before"] = measure(model, make_draft(model, draft, student, PLAIN.layers)(), heldout)
    for seed in map(int, seeds.split(",")) if result["minutes"] else ():
        for name, one in recipes.items():
            if any((run["mode"], run["seed"]) == (name, seed) for run in result["runs"]):
                continue
            learner = make_draft(model, draft, student, one.layers)().requires_grad_(True)
            began, made, counts = time.process_time(), [], {}
            if one.synthetic:
                sides = [row for row, _ in rows[heldout_prompts:]], [row for row, _ in rows[:heldout_prompts]]
                more, counts = synthetic_prompts(model, tokenizer, *sides, one, max_prompt_tokens, cache)
                made = respond(model, more, max_tokens, 2, False, cache)
            spent_before = {"synthetic": counts, "cpu_seconds_before": time.process_time() - began}
            budget, now = 60 * result["minutes"], time.process_time if cpu_minutes else time.perf_counter
            examples = examples_of([*responses, *made], one.prompt_weight)
            if one == PLAIN:
                spent = train_plain(learner, model, examples, budget, seed, now)
            else:
                spent = train_ours(learner, model, examples, one, budget, seed, now=now)
                learner = spent.pop("student")
            run = (
                {"mode": name, "seed": seed}
                | (spent_before if counts else {})
                | spent
                | measure(model, learner, heldout)
            )
            result["runs"].append(run)
            result["gains"] = gains(result["runs"])
            print(f"{name} seed {seed}: alpha {run['alpha']:.4f}, {run['steps']} steps", file=sys.stderr, flush=True)
            if out is not None:
                write_result(out, result)
    if out is not None:
        write_result(out, result)
    console.print(table_of(result))


def table_of(result: dict[str, Any]) -> Table:
    """One line per mode: means over the seeds, and the gain in alpha over the first mode."""
    title = (
        f"{result['domain']} ({result['before']['tokens']:,} held-out tokens), {result['student']}, "
        f"{result['minutes']:g} {result['clock']} minutes"
    )
    table = Table("draft", "alpha", "gain", "sampled", "agreement", "tau 3", "tau 5", "tokens", "epochs", title=title)
    rows = {"as it is": [result["before"]]}
    for run in result["runs"]:
        rows.setdefault(run["mode"], []).append(run)
    for name, values in rows.items():
        mean = {key: statistics.mean(v[key] for v in values) for key in ("alpha", "alpha_sampled", "agreement")}
        alpha, *others = (f"{value:.4f}" for value in mean.values())
        tau = [statistics.mean(v["tau"][str(gamma)] for v in values) for gamma in GAMMAS]
        tokens = f"{statistics.mean(v['tokens_trained'] for v in values):,.0f}" if "tokens_trained" in values[0] else ""
        epochs = f"{values[0]['epochs']:.1f}" if "epochs" in values[0] else ""
        gain = result.get("gains", {}).get(name)
        won = "" if gain is None else f"{gain['alpha']:+.4f}" + (f" +- {gain['half']:.4f}" if gain["half"] else "")
        table.add_row(name, alpha, won, *others, *(f"{value:.2f}" for value in tau), tokens, epochs)
    return table


if __name__ == "__main__":
    run_script(main)
