"""`understudy generate`: stream text from a target with any drafter, then print the timings."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.commands.generate.prompt_files import read_datastore, read_prompts
from distill.commands.generate.response_file import ResponseFile
from distill.commands.options import GenerateOptions
from distill.commands.output import check_known, check_writable, write_asked
from distill.commands.target import open_target
from distill.faults import Interrupted
from distill.models.draft import cast_weights, load_draft
from distill.models.target import target_notes
from speculative.decode import Event, generate
from speculative.decoder.proposal_log import ProposalLog
from speculative.decoder.responses import DecodeSettings, Prompt, Response, Timing
from speculative.drafters.draft import DRAFTINGS, Draft, ParallelDrafter
from speculative.drafters.drafter import Drafter, ModelDrafter
from speculative.drafters.gamma import AdaptiveGamma, FixedGamma, GammaPolicy
from speculative.drafters.registry import Parts, make_drafter
from speculative.engine.cached_model import speed_warnings
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.measure.metrics import latency, live_metrics, stage_seconds
from speculative.measure.replay import ReplayCheck, agreement_of, agreement_warning, agreement_words, law_of
from speculative.measure.token_scores import score_tokens
from speculative.rules.processors import LogitsRules
from speculative.rules.sampling import SamplingSettings
from speculative.rules.tree import TokenTree

# Values of --drafter, and the way to decode that each stands for.
WAYS = {
    "draft": "draft",
    "lookup": "prompt lookup",
    "retrieval": "past responses",
    "early-exit": "early exit",
    "jacobi": "lookahead",
    "cascade": "lookup + draft",
}
MAX_TOKENS = 128
DEFAULT_GAMMA = 4
MOST_GAMMA = 64
ADAPTIVE_GAMMA = 8  # The largest gamma that `--gamma auto` considers.


@dataclass(frozen=True)
class Loaded:
    """A target with its tokenizer and drafter (None = plain decoding)."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter | None


def generate_command(options: GenerateOptions) -> None:
    """Generate text, and print the timings to standard error. Raises UserError, in most cases before anything is loaded."""
    refuse_contradictions(options)
    for option, path in (("--numbers", options.numbers), ("--log", options.log), ("--out", options.out)):
        check_writable(option, path)
    branching = parse_tree(options.tree)
    tree = TokenTree.from_branching(branching) if branching else None
    gamma = len(branching) or parse_gamma(options.gamma)
    rule: Any = options.rule or ("greedy" if options.temperature == 0 else "sample")
    settings = DecodeSettings(
        SamplingSettings(options.temperature, options.top_k, options.top_p, options.min_p),
        gamma,
        rule,
        MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        fit_context=options.max_tokens is None,
        seed=options.seed,
        tree=tree,
        rules=LogitsRules(repetition_penalty=options.repetition_penalty),
        stop=tuple(options.stop or ()),
        min_tokens=options.min_tokens,
    )
    adapts = options.gamma == "auto" and tree is None
    policy = (AdaptiveGamma if adapts else FixedGamma)(gamma, options.stop_below)
    loaded = load(options)
    if loaded.drafter is None:
        settings, policy = replace(settings, gamma=0, tree=None), FixedGamma(0)
    settings = replace(settings, eos_ids=end_token_ids(loaded.target, loaded.tokenizer))
    prompts = read_prompts(options, loaded.tokenizer)
    result = summary(loaded, *run(loaded, prompts, settings, policy, options), settings, policy)
    write_asked("--numbers", options.numbers, result)
    lines = summary_lines(result, f"auto, at most {settings.gamma}" if adapts else str(settings.gamma))
    print(*lines, sep="\n", file=sys.stderr)


