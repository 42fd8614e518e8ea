"""Steps that every program starts with: open prompts and a target-draft pair, and run the self-checks."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from data.responses.rendered import RenderedPrompt
from distill.config.layout import CHECKPOINTS, SELF_CHECKS
from distill.config.run import RunConfig
from distill.models.draft import served_draft
from distill.models.load import load_tokenizer, refusing
from distill.models.student import NO_LIMIT, refuse_impossible
from distill.models.target import Target
from distill.models.vocabulary import tokens_without_row
from distill.run.prompts import load_heldout
from distill.run.responses import dated_tokenizer, decode_settings, signal_manifest_of
from distill.run.run import Run, new_accelerator
from speculative.decoder.responses import DecodeSettings
from speculative.engine.models import max_positions
from speculative.errors import UserError
from speculative.measure.self_checks import self_checks
from speculative.rules.rule import Rule

# Number of held-out prompts that the self-checks decode.
CHECKED_PROMPTS = 8


def preflight(run: Run, target: Target) -> None:
    """Check all that training and export need from target and tokenizer, before the first prompt is read.

    Raises UserError: keys of `student` or `signal` that this target cannot serve; a tokenizer that is another model's or
    cannot be saved.
    """
    config, tokenizer, rows = run.config, target.tokenizer, target.facts.vocab_rows
    refuse_impossible(config.student, target.side.config)
    if config.signal.source != "online":
        signal_manifest_of(run, target.facts)
    rowless = tokens_without_row(tokenizer, rows)
    if own := rowless.keys() - getattr(tokenizer, "added_tokens_decoder", {}).keys():
        raise UserError(
            f"target.path {config.target.path!r}: its tokenizer has token {rowless[min(own)]!r} (id {min(own)}), but the model has "
            f"{rows} rows (config.json: vocab_size); give the tokenizer of this model"
        )
    if rowless:
        run.say(
            f"warning: the target has {rows} rows (config.json: vocab_size), none for {len(rowless)} added tokens such as "
            f"{rowless[min(rowless)]!r} (id {min(rowless)}); engines refuse such a pair, so resize the target's embedding before you train"
        )
    if run.main and not (run.folder / CHECKPOINTS).exists():
        what = f"target.path {config.target.path!r}: its tokenizer cannot be saved with a draft"
        with refusing(what), tempfile.TemporaryDirectory(prefix="understudy-tokenizer-") as place:
            tokenizer.save_pretrained(place)
            load_tokenizer(place, trust_remote_code=config.target.trust_remote_code)


def context_limit(*limits: int | None) -> int:
    """Tokens of prompt + response that fit: the smallest known limit of the models and `data.context_length`."""
    return min([limit for limit in limits if limit], default=NO_LIMIT)


@dataclass(frozen=True)
class Pair:
    """A target with its draft, as they would be served, and held-out prompts that fit both.

    `model`: the target's weights. `context`: maximum tokens of prompt and response for both. `settings`: plain decoding at the serving
    settings.
    """

    target: Target
    model: PreTrainedModel
    draft: PreTrainedModel
    context: int
    prompts: list[RenderedPrompt]
    settings: DecodeSettings

    @property
    def keyed(self) -> list[tuple[str, tuple[int, ...]]]:
        """The prompts in the form that the decoder takes."""
        return [(prompt.prompt_id, prompt.prompt_ids) for prompt in self.prompts]


@contextlib.contextmanager
def open_pair(config: RunConfig, path: str, prompts: int, rule: Rule | None = None) -> Iterator[Pair]:
    """A config's target, a draft for it and its first held-out prompts by content hash.

    UserError: a rule against the temperature, a target at a server, a draft that is missing or of another vocabulary, no prompts.
    """
    rule = rule or Rule.usual(0)
    if not rule.greedy and config.serving.temperature == 0:
        raise UserError(f"--rule {rule} samples from the target, but serving.temperature is 0; use --rule greedy")
    if prompts < 1:
        raise UserError(f"--prompts {prompts}: give at least 1")
    target = Target(config.target, new_accelerator().device)
    with target.loaded() as model:
        draft = served_draft(path, target)
        context = context_limit(*(max_positions(side.config) for side in (model, draft)), config.data.context_length)
        tokenizer = dated_tokenizer(target, config.folder)
        limits, rows = (context, config.serving.max_tokens, prompts), target.facts.vocab_rows
        heldout = load_heldout(config.data, tokenizer, *limits, folder=config.folder, vocab_rows=rows)
        yield Pair(target, model, draft, context, heldout, decode_settings(config.serving, config.seed, target))


def check_instrument(
    run: Run, target: Target, prompts: Sequence[RenderedPrompt], settings: DecodeSettings
) -> Mapping[str, Any]:
    """Run the self-checks on the first held-out prompts, once per run, at most `judge.batch_size` of them at once.

    Raises SelfCheckError: two measurements that must agree differ.
    """

    def checked() -> dict[str, object]:
        keyed = [(prompt.prompt_id, prompt.prompt_ids) for prompt in prompts[:CHECKED_PROMPTS]]
        with target.loaded() as model:
            checks = self_checks(model, keyed, settings, batch_size=run.config.judge.batch_size)
        run.say(
            f"self-checks: target as its own draft alpha {checks['alpha_live']:.3f} live, {checks['alpha_replay']:.3f} replay; "
            f"speculative greedy = plain greedy on {checks['greedy_equal']}/{checks['prompts']} prompts"
        )
        for warning in checks["warnings"]:
            run.say(f"warning: {warning}")
        return dict(checks)

    return run.record(run.folder / SELF_CHECKS, checked)
