"""From the logits of a verify call to the accepted tokens, on the device.

Shapes: R rows, G drafted tokens (with a tree its depth), G1 = G + 1, V vocabulary, N nodes of a token tree, N1 = N + 1, D depth,
U uniforms per place.
"""

from functools import partial
from typing import NamedTuple

import torch

from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import Proposal
from speculative.engine.cached_model import upload
from speculative.rules.sampling import ACCEPTANCE_COIN, RESIDUAL_UNIFORM, logits_to_probs, most_likely_and_peak
from speculative.rules.tree import TokenTree, verify_tree, verify_tree_greedy
from speculative.rules.verify import lenient_ids, verify, verify_block, verify_greedy


class Decision(NamedTuple):
    """Decision of a rule. `log_probs_RG1` is None for greedy rules, `path_RD` is None without a tree.

    peaks_RG1: one number per position, NaN or infinite when the logits are.
    """

    peaks_RG1: torch.Tensor
    accepted_R: torch.Tensor
    next_ids_R: torch.Tensor
    drafted_ids_RG: torch.Tensor  # by depth: the accepted path first
    log_probs_RG1: torch.Tensor | None = None
    path_RD: torch.Tensor | None = None

    @property
    def ids_RG1(self) -> torch.Tensor:
        """The drafted ids, with the target's own id at position `accepted`; later positions are unused."""
        ids_RG1 = torch.nn.functional.pad(self.drafted_ids_RG, (0, 1))
        return ids_RG1.scatter_(1, self.accepted_R.unsqueeze(1), self.next_ids_R.unsqueeze(1))


def decide(
    logits: torch.Tensor, proposal: Proposal, uniforms_RGU: torch.Tensor | None, settings: DecodeSettings
) -> Decision:
    """`logits` (R, G1, V), or (R, N1, V) for a tree; `uniforms_RGU` (R, G1, U) by place in the block, None for greedy rules."""
    if uniforms_RGU is None:
        target_ids, peaks = most_likely_and_peak(logits)
        if proposal.tree is not None:
            accepted, path_RD, next_ids = verify_tree_greedy(proposal.tree, target_ids, proposal.ids_RG)
            return Decision(peaks, accepted, next_ids, _path_ids(proposal.ids_RG, path_RD), path_RD=path_RD)
        if not settings.rule.lossless:
            lenience = settings.rule.lenience
            target_ids[:, :-1] = lenient_ids(lenience, logits[:, :-1], target_ids[:, :-1], proposal.ids_RG)
        greedy = verify_greedy(target_ids, proposal.ids_RG, _counts_on(proposal, logits.device))
        return Decision(peaks, greedy.accepted_B, greedy.next_ids_B, proposal.ids_RG)
    target_probs = logits_to_probs(logits, settings.sampling)
    if proposal.tree is not None:
        return _decide_tree(proposal.tree, target_probs, proposal, uniforms_RGU)
    width = proposal.ids_RG.shape[1]
    rule = settings.rule
    verified = (verify_block if rule.joint else partial(verify, lenience=rule.lenience))(
        target_probs,
        proposal.ids_RG,
        proposal.probs_RGV,
        uniforms_RGU[:, :width, ACCEPTANCE_COIN],
        uniforms_RGU[:, : width + 1, RESIDUAL_UNIFORM],
        _counts_on(proposal, logits.device),
    )
    # Softmax makes the whole row NaN when one logit is NaN or infinite: one column is enough.
    decision = Decision(target_probs[..., 0], verified.accepted_B, verified.next_ids_B, proposal.ids_RG)
    return decision._replace(log_probs_RG1=_log_probs(target_probs, decision.ids_RG1))


def _decide_tree(
    tree: TokenTree, target_probs_RN1V: torch.Tensor, proposal: Proposal, uniforms_RGU: torch.Tensor
) -> Decision:
    accepted_R, path_RD, next_ids_R, _ = verify_tree(
        tree,
        target_probs_RN1V,
        proposal.ids_RG,
        proposal.probs_RGV,
        columns(uniforms_RGU[:, : tree.depth], ACCEPTANCE_COIN, 4),
        uniforms_RGU[:, : tree.depth + 1, RESIDUAL_UNIFORM],
    )
    ids_RD, peaks_RN1 = _path_ids(proposal.ids_RG, path_RD), target_probs_RN1V[..., 0]
    decision = Decision(peaks_RN1, accepted_R, next_ids_R, ids_RD, path_RD=path_RD)
    nodes_RD1 = torch.nn.functional.pad(path_RD, (1, 0))
    rows_RD1V = target_probs_RN1V.gather(1, nodes_RD1.unsqueeze(-1).expand(-1, -1, target_probs_RN1V.shape[-1]))
    return decision._replace(log_probs_RG1=_log_probs(rows_RD1V, decision.ids_RG1))


def _log_probs(probs_RG1V: torch.Tensor, ids_RG1: torch.Tensor) -> torch.Tensor:
    return probs_RG1V.gather(-1, ids_RG1.unsqueeze(-1)).squeeze(-1).double().log()


def _counts_on(proposal: Proposal, device: torch.device) -> torch.Tensor | None:
    return None if proposal.counts_R is None else upload(proposal.counts_R, device)


def columns(uniforms_RGU: torch.Tensor, first: int, others: int) -> torch.Tensor:
    """Column `first` and every second column from `others` on: uniforms of the first candidate and of the others."""
    first_RG1 = uniforms_RGU[..., first : first + 1]
    if uniforms_RGU.shape[-1] <= others:
        return first_RG1
    # Slices: a list of indices would be copied to the device in every block.
    return torch.cat((first_RG1, uniforms_RGU[..., others::2]), -1)


def _path_ids(node_ids_RN: torch.Tensor, path_RD: torch.Tensor) -> torch.Tensor:
    """Ids (R, D) of the accepted nodes; later positions are unused."""
    return node_ids_RN.gather(1, (path_RD - 1).clamp_min(0))