def refuse_contradictions(options: GenerateOptions) -> None:
    """Raise UserError for an option that would have no effect."""
    kind = options.kind
    check_known("--drafter", options.drafter, ("", *WAYS, "none"))
    check_known("--drafting", options.drafting, ("", *DRAFTINGS))
    modelled, columns = kind in ("draft", "cascade"), options.prompt_column or options.messages_column
    give = "give --draft DIR or --drafter"
    if modelled and not options.draft:
        raise UserError(f"--drafter {kind} needs --draft DIR")
    if kind == "retrieval" and options.datastore is None:
        raise UserError("--drafter retrieval needs --datastore FILE (past outputs: --out FILE.jsonl of an earlier run)")
    for given, used, what in (
        (options.draft, modelled, f"--draft is not used by --drafter {kind}"),
        (options.drafting, modelled, f"--drafting is not used by --drafter {kind}"),
        (options.tree, options.drafting != "parallel", "--drafting parallel cannot draft a token tree: remove --tree"),
        (options.datastore, kind == "retrieval", f"--datastore is not used by --drafter {kind}"),
        (options.exit_layers, kind == "early-exit", f"--exit-layers is not used by --drafter {kind}"),
        (options.tree, kind in ("draft", "early-exit"), "--tree needs a draft model or --drafter early-exit"),
        (options.tree and options.gamma, False, "--tree sets gamma, its depth: remove --gamma"),
        (options.log, kind != "none", f"--log records drafted tokens, but there is no drafter: {give}"),
        (options.tree and options.log, False, "--log cannot record token trees: remove --tree or --log"),
        (options.tree and options.repetition_penalty != 1.0, False, "--repetition-penalty cannot be used with --tree"),
        (options.gamma, kind != "none", f"--gamma needs a drafter: {give}"),
        (options.stop_below, modelled or kind == "early-exit", "--stop-below needs a draft model"),
        (options.system, options.chat, "--system is a chat message: add --chat"),
        (columns, options.prompts, "--prompt-column and --messages-column need --prompts"),
    ):
        if given and not used:
            raise UserError(what)


def load(options: GenerateOptions) -> Loaded:
    """Load what was asked for. Raises UserError for options that contradict each other."""
    target = open_target(options.target, options.dtype, options.device)
    model, draft, datastore = target.model, options.draft, options.datastore
    for note in target_notes(target.side, None):
        print(f"warning: {note}", file=sys.stderr)

    def draft_model() -> ModelDrafter:
        loaded = load_draft(draft, target)
        cast_weights(loaded, model.dtype)
        return Draft(loaded.to(target.device), options.drafting or DRAFTINGS[0]).drafter()  # type: ignore[arg-type]

    if options.kind == "none":
        return Loaded(model, target.tokenizer, None)
    past = read_datastore(datastore, model) if options.kind == "retrieval" else None
    parts = Parts(model, draft_model, past, options.exit_layers)
    return Loaded(model, target.tokenizer, make_drafter(WAYS[options.kind], parts))


