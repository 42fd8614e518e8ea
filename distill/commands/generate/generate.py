"""`understudy generate`: stream text from a target with any drafter, then print the timings."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from distill.commands.generate.files import ResponseFile, read_past, read_prompts
from distill.commands.generate.options import GenerateOptions
from distill.commands.output import check_writable
from distill.commands.target import open_target
from distill.config.ways import way_named
from distill.faults import Interrupted
from distill.models.draft import cast_weights, load_draft
from distill.models.target import target_notes
from speculative.decode import Event, generate
from speculative.decoder.responses import DecodeSettings, Prompt, Response, Timing
from speculative.drafters.draft import Draft, ParallelDrafter
from speculative.drafters.drafter import Drafter, ModelDrafter
from speculative.drafters.gamma import AdaptiveGamma, FixedGamma, GammaPolicy
from speculative.drafters.registry import Parts, Recipe
from speculative.engine.cached_model import speed_warnings
from speculative.engine.models import end_token_ids
from speculative.errors import UserError
from speculative.measure.metrics import latency, live_metrics, stage_seconds
from speculative.measure.replay import ReplayCheck, agreement_of, agreement_warning, agreement_words
from speculative.measure.token_scores import score_tokens
from speculative.progress import phase
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings

MAX_TOKENS = 128
DEFAULT_GAMMA = 4
MOST_GAMMA = 64
PLAIN = "none"  # --drafter none: the target alone
ADAPTIVE_GAMMA = 8  # The largest gamma that `--gamma auto` considers.


@dataclass(frozen=True)
class Loaded:
    """A target with its tokenizer and drafter (None = plain decoding)."""

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter | None


def generate_command(options: GenerateOptions) -> None:
    """Generate text, and print the timings to standard error. Raises UserError, in most cases before anything is loaded."""
    recipe = recipe_of(options)
    check_writable("--out", options.out)
    tree = recipe.tree if recipe is not None else None
    gamma = tree.depth if tree is not None else parse_gamma(options.gamma)
    rule = Rule.named(options.rule) if options.rule else Rule.usual(options.temperature)
    settings = DecodeSettings(
        SamplingSettings(options.temperature, options.top_k, options.top_p),
        gamma,
        rule,
        MAX_TOKENS if options.max_tokens is None else options.max_tokens,
        fit_context=options.max_tokens is None,
        seed=options.seed,
        tree=tree,
    )
    policy = AdaptiveGamma(gamma) if options.gamma == "auto" else FixedGamma(gamma if recipe is not None else 0)
    with load(options, recipe) as loaded:
        if loaded.drafter is None:
            settings = replace(settings, gamma=0)
        settings = replace(settings, eos_ids=end_token_ids(loaded.target, loaded.tokenizer))
        prompts = read_prompts(options, loaded.tokenizer)
        responses, timing = run(loaded, prompts, settings, policy, options)
        print(*summary_lines(loaded, responses, timing, settings, policy), sep="\n", file=sys.stderr)


def recipe_of(options: GenerateOptions) -> Recipe | None:
    """The way to draft, None for plain decoding. Raises UserError for an unknown way and for an option that would have no effect."""
    name = options.drafter or ("draft" if options.draft else PLAIN)
    recipe = None if name == PLAIN else way_named(name)
    needs = () if recipe is None else recipe.needs
    for option, value, part in (("--draft DIR", options.draft, "draft"), ("--past FILE", options.past, "past")):
        if not value and part in needs:
            raise UserError(f"--drafter {name} needs {option}")
        if value and part not in needs:
            raise UserError(f"{option.split()[0]} is not used by --drafter {name}: remove it")
    if options.gamma and (recipe is None or recipe.tree is not None):
        why = (
            "needs a drafter: give --draft DIR or --drafter"
            if recipe is None
            else f"is set by --drafter {name}: remove it"
        )
        raise UserError(f"--gamma {why}")
    return recipe


@contextlib.contextmanager
def load(options: GenerateOptions, recipe: Recipe | None) -> Iterator[Loaded]:
    """The target and what the way to draft needs."""
    target = open_target(options.target, options.dtype, options.device)
    with target.loaded() as model:
        for note in target_notes(target.side, None):
            print(f"warning: {note}", file=sys.stderr)
        drafter = draft = None
        if options.draft:
            loaded = load_draft(options.draft, target)
            cast_weights(loaded, model.dtype)
            draft = Draft(loaded.to(target.device))  # type: ignore[arg-type]
        if recipe is not None:
            past = read_past(options.past, model) if options.past is not None else None
            drafter = recipe.drafter(Parts(model, draft, past))
        yield Loaded(model, target.tokenizer, drafter)


def parse_gamma(text: str) -> int:
    """The largest gamma of a run. Raises UserError for anything but `auto` and a number in range."""
    if not text:
        return DEFAULT_GAMMA
    if text == "auto":
        return ADAPTIVE_GAMMA
    if not text.isdecimal() or int(text) < 1:
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
    out = options.out
    file = ResponseFile(out) if out is not None else None
    timing = Timing()
    finished: dict[int, Response] = {}
    try:
        events = generate(
            loaded.target,
            loaded.drafter,
            prompts,
            settings,
            batch_size=options.batch_size,
            tokenizer=loaded.tokenizer,
            policy=policy,
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
    with phase("responses", count) as shown:
        for event in events:
            shown.count(len(event.token_ids))
            shown.advance(event.finish_reason is not None)
            if event.finish_reason is not None and out is None:
                sys.stdout.write(f"--- {event.response.key}\n{event.response.text}\n")
                sys.stdout.flush()
            yield event


def summary_lines(
    loaded: Loaded, responses: list[Response], timing: Timing, settings: DecodeSettings, policy: GammaPolicy
) -> list[str]:
    """The numbers of a run in words; tau by replay beside the live one where replay can predict it: a draft model and one gamma."""
    tokens, drafter, seconds = sum(len(one.response_ids) for one in responses), loaded.drafter, stage_seconds(timing)
    stages = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("prefill", "draft", "verify", "accept", "host"))
    lines = [f"{tokens} tokens, {tokens / timing.total_seconds:.1f} tokens/s; seconds: {stages}"]
    if drafter is not None:
        gamma = f"auto, at most {settings.gamma}" if isinstance(policy, AdaptiveGamma) else str(settings.gamma)
        live = live_metrics(responses, settings.gamma)
        low, high = live["tau_ci"]
        ends = f" [{low:.2f}, {high:.2f}]" if high > low else ""
        accepted = f"accepted/drafted {live['accepted_per_drafted']:.3f}"
        line = f"{drafter.name}, gamma {gamma}: tau {live['tau']:.2f}{ends}  {accepted}"
        check = replay_check(drafter, responses, settings, policy)
        lines.append(line if check is None else f"{line}; {agreement_words(check, tokens)}")
        if isinstance(policy, AdaptiveGamma):
            chosen = ", ".join(f"{width} x{count}" for width, count in sorted(policy.chosen.items()))
            lines.append(f"gamma chosen: {chosen}")
        if check is not None and (warning := agreement_warning(check)):
            lines.append(f"warning: {warning}")
    models = (model for model in (loaded.target, getattr(drafter, "model", None)) if model is not None)
    lines += [f"warning: {warning}" for warning in speed_warnings(*models)]
    waits = latency(responses).record()
    first, pause = waits["first_token"], waits.get("between_commits")
    line = f"first token after {1e3 * first['p50']:.0f} ms (p90 {1e3 * first['p90']:.0f})"
    if pause:
        line += f", then a block every {1e3 * pause['p50']:.0f} ms (p90 {1e3 * pause['p90']:.0f})"
    return [*lines, f"{line}; peak memory {timing.peak_bytes / 1024**2:.0f} MiB"]


def replay_check(
    drafter: Drafter, responses: list[Response], settings: DecodeSettings, policy: GammaPolicy
) -> ReplayCheck | None:
    """The live blocks against replay of their text; None where replay cannot predict them."""
    if type(drafter) not in (ModelDrafter, ParallelDrafter) or not isinstance(policy, FixedGamma) or settings.tree:
        return None
    assert isinstance(drafter, ModelDrafter)
    offsets = settings.gamma if isinstance(drafter, ParallelDrafter) else None
    scores = score_tokens(drafter.model, responses, settings.sampling, offsets=offsets)
    blocks = [response.blocks for response in responses]
    return agreement_of(scores, settings.rule, blocks, settings.gamma)
