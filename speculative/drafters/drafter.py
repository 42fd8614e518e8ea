"""The drafter interface, and drafters with a model. A drafter sees every row's committed tokens and returns ids and probabilities.

Shapes: R rows, G drafted tokens (at most gamma), V vocabulary, C columns of the token buffer, N nodes of a token tree
(root not counted), N1 = N + 1, K candidates per node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.engine.cached_model import CachedModel, open_model, upload
from speculative.engine.recurrent_model import RecurrentModel
from speculative.engine.runners import EAGER
from speculative.rules.processors import LogitsRules
from speculative.rules.sampling import SamplingSettings, logits_to_probs, most_likely_and_peak, sample
from speculative.rules.tree import TokenTree, draw_children, top_children

# Maximum tokens per call when the draft catches up with the text, after rejections or plain decoding.
CATCH_UP_TOKENS = 64


@dataclass(frozen=True)
class Seats:
    """The setting of one decode call: number of rows, capacity of a row, and the target."""

    rows: int
    capacity: int
    target: CachedModel | RecurrentModel
    runner: str = EAGER


class Ask(NamedTuple):
    """The request to a drafter before each block. Arrays are on the host; `tokens_RC` after `lengths_R` is scratch. `uniforms_RGK`: the
    draft's, by place in the block and candidate; None when nothing is sampled. `tree`: propose this tree of
    candidates if supported (gamma is its depth); a chain is always allowed.
    """

    tokens_RC: np.ndarray
    lengths_R: np.ndarray
    prompt_lengths_R: np.ndarray
    active_R: np.ndarray
    gamma: int
    sampling: SamplingSettings
    uniforms_RGK: torch.Tensor | None = None
    rules: LogitsRules | None = None
    tree: TokenTree | None = None


class Proposal(NamedTuple):
    """The answer of a drafter, on the target's device.

    ids_RG: drafted ids, at most gamma (none = plain decoding); with a tree, the nodes (R, N). probs_RGV: the probabilities they were
    sampled from, None = one-hot. With a tree, row n (up to the last parent) is the distribution of the children of node n. counts_R: real
    ids per row, None = all. peaks_RG: one number per step, NaN or infinite if its logits are. sources_R: index into the drafter's
    `source_names`, None = 0.
    """

    ids_RG: torch.Tensor
    probs_RGV: torch.Tensor | None = None
    counts_R: np.ndarray | None = None
    peaks_RG: torch.Tensor | None = None
    sources_R: np.ndarray | None = None
    tree: TokenTree | None = None

    @property
    def real_R(self) -> np.ndarray:
        """Number of real ids per row."""
        rows, width = self.ids_RG.shape
        return np.full(rows, width, dtype=np.int64) if self.counts_R is None else self.counts_R

    @property
    def proposers_R(self) -> np.ndarray:
        """Index of the drafter of each row."""
        return np.zeros(len(self.ids_RG), dtype=np.int64) if self.sources_R is None else self.sources_R


class Plan(NamedTuple):
    """A way to propose that compiled code knows: rows whose last tokens were found before propose what followed; for the others the model
    drafts. ngrams: the longest and the shortest that is looked up, None = none; model: None = no tokens; steps: tokens that the model
    drafts at most, None = gamma; past: the `ResponseIndex` where n-grams are looked up, None = in the row's own text.
    """

    ngrams: tuple[int, int] | None = None
    model: "ModelDrafter | None" = None
    steps: int | None = None
    past: Any = None


class DeviceText(NamedTuple):
    """The rows' texts on the device, from which a block can continue without the host. tokens_RC: row r is tokens_RC[r, :lengths_R[r]],
    prompt included; it grows no longer than limits_R. uniforms_RLU: of a block, by the response position of its first token; None when
    nothing is sampled.
    """

    tokens_RC: torch.Tensor
    lengths_R: torch.Tensor
    prompt_lengths_R: torch.Tensor
    limits_R: torch.Tensor
    uniforms_RLU: torch.Tensor | None


class Drafter(Protocol):
    """The protocol of drafters, with defaults. One object serves one decode call after another. `model` is None for drafters without
    weights of their own. `name` is used in messages. `observes`: `observe` is called. `shares_cache`: it uses the target's cache, so it
    needs no memory of its own.
    """

    name: str
    source_names: tuple[str, ...]
    model: PreTrainedModel | None = None
    observes: bool = False
    shares_cache: bool = False

    @property
    def recordings(self) -> int:
        """Number of model calls compiled or captured so far."""
        return 0

    def start(self, seats: Seats) -> None:
        """Begin a decode call and reset all state. The modules of models must not change here."""

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None:
        """These rows now hold new prompts, tokens_RC[r, :lengths_R[r]]."""
        return

    def propose(self, ask: Ask) -> Proposal:
        """Draft at most `ask.gamma` tokens per row; called before every block, also with gamma 0. Only the drafter's own state may change.
        State about tokens that were not committed must be corrected here; each call gets all committed tokens.
        """

    def plan(self) -> Plan | None:
        """A plan that proposes what `propose` would, so that compiled code may do it; None if there is none. Asked
        before each call of compiled
        code, which may run many blocks: it must hold until a response ends. A drafter's plan is not that of its subclasses.
        """
        return None

    def observe(self, fed_ids_RG1: np.ndarray, predicted_ids_RG1: np.ndarray, accepted_R: np.ndarray) -> None:
        """The tokens the target was fed in the last block (-1 after a row's own) and its most likely token after each; called only when
        `observes`.
        """
        raise AssertionError(f"the {self.name} does not observe")

    def keep(self, rows: list[int]) -> None:
        """Compact to these rows, in this order."""
        return

    def end(self) -> None:
        """End the decode call and free its memory."""
        return


class ModelDrafter(Drafter):
    """A causal LM of its own with its own cache, which holds all committed tokens except the last one, or the last two after a fully
    accepted block, because the last drafted token was never fed. Each block starts by feeding them, so no block needs an extra call.
    Between blocks only a length per row is kept. `on_device`: `propose_on_device` proposes the same as `propose`. Each subclass must set
    it itself.
    """

    source_names: tuple[str, ...] = ("draft",)
    on_device = True

    def __init__(self, model: PreTrainedModel, name: str = "draft"):
        self.model: PreTrainedModel = model  # type: ignore[assignment]
        self.name = name
        self._cached: CachedModel | RecurrentModel | None = None
        self.read_R = np.zeros(0, dtype=np.int64)

    @property
    def recordings(self) -> int:
        return self._cached.runner.recordings if self._cached is not None else 0

    def plan(self) -> Plan | None:
        return Plan(model=self) if type(self) is ModelDrafter else None

    def start(self, seats: Seats) -> None:
        self._cached = open_model(self.model, self.name, seats.rows, seats.capacity, seats.runner)
        self.read_R = np.zeros(seats.rows, dtype=np.int64)

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None:
        # All but the last token: the first block feeds it, and the second-last again with static shapes.
        self.read_R[rows] = np.maximum(lengths_R[rows] - 1, 0)
        self.cached.prefill(tokens_RC, rows, self.read_R[rows])

    def keep(self, rows: list[int]) -> None:
        self.cached.keep(rows)
        self.read_R = self.read_R[rows]

    def end(self) -> None:
        if self._cached is not None:
            self._cached.close()
        self._cached = None

    @property
    def cached(self) -> CachedModel | RecurrentModel:
        """The model with its memory, between `start` and `end`."""
        assert self._cached is not None, "cached before start()"
        return self._cached

    def fewest(self, gamma: int) -> int:
        """Tokens of the text that a block reads with static shapes: the most that the previous block can leave unread."""
        return 2  # The last token was never fed; after a fully accepted block, neither was the one before.

    def propose_on_device(
        self,
        text: DeviceText,
        gamma: int,
        sampling: SamplingSettings,
        uniforms_RGK: torch.Tensor | None,
        prefix: int,
        shortest: int,
    ) -> Proposal:
        """`propose` for a chain, without the host, so that it can be captured. prefix: positions that the calls read. shortest: tokens of
        the shortest text; 1 when it is not known to be `fewest`.
        """
        ids: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        peaks: list[torch.Tensor] = []
        for step, logits_RV in enumerate(self._logits_on_device(text, gamma, prefix, shortest, ids)):
            id_R, peak_R = most_likely_and_peak(logits_RV)
            peaks.append(peak_R)
            if not sampling.greedy:
                assert uniforms_RGK is not None
                probs.append(logits_to_probs(logits_RV, sampling))
                id_R = sample(probs[-1], uniforms_RGK[:, step, 0])
            ids.append(id_R)
        return Proposal(torch.stack(ids, 1), torch.stack(probs, 1) if probs else None, None, torch.stack(peaks, 1))

    def _logits_on_device(
        self, text: DeviceText, gamma: int, prefix: int, shortest: int, ids: list[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Yield logits (R, V) for each step of a block; before the next step the caller appends the drafted ids to `ids`."""
        cached, lengths_R = self.cached, text.lengths_R
        assert isinstance(cached, CachedModel)
        # A text of one token has none before it.
        starts_R1 = (lengths_R - 2).clamp_min_(0).unsqueeze(1)
        positions_R2 = torch.cat((starts_R1, starts_R1 + 1), 1)
        logits_RKV = cached.feed_static(
            text.tokens_RC.gather(1, positions_R2), positions_R2, prefix, 1 if shortest > 1 else 2
        )
        logits_RV = logits_RKV[:, -1]
        if shortest == 1:
            logits_RV = torch.where((lengths_R > 1).unsqueeze(1), logits_RV, logits_RKV[:, 0])
        yield logits_RV
        for step in range(1, gamma):
            positions_R1 = (lengths_R + (step - 1)).unsqueeze(1)
            yield cached.feed_static(ids[-1].unsqueeze(1), positions_R1, prefix, 1)[:, 0]

    def propose(self, ask: Ask) -> Proposal:
        # Forget drafted tokens that were not committed; the last committed token was never fed.
        self.read_R = np.minimum(self.read_R, ask.lengths_R - 1)
        if ask.gamma == 0:
            return Proposal(torch.zeros((len(ask.lengths_R), 0), dtype=torch.int64, device=self.cached.device))
        if ask.tree is not None:
            return self._propose_tree(ask, ask.tree)
        return self._propose_chain(ask)

    def _catch_up(self, ask: Ask, masks: int = 0, mask_token: int = 0) -> torch.Tensor:
        """Feed the text that was not read yet. Logits (R, 1 + masks, V) after the last committed token and each mask token behind it."""
        lengths_R, fewest = ask.lengths_R, self.fewest(ask.gamma) if self.cached.runner.static else 1
        while True:
            missing = max(fewest, int((lengths_R - self.read_R)[ask.active_R].max(initial=1)))
            width = min(missing, CATCH_UP_TOKENS)
            # Rows that miss fewer tokens read some again; a row shorter than the width reads scratch after its end.
            ends_R, behind = (np.minimum(self.read_R + width, lengths_R), 0) if missing > width else (lengths_R, masks)
            starts_R = np.maximum(ends_R - width, 0)
            places_RW = starts_R[:, None] + np.arange(width + behind)
            ids_RW = np.take_along_axis(ask.tokens_RC, places_RW, 1)
            if behind:
                ids_RW = np.where(places_RW < lengths_R[:, None], ids_RW, mask_token)
            short = bool((ends_R < width)[ask.active_R].any())
            kept = width + behind if short else 1 + behind
            logits_RKV = self.cached.feed(upload(ids_RW, self.cached.device), starts_R, kept, once=width > fewest)
            self.read_R = ends_R.copy()
            if missing > width:
                continue
            if not short:
                return logits_RKV
            columns_RK = (lengths_R - 1 - starts_R)[:, None] + np.arange(1 + behind)
            rows_R1 = torch.arange(len(lengths_R), device=logits_RKV.device).unsqueeze(1)
            return logits_RKV[rows_R1, upload(columns_RK, logits_RKV.device)]

    def _chain_logits(self, ask: Ask, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield logits (R, V) for each step of a chain; before the next step the caller appends the drafted ids to `ids`."""
        yield self._catch_up(ask)[:, 0]
        for step in range(1, ask.gamma):
            logits_R1V = self.cached.feed(ids[-1].unsqueeze(1), ask.lengths_R + (step - 1), 1)
            self.read_R = ask.lengths_R + step
            yield logits_R1V[:, 0]

    def _propose_chain(self, ask: Ask) -> Proposal:
        scratch = _RuleText(ask, self.cached.device) if ask.rules is not None else None
        ids: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        peaks: list[torch.Tensor] = []
        for step, logits_RV in enumerate(self._chain_logits(ask, ids)):
            if scratch is not None:
                logits_RV = scratch.apply(logits_RV, step)
            if ask.sampling.greedy:
                id_R, peak_R = most_likely_and_peak(logits_RV)
                peaks.append(peak_R)
            else:
                probs.append(logits_to_probs(logits_RV, ask.sampling))
                assert ask.uniforms_RGK is not None
                id_R = sample(probs[-1], ask.uniforms_RGK[:, step, 0])
            ids.append(id_R)
            if scratch is not None:
                scratch.write(id_R, step)
        probs_RGV = torch.stack(probs, 1) if probs else None
        # Softmax makes the whole row NaN when one logit is NaN or infinite: one column is enough.
        peaks_RG = torch.stack(peaks, 1) if probs_RGV is None else probs_RGV[..., 0]
        return Proposal(torch.stack(ids, 1), probs_RGV, None, peaks_RG)

    def _propose_tree(self, ask: Ask, tree: TokenTree) -> Proposal:
        """Level by level: all nodes of a depth are fed in one call that re-reads the levels above."""
        assert ask.gamma == tree.depth, (ask.gamma, tree.depth)
        assert ask.rules is None, "a tree with logits rules is refused before decoding"
        root_logits_RV = self._catch_up(ask)[:, 0]
        self.read_R = ask.lengths_R - 1
        ids_RN1 = root_logits_RV.new_zeros((len(ask.lengths_R), tree.size + 1), dtype=torch.int64)
        last_R1 = np.take_along_axis(ask.tokens_RC, ask.lengths_R[:, None] - 1, 1)
        ids_RN1[:, :1] = upload(last_R1, ids_RN1.device)
        probs_RMV = None
        if not ask.sampling.greedy:
            parents = tree.parents[-1] + 1
            probs_RMV = root_logits_RV.new_zeros(
                (len(ask.lengths_R), parents, root_logits_RV.shape[-1]), dtype=torch.float32
            )
        peaks = [root_logits_RV.amax(-1)]
        logits_RN1V = root_logits_RV.unsqueeze(1)
        for depth, level in enumerate(tree.levels[:-1]):
            if depth > 0:
                logits_RN1V = self.cached.feed_tree(ids_RN1, ask.lengths_R - 1, tree)
                peaks.append(logits_RN1V[:, level[0] : level[-1] + 1].amax((-1, -2)))
            for node in level:
                children = tree.children[node]
                if not children:
                    continue
                children_K = upload(np.array(children), ids_RN1.device)
                if ask.sampling.greedy:
                    ids_RN1[:, children_K] = top_children(logits_RN1V[:, node], len(children))
                    continue
                assert probs_RMV is not None
                assert ask.uniforms_RGK is not None
                probs_RV = logits_to_probs(logits_RN1V[:, node], ask.sampling)
                probs_RMV[:, node] = probs_RV
                uniforms_RK = ask.uniforms_RGK[:, depth, : len(children)]
                ids_RN1[:, children_K] = draw_children(probs_RV, len(children), uniforms_RK)
        return Proposal(ids_RN1[:, 1:], probs_RMV, None, torch.stack(peaks, 1), None, tree)


class _RuleText:
    """The rows' text for logits rules: committed tokens, then the tokens drafted in this block."""

    def __init__(self, ask: Ask, device: torch.device):
        assert ask.rules is not None
        self._rules = ask.rules
        longest = int(ask.lengths_R.max()) + ask.gamma
        self._tokens_RC = upload(ask.tokens_RC[:, :longest], device).clone()
        self._lengths_R, self._prompt_lengths_R = upload(ask.lengths_R, device), upload(ask.prompt_lengths_R, device)

    def apply(self, logits_RV: torch.Tensor, step: int) -> torch.Tensor:
        return self._rules(logits_RV, self._tokens_RC, self._lengths_R + step, self._prompt_lengths_R)

    def write(self, ids_R: torch.Tensor, step: int) -> None:
        self._tokens_RC.scatter_(1, (self._lengths_R + step).unsqueeze(1), ids_R.unsqueeze(1))