def parse_tree(text: str) -> tuple[int, ...]:
    """`3,2,1` -> (3, 2, 1); empty = no tree."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--tree {text}: give the numbers of candidates by depth, e.g. 3,2,1")
    return tuple(int(part) for part in parts)


def parse_gamma(text: str) -> int:
    """The largest gamma of a run. Raises UserError for anything but `auto` and a number in range."""
    if not text:
        return DEFAULT_GAMMA
    if text == "auto":
        return ADAPTIVE_GAMMA
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--gamma {text}: give a number of at least 1, or auto (plain decoding is --drafter none)")
    if int(text) > MOST_GAMMA:
        raise UserError(f"--gamma {text}: more than {MOST_GAMMA} drafted tokens per block never pay off")
    return int(text)


def run(
    loaded: Loaded, prompts: list[Prompt], settings: DecodeSettings, policy: GammaPolicy, options: GenerateOptions
) -> tuple[list[Response], Timing]:
    """Decode; one prompt is streamed to standard output, several go to --out as JSON lines or are printed as they end.

    Raises Interrupted after Ctrl-C; the message states which responses are kept.
    """
    log, out = options.log, options.out
    file = ResponseFile(out) if out is not None else None
    timing = Timing()
    finished: dict[int, Response] = {}
    try:
        with ProposalLog(log) if log is not None else nullcontext() as proposals:
            events = generate(
                loaded.target,
                loaded.drafter,
                prompts,
                settings,
                batch_size=options.batch_size,
                tokenizer=loaded.tokenizer,
                policy=policy,
                log=proposals,
                runner=options.runner,
                timing=timing,
            )
            for event in _shown(events, len(prompts), out):
                if event.finish_reason is not None:
                    finished[event.index] = event.response
                    if file is not None:
                        file.add(event.index, event.response)
        if file is not None:
            file.complete()
    except KeyboardInterrupt:
        left = file.give_up() if file is not None else f"{len(finished)} of {len(prompts)} responses had ended"
        raise Interrupted(left) from None
    except UserError as error:
        if file is not None and "--out" not in str(error):
            raise UserError(f"{error} ({file.give_up()})") from error
        raise
    return [finished[index] for index in range(len(prompts))], timing


def _shown(events: Iterator[Event], count: int, out: Path | None) -> Iterator[Event]:
    """Pass events on and show them, as streamed text or as a progress line."""
    if count == 1 and out is None:
        for event in events:
            sys.stdout.write(event.text)
            sys.stdout.flush()
            if event.finish_reason is not None:
                sys.stdout.write("\n")
            yield event
        return
    columns = (TextColumn("{task.completed}/{task.total} responses, {task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, tokens = progress.add_task("", total=count, tokens=0), 0
        for event in events:
            tokens += len(event.token_ids)
            progress.update(task, advance=int(event.finish_reason is not None), tokens=tokens)
            if event.finish_reason is not None and out is None:
                sys.stdout.write(f"--- {event.response.key}\n{event.response.text}\n")
                sys.stdout.flush()
            yield event


def summary(
    loaded: Loaded, responses: list[Response], timing: Timing, settings: DecodeSettings, policy: GammaPolicy
) -> dict[str, Any]:
    """Numbers of a run. `replay_check` is present if replay can predict them: a draft model, one gamma, no logits rules."""
    tokens, drafter = sum(len(response.response_ids) for response in responses), loaded.drafter
    result: dict[str, Any] = {
        "tokens": tokens,
        "tokens_per_second": tokens / timing.total_seconds,
        "seconds": stage_seconds(timing),
        "latency": latency(responses).record(),
        "peak_bytes": timing.peak_bytes,
        "drafter": None if drafter is None else drafter.name,
        "finish_reasons": dict(sorted(Counter(str(response.finish_reason) for response in responses).items())),
        "warnings": speed_warnings(
            *(model for model in (loaded.target, getattr(drafter, "model", None)) if model is not None)
        ),
    }
    if drafter is None:
        return result
    result |= live_metrics(responses, settings.gamma)
    if isinstance(policy, AdaptiveGamma):
        result["gammas_chosen"] = {str(gamma): count for gamma, count in sorted(policy.chosen.items())}
    plain_law = settings.tree is None and settings.active_rules is None
    if type(drafter) in (ModelDrafter, ParallelDrafter) and isinstance(policy, FixedGamma) and plain_law:
        offsets = settings.gamma if type(drafter) is ParallelDrafter else None
        scores = score_tokens(drafter.model, responses, settings.sampling, offsets=offsets)  # type: ignore[arg-type]
        law, counted = law_of(settings.rule, settings.sampling), [response.blocks for response in responses]
        check = agreement_of(scores, law, counted, settings.gamma, stop_below=policy.stop_below)
        result["replay_check"] = check.record()
        result["warning"] = agreement_warning(check)
    return result


def summary_lines(result: dict[str, Any], gamma: str) -> list[str]:
    seconds = result["seconds"]
    stages = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("prefill", "draft", "verify", "accept", "host"))
    lines = [f"{result['tokens']} tokens, {result['tokens_per_second']:.1f} tokens/s; seconds: {stages}"]
    if result["drafter"] is not None:
        low, high = result["tau_ci"]
        interval = f" [{low:.2f}, {high:.2f}]" if high > low else ""
        line = (
            f"{result['drafter']}, gamma {gamma}: tau {result['tau']:.2f}{interval}  "
            f"accepted/drafted {result['accepted_per_drafted']:.3f}"
        )
        if "replay_check" in result:
            line += f"; {agreement_words(ReplayCheck(**result['replay_check']), result['tokens'])}"
        lines.append(line)
        if chosen := result.get("gammas_chosen"):
            lines.append(f"gamma chosen: {', '.join(f'{width} x{count}' for width, count in chosen.items())}")
        if result.get("warning"):
            lines.append(f"warning: {result['warning']}")
    lines += [f"warning: {said}" for said in result["warnings"]]
    first, pause = result["latency"]["first_token"], result["latency"].get("between_commits")
    line = f"first token after {1e3 * first['p50']:.0f} ms (p90 {1e3 * first['p90']:.0f})"
    if pause:
        line += f", then a block every {1e3 * pause['p50']:.0f} ms (p90 {1e3 * pause['p90']:.0f})"
    lines.append(f"{line}; peak memory {result['peak_bytes'] / 1024**2:.0f} MiB")
    return lines
