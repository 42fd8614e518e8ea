"""Time and memory of one distillation step, compared with a plain PyTorch baseline and TRL's trainers, in one run.

    python bench/train_step.py --out bench/results/train_step_cpu.json                   # random weights, V 4,096, 8 x 256 tokens
    python bench/train_step.py --pair embedded --out FILE                                # the shipped target, a draft carved from it
    python bench/train_step.py --target DIR --draft DIR --out FILE                       # any other pair

All contestants use the same models, tokens, lengths, float32, AdamW and gradient clipping. They take one step each in turn,
and a time is the median over the rounds. TRL runs through its own `trainer.train()` on data tokenised
beforehand, and every time includes data loading. End tokens are ignored, so all read and write the same
number of tokens. Peak memory is the growth of a separate process over its state before the steps.

Policies: `off` reads responses and asks the target; `store` reads responses and stored top-64 signals; with `on` the student
writes the responses first. `rollout_every` of an `on` cell is the number of steps that share responses: TRL uses 1, and ours
uses more by default.

The baseline (`floor`) is forward KL over the full-vocabulary logits of all positions, after transformers' `generate` if on policy.
`vs_floor` is the time divided by its time, for any objective. `vs_own_floor` is the same with the cell's objective in the
baseline. `vs_trl` is the speed relative to the fastest TRL trainer with the cell's settings and objective.
The memory of the loss alone is measured by bench/loss.py.
"""

from __future__ import annotations

from distill.faults import run_script

import copy
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from data.batches.collate import Example, collate
from data.prompts import stdlib
from data.responses.rendered import RenderedPrompt
from data.signals.store import SignalStore, signal_manifest
from distill.config.load import parse_config
from distill.config.sections import OptimConfig, RolloutConfig
from distill.loss.definitions import Objective
from distill.models.carving.layers import carve, layer_list
from distill.models.load import load_model, load_tokenizer, model_fingerprint
from distill.models.vocabulary import vocabulary_rows
from distill.run.provenance import describe_run
from distill.run.run import Run
from distill.training.module import DraftModule
from distill.training.optim import make_optimizers
from distill.training.rollouts import Rollouts
from distill.training.teacher import StoredTeacher, Teacher, topk_signal
from result_file import write_result
from trl_peer import BETA, Peer, Stepped, make_trainer
from trl_peer import version as trl_version

OBJECTIVES: dict[str, dict[str, float]] = {
    **{name: {name: 1.0} for name in ("forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid")},
    "forward_kl+ce": {"forward_kl": 1.0, "ce": 0.5},
}
ON_POLICY = ("forward_kl", "jsd", "lk_hybrid")
TOP_K = 64
LR = 1e-4
STEPS = 1_000_000  # TRL's schedule needs an end; nobody reaches it


@dataclass(frozen=True)
class Settings:
    """Settings of a race; another process can repeat the race from them."""

    pair: str = "random"
    target: str | None = None
    draft: str | None = None
    batch_size: int = 8
    length: int = 256
    prompt_tokens: int = 96
    device: str = "cpu"
    examples: int = 64
    compile: bool = False  # ours: the draft's layers and the loss


