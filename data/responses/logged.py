"""A logged answer as a row of the store: whether its settings are those of the run, and its tokens."""

from collections.abc import Sequence
from typing import Any

from data.prompts.logs import LoggedAnswer
from data.prompts.template import loss_mask
from data.responses.rendered import RenderedPrompt
from data.responses.store import Row
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.rules.sampling import SamplingSettings

UNSTATED = "without a temperature"


def other_settings(answer: LoggedAnswer, wanted: SamplingSettings) -> str:
    """Why an answer is not of these settings, in words; empty if it is."""
    if answer.shaped:
        return f"shaped by {', '.join(answer.shaped)}"
    if answer.sampling["temperature"] is None:
        return UNSTATED
    try:
        stated = SamplingSettings(**answer.sampling)
    except UserError:
        return "with settings that nothing samples at"
    if stated == wanted or (stated.greedy and wanted.greedy):
        return ""
    theirs, ours = stated.as_dict(), wanted.as_dict()
    differing = (f"{name} {value:g} (here {ours[name]:g})" for name, value in theirs.items() if value != ours[name])
    return f"sampled at {', '.join(differing)}"


def logged_row(
    prompt: RenderedPrompt, answer: LoggedAnswer, tokenizer: Any, settings: DecodeSettings, end: int | None
) -> Row:
    """The row of an answer, without probabilities. Logs leave out the token that ended it; ``end`` is the one of a chat template."""
    ids: list[int] = answer.ids or list(tokenizer(answer.text, add_special_tokens=False).input_ids)
    if answer.finished and not {*ids[-1:]} & {*settings.eos_ids}:
        ids = [*ids, end if end is not None and end in settings.eos_ids else settings.eos_ids[0]]
    finished = answer.finished and len(ids) <= settings.max_tokens
    ids = [*prompt.prompt_ids, *ids[: settings.max_tokens]]
    mask: Sequence[bool] = loss_mask(len(prompt.prompt_ids), len(ids))
    return Row(prompt.prompt_id, 0, prompt.domain, ids, mask, (), finished)
