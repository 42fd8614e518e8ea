"""From a block to a response: what of it is kept, token by token, as plain decoding would have kept it."""

from collections.abc import Callable, Sequence

from speculative.decoder.responses import BlockOutcome, DecodeSettings, GateRecord, Response
from speculative.decoder.text import TextStream
from speculative.errors import UserError


class _Stop:
    """Answer of a commit gate: end the response before this token."""


STOP = _Stop()
# (key, response position, token id, response ids so far) -> None to keep, another id to say instead, or STOP.
CommitGate = Callable[[str, int, int, Sequence[int]], "int | _Stop | None"]


def append_block(
    response: Response,
    outcome: BlockOutcome,
    row: int,
    settings: DecodeSettings,
    stream: TextStream | None,
    gate: CommitGate | None,
    known_ids: int,
) -> tuple[list[int], str]:
    """Append a block token by token: the gate first, then end tokens, stop strings and the budget, as plain decoding
    would meet them. Returns the appended ids and the text that became stable. `known_ids`: those a gate may answer.
    """
    accepted, drafted = int(outcome.accepted_R[row]), int(outcome.drafted_counts_R[row])
    response.blocks += 1
    response.drafted += drafted
    response.accepted += accepted
    response.drafted_counts.append(drafted)
    response.accepted_counts.append(accepted)
    response.tested += min(accepted + 1, drafted)
    response.overlap_sum += float(outcome.overlap_sums_R[row])
    appended: list[int] = []
    pieces: list[str] = []
    replaced = False
    for token_id in outcome.ids_RG1[row, : accepted + 1].tolist():
        position = len(response.response_ids)
        if gate is not None:
            answer = gate(response.key, position, token_id, tuple(response.response_ids))
            if isinstance(answer, _Stop):
                response.gate_log.append(GateRecord(position, token_id, "stop"))
                response.finish_reason = "gate"
                break
            replaced = answer is not None and answer != token_id
            if answer is not None and (type(answer) is not int or not 0 <= answer < known_ids):
                raise UserError(
                    f"the gate answered {answer!r}: None keeps the token, an id 0..{known_ids - 1} replaces it, STOP ends"
                )
            response.gate_log.append(GateRecord(position, token_id, str(answer) if replaced else "keep"))
            token_id = token_id if answer is None else int(answer)
        response.response_ids.append(token_id)
        appended.append(token_id)
        if token_id in settings.eos_ids:
            response.finish_reason = "end"
        if stream is not None:
            pushed = stream.push(token_id)
            pieces.append(pushed.text)
            if pushed.stopped is not None and response.finish_reason is None:
                response.finish_reason = "stop"
        if response.finish_reason is None and len(response.response_ids) == response.budget:
            response.finish_reason = "length"
        # What was drafted behind a replaced token continues another text.
        if response.finish_reason is not None or replaced:
            break
    kept = len(appended)
    response.log_target_probs += (
        [0.0] * kept if outcome.log_probs_RG1 is None else outcome.log_probs_RG1[row, :kept].tolist()
    )
    response.proposed_mask += [1] * min(accepted, kept) + [0] * (kept - min(accepted, kept))
    if replaced:
        response.proposed_mask[-1] = 0
        response.log_target_probs[-1] = float("nan")  # The target was not asked about this token.
    return appended, "".join(pieces)