def random_llama(layers: int, width: int, heads: int, vocab: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def load_pair(settings: Settings) -> tuple[Any, Any, Any]:
    """(target, draft, tokenizer), none of which ends a response."""
    torch.manual_seed(0)
    if settings.target is not None:
        target, tokenizer = load_model("target", settings.target), load_tokenizer(settings.target)
        draft = carve(target, (0, -1)) if settings.draft is None else load_model("draft", settings.draft)
    elif settings.pair == "embedded":
        target, tokenizer = load_model("target", "embedded"), load_tokenizer("embedded")
        draft = carve(target, (0, -1))
    else:
        tokenizer = load_tokenizer("embedded")
        target, draft = random_llama(8, 256, 4, len(tokenizer)), random_llama(2, 128, 4, len(tokenizer))
    for model in (target, draft):
        model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = None
    # TRL adds the tokenizer's own end token to the model's; the one that opens a text never follows another.
    tokenizer.eos_token = tokenizer.bos_token or tokenizer.pad_token or tokenizer.eos_token
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return target.to(settings.device), draft.to(settings.device), tokenizer


def make_examples(settings: Settings, tokenizer: Any, vocab: int) -> list[Example]:
    """Windows of the standard library's text for a trained pair (its softmax tails cost what they cost), else random ids."""
    count, length = settings.examples, settings.length
    if settings.pair == "random" and settings.target is None:
        ids = np.random.default_rng(0).integers(3, vocab, count * length)
    else:
        pieces: list[int] = []
        for document in stdlib.corpus_documents(True):
            pieces += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
            if len(pieces) >= count * length:
                break
        ids = np.resize(np.array(pieces), count * length)
    mask = np.arange(length) >= settings.prompt_tokens
    return [Example(row.astype(np.int32), mask) for row in ids.reshape(count, length)]


class Race:
    """The models, tokens and optimizer that our steps and the baselines share; TRL's trainers get copies of the student."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.target, self.student, self.tokenizer = load_pair(settings)
        self.teacher = Teacher(self.target)
        self.vocab = self.target.config.get_text_config().vocab_size
        self.examples = make_examples(settings, self.tokenizer, self.vocab)
        self.device = torch.device(settings.device)
        self.ours = self.student
        if settings.compile:
            self.ours = copy.deepcopy(self.student)
            for layer in layer_list(self.ours)[1]:
                layer.compile()
        both = {id(self.student): self.student, id(self.ours): self.ours}
        self.optimizers = {key: make_optimizers(model, OptimConfig(lr=LR)) for key, model in both.items()}
        self.turns: dict[str, int] = {}
        self._stored: Any = None

    @property
    def tokens(self) -> int:
        """Tokens of a step, prompts included."""
        return self.settings.batch_size * self.settings.length

    def shares(self, name: str) -> list[int]:
        """Numbers of the sequences of a contestant's next step."""
        turn = self.turns[name] = self.turns.get(name, -1) + 1
        size = self.settings.batch_size
        start = turn * size % (len(self.examples) - size + 1)
        return list(range(start, start + size))

    def stored(self) -> Any:
        """Top-k signals of all sequences, read back from a store on disk."""
        if self._stored is None:
            self._stored = stored_teacher(self.teacher, self.examples, TOP_K)
        return self._stored

    def update(self, student: Any) -> None:
        """Clips and steps, and waits for the device."""
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer in self.optimizers[id(student)]:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.wait()

    def wait(self) -> None:
        """Wait for the device before the clock is read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def stored_teacher(teacher: Teacher, examples: Sequence[Example], k: int) -> Any:
    """A teacher that reads the top-k signals of the examples from a store in a temporary folder."""
    store, model = SignalStore(Path(tempfile.mkdtemp(prefix="signals-"))), teacher.split.model
    manifest = signal_manifest(
        k,
        temperature=1.0,
        vocab_rows=vocabulary_rows(model.config),
        target=model_fingerprint(model),
        target_dtype=str(model.dtype),
    )
    store.open(manifest, [example.response_tokens for example in examples])
    for number, example in enumerate(examples):
        dense = teacher.signal(collate([example], 0).to(model.device))
        store.write({number: topk_signal(dense.head, dense.hidden_RD, k).to(torch.device("cpu"))})
    return StoredTeacher(store)


def naive_loss(target: Any, student: Any, ids_BT: Tensor, mask_BT: Tensor, weights: dict[str, float]) -> Tensor:
    """The mean loss per response token as in a simple trainer: all logits of both models at once."""
    with torch.no_grad():
        target_log_probs_BTV = target(input_ids=ids_BT, use_cache=False).logits[:, :-1].log_softmax(-1)
    student_log_probs_BTV = student(input_ids=ids_BT, use_cache=False).logits[:, :-1].log_softmax(-1)
    mask_BT = mask_BT[:, 1:]
    loss_BT = plain_losses(target_log_probs_BTV, student_log_probs_BTV, ids_BT[:, 1:], weights)
    return (loss_BT * mask_BT).sum() / mask_BT.sum()


def plain_losses(target: Tensor, student: Tensor, labels: Tensor, weights: dict[str, float]) -> Tensor:
    """Objectives of log-probabilities (..., V) as one writes them down, for autograd: (...)."""
    makers: dict[str, Callable[[], Tensor]] = {
        "forward_kl": lambda: (target.exp() * (target - student)).sum(-1),
        "reverse_kl": lambda: (student.exp() * (student - target)).sum(-1),
        "jsd": lambda: _plain_jsd(target, student),
        "tv": lambda: 1.0 - torch.minimum(target, student).exp().sum(-1),
        "neg_log_alpha": lambda: -torch.minimum(target, student).logsumexp(-1),
        "lk_hybrid": lambda: _plain_hybrid(target, student),
        "ce": lambda: -student.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
    }
    terms = [makers[name]() if weight == 1.0 else weight * makers[name]() for name, weight in weights.items()]
    return terms[0] if len(terms) == 1 else sum(terms[1:], start=terms[0])


def _plain_jsd(target: Tensor, student: Tensor) -> Tensor:
    middle = torch.logaddexp(target, student) - 0.6931471805599453
    return 0.5 * ((target.exp() * (target - middle)).sum(-1) + (student.exp() * (student - middle)).sum(-1))


def _plain_hybrid(target: Tensor, student: Tensor) -> Tensor:
    alpha = torch.minimum(target, student).exp().sum(-1)
    share = torch.exp(-3.0 * alpha.detach())
    return share * (target.exp() * (target - student)).sum(-1) + (1.0 - share) * (1.0 - alpha)


def naive_step(race: Race, name: str, objective: str, on_policy: bool) -> Callable[[], None]:
    prompt = race.settings.prompt_tokens

    def step() -> None:
        chosen = [race.examples[number] for number in race.shares(name)]
        ids_BT = torch.from_numpy(np.stack([example.input_ids for example in chosen]).astype(np.int64)).to(race.device)
        mask_BT = torch.from_numpy(np.stack([example.loss_mask for example in chosen])).to(race.device)
        if on_policy:
            ids_BT = race.student.generate(
                ids_BT[:, :prompt],
                attention_mask=torch.ones_like(ids_BT[:, :prompt]),
                do_sample=True,
                top_k=0,
                max_new_tokens=race.settings.length - prompt,
                pad_token_id=0,
            )
        race.student.train()
        naive_loss(race.target, race.student, ids_BT, mask_BT, OBJECTIVES[objective]).backward()
        race.update(race.student)

    return step


def own_responses(race: Race, prompts: int) -> Callable[[], list[Example]]:
    """The product's rollouts: the student answers the given number of prompts again at every call, through a store on disk."""
    settings, cut = race.settings, race.settings.prompt_tokens
    folder = tempfile.mkdtemp(prefix="rollouts-")
    config = parse_config(
        {
            "name": Path(folder).name,
            "output": str(Path(folder).parent),
            "data": {
                "train": [{"path": "unused"}],
                "rollouts": {"prompts": prompts},
            },
            "serving": {"max_tokens": settings.length - cut},
        },
        "bench",
    )
    many = [race.examples[number % len(race.examples)] for number in range(prompts)]
    rendered = [RenderedPrompt(str(n), "bench", tuple(e.input_ids[:cut].tolist())) for n, e in enumerate(many)]
    accelerator = Accelerator(cpu=race.device.type == "cpu")
    made = Rollouts(Run(config, accelerator), race.target, race.tokenizer, rendered)
    module, turn = DraftModule(race.student, Objective({"ce": 1.0})), iter(range(STEPS))
    return lambda: made.examples("student", next(turn), module.exported)


def our_step(race: Race, name: str, objective: str, policy: str) -> Callable[[], None]:
    module = DraftModule(race.ours, Objective(OBJECTIVES[objective], compile=race.settings.compile))
    source = race.stored() if policy == "store" else race.teacher
    respond = own_responses(race, race.settings.batch_size) if policy == "on" else None

    def step() -> None:
        numbers = race.shares(name)
        chosen = respond() if respond else [race.examples[number] for number in numbers]
        batch = collate(chosen, 0, numbers).to(race.device)
        module.train()
        signal = source.signal(batch)
        loss, *_ = module(batch, signal)
        (loss / batch.labels_R.numel()).backward()
        race.update(race.ours)

    return step


def trl_step(race: Race, who: str, objective: str, policy: str) -> Callable[[], None]:
    trainer, _, how = who.removeprefix("trl-").partition("-")
    defaults = how == "defaults"
    lmbda = (1.0 if policy == "on" else 0.0) if trainer == "gkd" else None
    peer = Peer(trainer, BETA[objective], lmbda, None if defaults else 1.0, defaults, LR)  # type: ignore[arg-type]
    stepped = Stepped(
        make_trainer(
            peer,
            copy.deepcopy(race.student),
            race.target,
            race.tokenizer,
            race.examples,
            batch_size=race.settings.batch_size,
            max_new_tokens=race.settings.length - race.settings.prompt_tokens,
            max_steps=STEPS,
        )
    )

    def step() -> None:
        stepped.step()
        race.wait()

    return step


def make_step(race: Race, name: str) -> Callable[[], None]:
    """A contestant by its name, `who/policy/objective`: floor, ours, rollouts, trl-gkd, trl-gkd-defaults, trl-distillation..."""
    who, policy, objective = name.split("/")
    if who == "floor":
        return naive_step(race, name, objective, policy == "on")
    if who == "ours":
        return our_step(race, name, objective, policy)
    if who == "rollouts":
        respond = own_responses(race, int(objective))
        return lambda: respond() and None
    return trl_step(race, who, objective, policy)


def contestants(objectives: Sequence[str], policies: Sequence[str], trl: bool, rollout_prompts: int) -> list[list[str]]:
    """Names in two groups that are raced one after the other: without and with decoding."""
    reading = ["floor/off/forward_kl"]
    for objective in objectives:
        if "off" in policies:
            reading += [f"floor/off/{objective}", f"ours/off/{objective}"]
        if "store" in policies:
            reading.append(f"ours/store/{objective}")
        if trl and objective in BETA:
            reading.append(f"trl-gkd/off/{objective}")
    writing: list[str] = []
    if "on" in policies:
        writing += ["floor/on/forward_kl", f"rollouts/on/{rollout_prompts}"]
        for objective in (name for name in objectives if name in ON_POLICY):
            writing += [f"ours/on/{objective}", f"ours/off/{objective}"]
            if trl and objective in BETA:
                writing += [f"trl-gkd/on/{objective}", f"trl-distillation/on/{objective}"]
        if trl:  # at their defaults TRL's trainers have these objectives
            writing += ["trl-gkd-defaults/on/jsd", "trl-distillation-defaults/on/reverse_kl"]
    return [list(dict.fromkeys(group)) for group in (reading, writing) if group]


def race_all(race: Race, names: Sequence[str], rounds: int, show: Callable[[str], None]) -> dict[str, float]:
    """Median seconds of a step by name: each contestant once per round, after two warm-up rounds."""
    steps = {name: make_step(race, name) for name in names}
    seen: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn >= 2:
                seen[name].append(time.perf_counter() - began)
        show(f"round {turn + 1} of {rounds + 2}")
    return {name: statistics.median(values) for name, values in seen.items()}


def weigh_step(settings: Settings, name: str, steps: int) -> float:
    """Megabytes by which a contestant's steps make its process grow."""
    step = make_step(Race(settings), name)
    return growth_of(lambda: [step() for _ in range(steps)], settings.device)


def growth_of(work: Callable[[], Any], device: str) -> float:
    """Megabytes by which the process's peak exceeds its size before the work (on CUDA: its allocations)."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    ctypes.CDLL(None).malloc_trim(
        0
    )  # return free heap memory to the system, so that the work cannot reuse it uncounted
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts from here
    before = status_kb("VmRSS")
    work()
    return (status_kb("VmHWM") - before) * 1024 / 1e6


def status_kb(name: str) -> int:
    """A line of this process's status, in kB."""
    return next(int(line.split()[1]) for line in read("/proc/self/status").splitlines() if line.startswith(name))


def run_jobs(path: Path) -> None:
    """Does each job in a fork of this process, which has imported everything and computed nothing; writes path.done."""
    order = json.loads(path.read_text(encoding="utf-8"))
    results: dict[str, float | None] = {}
    for name, (settings, contestant, steps) in order["jobs"].items():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                torch.set_num_threads(order["threads"])
                os.write(writer, json.dumps(weigh_step(Settings(**settings), contestant, steps)).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        results[name] = json.loads(text) if text else None
    path.with_suffix(".done").write_text(json.dumps(results), encoding="utf-8")


def make_cells(
    race: Race, seconds: dict[str, float], on: dict[str, float], memory: dict[str, float], every: int
) -> list[dict]:
    """The cells of all of ours, from the medians of both groups."""
    cells = []
    for name in (*seconds, *on):
        who, policy, objective = name.split("/")
        group = on if policy == "on" else seconds
        if who != "ours" or name not in group or (name in seconds and group is not seconds):
            continue
        if any(cell["policy"] == policy and cell["objective"] == objective for cell in cells):
            continue
        fair = [f"{trl}/{'on' if policy == 'on' else 'off'}/{objective}" for trl in ("trl-gkd", "trl-distillation")]
        peers = {peer: group[peer] for peer in fair if peer in group}
        defaults = {peer: value for peer, value in group.items() if "defaults" in peer}
        variants = {1: group[name]}
        amortised = [peer for peer in on if peer.startswith("rollouts/")]
        if policy == "on" and amortised and every > 1:
            variants[every] = on[f"ours/off/{objective}"] + on[amortised[0]] / every
        for rollout_every, value in variants.items():
            cell = {
                "device": race.device.type,
                "objective": objective,
                "policy": policy,
                "tokens_per_second": race.tokens / value,
                "vs_floor": value / group[f"floor/{'on' if policy == 'on' else 'off'}/forward_kl"],
                "vs_trl": min(peers.values()) / value if peers else None,
                "peak_memory_mb": memory.get(name),
                "pair": race.settings.target or race.settings.pair,
                "vs_own_floor": value / group[f"floor/off/{objective}"] if policy == "off" else None,
                "vs_each_trl": {peer: theirs / value for peer, theirs in (peers | defaults).items()},
            }
            cells.append(cell | ({"rollout_every": rollout_every} if policy == "on" else {}))
    return cells


def machine() -> dict[str, Any]:
    model = [line for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    facts = describe_run(0) | {"cpu": model[0].partition(":")[2].strip() if model else None}
    facts["versions"] |= {"trl": trl_version()}
    return {key: value for key, value in facts.items() if key not in ("uncommitted_changes", "argv")}


def read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def print_table(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['settings']['pair']}, {result['machine']['device']}, {result['machine']['threads']} threads"
    )
    columns = (
        "policy",
        "rollout_every",
        "objective",
        "tokens_per_second",
        "vs_floor",
        "vs_own_floor",
        "vs_trl",
        "peak_memory_mb",
    )
    for column in columns:
        table.add_column(column)
    for cell in result["cells"]:
        values = [cell.get(column) for column in columns]
        table.add_row(
            *(
                ""
                if v is None
                else f"{v:.3g}"
                if isinstance(v, float) and v < 100
                else f"{v:,.0f}"
                if isinstance(v, float)
                else str(v)
                for v in values
            )
        )
    others = Table("the others", "ms a step", "tokens/s", "peak memory MB")
    for name, value in result["contestants"].items():
        if not name.startswith(("ours", "rollouts")):
            memory = value["peak_memory_mb"]
            others.add_row(
                name,
                f"{1e3 * value['seconds']:.0f}",
                f"{value['tokens_per_second']:,.0f}",
                "" if memory is None else f"{memory:.0f}",
            )
    console = Console(width=150)
    console.print(table)
    console.print(others)


def main(
    out: Annotated[Path, typer.Option(help="JSON to write")] = Path("bench/results/train_step_cpu.json"),
    pair: Annotated[
        str, typer.Option(help="random: 8 layers of 256 teach 2 of 128; embedded: the shipped target")
    ] = "random",
    target: Annotated[str | None, typer.Option(help="another target: directory or hub id")] = None,
    draft: Annotated[str | None, typer.Option(help="its draft; left out: carved from it")] = None,
    batch_size: Annotated[int, typer.Option(help="sequences of a step", min=1)] = 8,
    length: Annotated[int, typer.Option(help="tokens of a sequence", min=4)] = 256,
    prompt_tokens: Annotated[int, typer.Option(help="of which are prompt", min=1)] = 96,
    rounds: Annotated[int, typer.Option(help="counted rounds; those with decoding are a third", min=1)] = 15,
    objectives: Annotated[str, typer.Option(help="comma-separated")] = ",".join(OBJECTIVES),
    policies: Annotated[str, typer.Option(help="comma-separated")] = "off,store,on",
    memory: Annotated[bool, typer.Option(help="measure memory too, a process each")] = True,
    compile_ours: Annotated[bool, typer.Option("--compile", help="torch.compile our draft's layers and loss")] = False,
    trl: Annotated[bool, typer.Option(help="race TRL where it is installed")] = True,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = torch's own choice", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    memory_job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Races the contestants and writes the cells."""
    if memory_job is not None:
        return run_jobs(Path(memory_job))
    if threads:
        torch.set_num_threads(threads)
    settings = Settings(
        pair, target, draft, batch_size, length, prompt_tokens, device, max(64, 2 * batch_size), compile_ours
    )
    rollout = RolloutConfig()
    groups = contestants(
        [name for name in objectives.split(",") if name],
        policies.split(","),
        trl and trl_version() is not None,
        rollout.prompts,
    )
    race, console = Race(settings), Console(stderr=True)
    counted = [rounds, max(1, rounds // 3)]
    timed = [race_all(race, group, count, console.print) for group, count in zip(groups, counted, strict=False)]
    seconds, on = timed[0], timed[1] if len(timed) > 1 else {}
    weights: dict[str, float] = {}
    if memory:
        names = [name for name in dict.fromkeys((*seconds, *on)) if not name.startswith("rollouts/")]
        jobs = {name: [asdict(settings), name, 3] for name in names}
        weights = growth_in_processes(jobs, threads, console.print)
    result = {
        "machine": machine(),
        "settings": asdict(settings) | {"rounds": rounds, "top_k": TOP_K, "rollout_prompts": rollout.prompts},
        "cells": make_cells(race, seconds, on, weights, rollout.every),
        "contestants": {
            name: {"seconds": value, "tokens_per_second": race.tokens / value, "peak_memory_mb": weights.get(name)}
            for name, value in (on | seconds).items()
        },
    }
    write_result(out, result)
    print_table(result)


def growth_in_processes(jobs: dict[str, list[Any]], threads: int, show: Callable[[str], None]) -> dict[str, float]:
    """Megabytes by job name; each is done by a process of its own, forked from one that has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps({"jobs": jobs, "threads": threads or torch.get_num_threads()}), encoding="utf-8")
        show(f"memory: {len(jobs)} processes, one after another")
        command = [sys.executable, __file__, "--memory-job", str(path)]
        subprocess.run(command, check=True)
        return json.loads(path.with_suffix(".done").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_script(main)
