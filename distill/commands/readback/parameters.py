"""Request parameters tried on an engine with a draft and on the same engine without it: which of them change under speculation?"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.responses.engine_client import EngineClient
from distill.run.served_record import TriedParameter
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.rules.sampling import GREEDY, SamplingSettings

_PROMPTS, _TOKENS = 8, 48  # at most; tokens of a response
NEAR = 0.05  # nats by which logprobs may differ: rounding of bfloat16
_FIXED: dict[str, dict[str, Any]] = {
    "(none)": {}, "presence_penalty": {"presence_penalty": 1.5}, "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5}, "min_p": {"min_p": 0.3}, "logprobs": {"logprobs": 3},
}  # fmt: skip
_Answers = list[Mapping[str, Any]]


def try_parameters(
    drafting: EngineClient, plain: EngineClient, texts: Sequence[HeldoutResponse], settings: DecodeSettings
) -> list[TriedParameter]:
    """Ask both engines with each parameter, greedily and with seeds, and compare texts and log-probabilities.

    logit_bias forbids the most frequent token of the texts; stop is a text from the middle of each response.

    Raises UserError: an engine is gone, or refuses a request without any of the parameters.
    """
    found, hot = [], SamplingSettings() if settings.sampling.greedy else settings.sampling
    few = replace(settings, rule="sample", sampling=hot, max_tokens=min(_TOKENS, settings.max_tokens))
    for mode, asked in (("greedy", replace(few, rule="greedy", sampling=GREEDY)), ("seeded", few)):
        sides = own, other = [_Side(client, texts[:_PROMPTS], asked) for client in (drafting, plain)]
        ids = [token for text in other.texts for token in plain.tokenizer(text).input_ids]
        banned = {"logit_bias": {str(max(sorted(set(ids)), key=ids.count)): -100}} if ids else {}
        fixed = _FIXED | {"logit_bias": banned}
        for name, value in fixed.items():
            found.append(_tried(name, [value] * len(own.texts), mode, sides))
        stops = [{"stop": [text[len(text) // 2 :][:3]]} if text else {} for text in other.texts]
        found += [_tried("stop", stops, mode, sides), _tried("seed", [{}] * len(own.texts), mode, [own, own])]
    return found


class _Side:
    """One engine, and its texts without any of the parameters."""

    def __init__(self, client: EngineClient, prompts: Sequence[HeldoutResponse], settings: DecodeSettings) -> None:
        self.client, self.prompts, self.settings = client, prompts, settings
        self.texts = _texts(self.ask([{}] * len(prompts)))

    def ask(self, values: Sequence[Mapping[str, Any]]) -> _Answers:
        """Answers to all prompts, each with its parameters."""
        pairs = zip(self.prompts, values, strict=True)
        return [self.client.choice(one.prompt_ids, self.settings, one.key, **more) for one, more in pairs]


def _texts(answers: _Answers) -> list[str]:
    return [str(one.get("text") or "") for one in answers]


def _tried(name: str, values: Sequence[Mapping[str, Any]], mode: Any, sides: Sequence[_Side]) -> TriedParameter:
    """Compare both engines with this parameter, and each with itself without it."""
    answers, refusals = [], dict[str, str]()
    for side, who in zip(sides, ("with the draft", "without the draft"), strict=True):
        try:
            answers.append(side.ask(values))
        except UserError as error:
            if getattr(error.__cause__, "status_code", None) is None:
                raise
            refusals[who] = str(error).removeprefix(f"{side.client.endpoint.url}: ")
    value = "" if name == "stop" else ", ".join(json.dumps(one) for one in values[0].values())
    row: dict[str, Any] = {"name": name, "value": value, "mode": mode, "prompts": len(values)}
    if refusals:
        said = "; ".join(f"{who}: {why}" for who, why in refusals.items())
        return TriedParameter(**row, status="refused", note=said)
    ours, theirs = map(_texts, answers)
    row["equal"] = _same(ours, theirs)
    moved, row["changed"] = (len(values) - _same(*pair) for pair in ((ours, sides[0].texts), (theirs, sides[1].texts)))
    if row["equal"] < len(values):
        apart = name != "(none)" and sides[0].texts != sides[1].texts
        status = "ignored" if row["changed"] and not moved else "differs"
        note = "the texts differ without it too" * apart
    elif name == "logprobs":
        status, note = _logprobs(*answers)
    else:
        without = {"(none)": "", "seed": "the engine with the draft, asked twice"}
        status, note = "same", "" if row["changed"] else without.get(name, "it changes none of these texts")
    return TriedParameter(**row, status=status, note=note)  # type: ignore[arg-type]


def _same(ours: Sequence[str], theirs: Sequence[str]) -> int:
    return sum(one == other for one, other in zip(ours, theirs, strict=True))


def _logprobs(ours: _Answers, theirs: _Answers) -> tuple[str, str]:
    """Status and note of log-probabilities of equal texts."""
    rows = [[(one.get("logprobs") or {}).get("top_logprobs") or [] for one in side] for side in (ours, theirs)]
    places = [sum(map(len, side)) for side in rows]
    if places[0] != places[1]:
        return "differs" if places[0] else "ignored", f"{places[0]} places instead of {places[1]}"
    if not places[0]:
        return "same", "neither engine returns any"
    pairs = [pair for one, other in zip(*rows, strict=True) for pair in zip(one, other, strict=False)]
    apart = [abs(one[token] - other[token]) for one, other in pairs if one and other for token in one if token in other]
    largest = max(apart, default=0.0)
    return "same" if largest <= NEAR else "differs", f"largest difference {largest:.2g} nats at {places[0]} places"
