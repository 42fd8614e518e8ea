"""The prompts of a probe, and the target's answers to them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.prompts.prompt import PromptSource
from data.prompts.sources import load_source
from data.prompts.split import content_hash
from distill.commands.probe.options import STDLIB, ProbeOptions
from distill.commands.probe.result import TextFacts
from distill.commands.target import check_room
from distill.models.target import Target
from distill.run.prompts import command_rows, render_rows
from speculative.decoder.responses import DecodeSettings, Prompt
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse, decode_heldout
from speculative.explain import ceilings
from speculative.explain.repetition import repetition
from speculative.measure.cost import StepCosts
from speculative.measure.measured import Measured
from speculative.measure.metrics import alpha_with_interval
from speculative.rules.rule import Rule
from speculative.rules.sampling import SamplingSettings


@dataclass(frozen=True)
class ProbeText:
    """The target's answers at one temperature, and its largest probabilities there."""

    sampling: SamplingSettings
    responses: list[HeldoutResponse]
    peaks: list[ceilings.TargetPeaks]

    @property
    def name(self) -> str:
        return text_name(self.sampling.temperature)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that the text can be replayed under, its own first."""
        return Rule.usual(self.sampling.temperature).replayable(truncates=self.sampling.truncates)

    @property
    def keys(self) -> Sequence[Hashable]:
        """The prompt of each answer: the unit of every interval."""
        return [response.prompt for response in self.responses]

    @property
    def tokens(self) -> int:
        return sum(len(response.response_ids) for response in self.responses)

    def row(self, way: str, rule: str, load: int) -> Measured:
        """A row about this text without figures."""
        prompts = len(set(self.keys))
        return Measured(way, rule, load, self.name, prompts, self.tokens)

    def facts(self, gammas: Sequence[int], costs: StepCosts) -> tuple[Measured, TextFacts]:
        """(the row of prompt lookup, the facts about the text)."""
        row = self.row("", self.rules[0].name, costs.batch_size)
        lookup, proposes, hits = ceilings.lookup_outlook(self.responses, self.keys, gammas, costs, row)
        alpha, ends = alpha_with_interval([text.peaks for text in self.peaks], self.keys)
        greedy = (None, None) if self.sampling.greedy else (alpha, ends)
        found = repetition(self.responses)
        repeats = found.repeated, found.looping, found.warning
        return lookup, TextFacts(self.name, self.tokens, *repeats, proposes, hits, *greedy)


def text_name(temperature: float) -> str:
    return f"temperature {temperature:g}"


def decode_settings(options: ProbeOptions, target: Target, temperature: float) -> DecodeSettings:
    """Settings to decode with the target alone."""
    rule = Rule.usual(temperature)
    return DecodeSettings(SamplingSettings(temperature), 0, rule, options.max_tokens, target.facts.eos_ids)


def answered(options: ProbeOptions, target: Target, prompts: Sequence[Prompt], temperature: float) -> ProbeText:
    settings = decode_settings(options, target, temperature)
    with target.loaded() as model:
        responses = decode_heldout(model, prompts, settings, "probe", batch_size=min(32, len(prompts)))
        return ProbeText(settings.sampling, responses, ceilings.target_peaks(model, responses, settings.sampling))


def chosen_prompts(
    options: ProbeOptions, tokenizer: PreTrainedTokenizerBase, context: int | None
) -> tuple[list[Prompt], list[str]]:
    """At most `count` distinct prompts, spread over the source, and notes about them."""
    embedded = options.prompts == STDLIB
    longest = (context or 1 << 20) - options.max_tokens
    if longest < 1:
        raise UserError(f"--max-tokens {options.max_tokens} fills the target's context of {context}: lower it")
    if embedded:
        rows = sorted(load_source(PromptSource(path=STDLIB, split="heldout")), key=content_hash)[: 4 * options.count]
        rows = [replace(row, origin=f"prompt-{number}") for number, row in enumerate(rows, start=1)]
    else:
        rows = command_rows(options.prompts)
    prompts = render_rows(rows, tokenizer, options.chat)
    distinct = list({tuple(ids): (key, ids) for key, ids in reversed(prompts)}.values())[::-1]
    if embedded:
        distinct = [prompt for prompt in distinct if len(prompt[1]) <= longest] or distinct
        chosen = distinct[: options.count]
    else:
        order = np.random.default_rng(0).permutation(len(distinct))[: options.count]
        chosen = [distinct[index] for index in sorted(order)]
    check_room(chosen, options.max_tokens, context)
    notes = []
    if tokenizer.chat_template and not (embedded or options.chat or all(row.messages for row in rows)):
        notes.append("the target has a chat template; prompts were continued as text; with --chat each is a user turn")
    if len(chosen) < options.count:
        notes.append(f"only {len(chosen)} distinct prompts instead of {options.count}, so intervals are wider")
    return chosen, notes
