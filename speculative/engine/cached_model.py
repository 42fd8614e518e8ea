"""A causal LM that reads and writes a RaggedCache: feed tokens at any positions of each row, get logits.

Shapes: R rows, K rows of one call (all, or the few being prefilled), Q query tokens, P prefix (positions attention
sees), C capacity, V vocabulary, N1 nodes of a token tree with its root.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from speculative.engine.agreement import Check, fault_of, speed_warning
from speculative.engine.cache import whole_steps
from speculative.engine.calls import grouped_queries
from speculative.engine.compiled.model import compiled_model
from speculative.engine.fused.model import FusedModel, Scratch, fused_weights
from speculative.engine.memory import Memory, cache_entry, give_back, take
from speculative.engine.models import (
    check_decodable,
    devices_of,
    is_recurrent,
    max_positions,
    takes_logits_to_keep,
)
from speculative.engine.recurrent_model import RecurrentModel, recurrence_warning
from speculative.engine.runners import COMPILED, EAGER, FUSED_GRAPH, GRAPHED
from speculative.engine.windows import by_layer_kind, window_kinds
from speculative.errors import TooLittleMemory, UserError, out_of_memory
from speculative.rules.tree import TokenTree

# Compiled and captured calls use few prefix lengths, because each is recorded: this times a power of two, or fractions (`Runner.prefixes`).
STATIC_PREFIX = 256
PREFILL_TOKENS = 2048  # Tokens (rows x columns) of one prefill call: bounds its activations.
COMPILED_SLACK = 12  # Tokens of padding that take as long as another call, which reads the weights once more.
REMEMBERED_QUERY = 64  # Masks of longer calls (prefill) are large and rarely used again.
FEWEST_PREFILL_TOKENS = 64  # Give up on out of memory only if even this few tokens do not fit.


def open_model(
    model: PreTrainedModel, name: str, rows: int, capacity: int, runner: str
) -> "CachedModel | RecurrentModel":
    """Return the model with a cache for `rows` texts of at most `capacity` tokens. Raises UserError as `check_decodable`."""
    if is_recurrent(model):
        check_decodable(model, name)
        return RecurrentModel(model, name, rows, capacity)
    return CachedModel(model, name, rows, capacity, runner)


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host array to the device without waiting. Small arrays are staged before the call returns."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def speed_warnings(*models: PreTrainedModel) -> list[str]:
    """Warnings about models that are decoded more slowly here than others of their kind are, or than by other engines."""
    found = [warning(model) for model in models for warning in (recurrence_warning, speed_warning)]
    return [one for one in dict.fromkeys(found) if one is not None]


class CachedModel:
    """A causal LM with its RaggedCache. Raises UserError for an unsupported model: `check_decodable`, or other logits than its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        rows: int,
        capacity: int,
        runner: str = EAGER,
        shared: Memory | None = None,
        unchecked: bool = False,
    ):
        """`shared`: use the cache of this model, whose first layers this model consists of, instead of an own one. `unchecked`: only the
        check itself wants that.
        """
        check_decodable(model, name)
        self.model, self.name = model, name
        self.device = model.device
        # A CUDA graph runs on one device.
        runner = runner if len(devices_of(model)) == 1 else EAGER
        self.prefill_tokens = PREFILL_TOKENS
        capacity = capacity if self.device.type == "cpu" else whole_steps(capacity)
        self._shares = shared is not None
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        # First, because it moves weights, whose addresses recordings hold. Layers that are shared are packed by their owner.
        fits = runner == GRAPHED and (shared is None or shared.kind == FUSED_GRAPH)
        weights = fused_weights(model) if fits else None
        runner = runner if weights is None else FUSED_GRAPH
        self.memory = take(model, rows, capacity, runner) if shared is None else shared.of_first_layers(layers)
        self.cache, self.runner = self.memory.cache, self.memory.runner
        self._exact_prefix = self.device.type == "cpu" and not self.runner.static
        self._capacity = capacity = self.cache.place.capacity
        self._positions_C = self.memory.positions_C
        longest = max_positions(model.config)
        self._last_position = longest - 1 if longest is not None and capacity > longest else None
        self._mask_dtype = cache_entry(model).dtype
        self._hidden = torch.finfo(self._mask_dtype).min
        self._takes_logits_to_keep = takes_logits_to_keep(model)
        self._windows = window_kinds(model, name, capacity)
        self.compiled = compiled_model(model, self.cache) if runner == COMPILED else None
        self._fused: FusedModel | None = None
        if weights is not None:
            scratch = self.memory.scratch = self.memory.scratch or Scratch(model, weights, capacity)
            self._fused = FusedModel(weights, self.cache, scratch)
        self._triangles: dict[tuple[int, int | None], torch.Tensor] = {}
        if self.compiled is None and not unchecked:
            self._check_calls()

    def _check_calls(self) -> None:
        """Raises UserError if calls of rows of different length do not give the model's own logits."""
        model, name = self.model, self.name
        check = Check("eager calls", lambda capacity: CachedModel(model, name, 2, capacity, unchecked=True).feed)
        fault = fault_of(model, check)
        if fault is not None:
            raise UserError(
                f"the {name} ({type(model).__name__}) gives other logits for rows of different length than in its own call ({fault}); "
                "it counts positions or hides tokens by its own rules, which are not supported: use another model"
            )

    def feed(
        self,
        ids_KQ: torch.Tensor,
        starts_K: np.ndarray,
        logits_kept: int,
        rows: Sequence[int] | None = None,
        once: bool = False,
    ) -> torch.Tensor:
        """Logits (K, logits_kept, V) after the last `logits_kept` of Q tokens, written from each row's start on. `starts_K` is on the
        host, so the device is not read. `rows`: only these take part; None = all, in order. `once`: a shape that is unlikely to be used
        again, so it is not recorded.
        """
        if self.compiled is not None:
            return self.compiled(ids_KQ, starts_K, logits_kept, rows)
        rows_count, query_length = ids_KQ.shape
        stop = int(starts_K.max()) + query_length
        shared = int(starts_K[0]) if rows_count == 1 or bool((starts_K == starts_K[0]).all()) else None
        if self._exact_prefix and shared is not None:
            positions_KQ = self._positions_C[shared:stop].unsqueeze(0)
            if rows_count > 1:
                positions_KQ = positions_KQ.expand(rows_count, -1)
            rows_K = None if rows is None else torch.tensor(rows, dtype=torch.int64)
            self.cache.begin(positions_KQ, stop, shared, rows_K)
            masks = self._shared_masks(shared, query_length)
            if masks is not None and rows_count > 1:
                masks = [mask.expand(rows_count, -1, -1, -1) for mask in masks]
            return self._call(ids_KQ, positions_KQ, masks, logits_kept)

        positions_KQ = upload(starts_K[:, None] + np.arange(query_length), self.device)
        if self.runner.static and rows is None and not once:
            constants = (self.static_prefix(stop), logits_kept)
            return self.runner.run(self.feed_static, (ids_KQ, positions_KQ), constants)
        rows_K = None if rows is None else upload(np.array(rows), self.device)
        # A call that begins at position 0 attends only to its own states, so a causal mask is enough.
        fresh = shared == 0
        prefix = query_length if fresh else self._eager_prefix(stop)
        self.cache.begin(positions_KQ, prefix, 0 if fresh else None, rows_K)
        masks = None if fresh and self._windows == [None] else self._masks(positions_KQ, prefix)
        return self._call(ids_KQ, positions_KQ, masks, logits_kept)

    def feed_tree(self, ids_RN1: torch.Tensor, starts_R: np.ndarray, tree: TokenTree) -> torch.Tensor:
        """Logits (R, N1, V) after every node of a token tree whose root is at each row's start. Node n is written to slot start + n and
        has position start + depth(n). It sees the text before the root and its own ancestors. `commit_path` moves the accepted nodes to
        their positions in the text.
        """
        if self.compiled is not None:
            return self.compiled(ids_RN1, starts_R, tree.size + 1, tree=tree)
        starts_R1 = upload(starts_R, self.device).unsqueeze(1)
        nodes_N1 = self._positions_C[: tree.size + 1]
        shape = tree.on(self.device)
        depths_N1 = shape.depths_N1
        prefix = self._eager_prefix(int(starts_R.max()) + tree.size + 1)
        self.cache.begin(starts_R1 + nodes_N1, prefix)
        positions_RN1 = starts_R1 + depths_N1

        relative_RP = self._positions_C[:prefix] - starts_R1
        node_RP = relative_RP.clamp(0, tree.size)
        ancestors_RN1P = shape.ancestors_N1N1[:, node_RP].transpose(0, 1)
        in_tree_RP = (relative_RP >= 0) & (relative_RP <= tree.size)
        visible_RN1P = (relative_RP < 0).unsqueeze(1) | (in_tree_RP.unsqueeze(1) & ancestors_RN1P)
        stands_at_RP = torch.where(in_tree_RP, starts_R1 + depths_N1[node_RP], self._positions_C[:prefix])
        distance_RN1P = positions_RN1.unsqueeze(2) - stands_at_RP.unsqueeze(1)
        masks = [
            self._additive(visible_RN1P if window is None else visible_RN1P & (distance_RN1P < window))
            for window in self._windows
        ]
        return self._call(ids_RN1, positions_RN1, masks, tree.size + 1)

    def commit_path(self, starts_R: np.ndarray, path_RD: torch.Tensor) -> None:
        """After `feed_tree`: move the states of the accepted nodes (R, D), by depth, to start + 1, start + 2, ..."""
        starts_R1 = upload(starts_R, self.device).unsqueeze(1)
        places_D = self._positions_C[1 : path_RD.shape[1] + 1]
        self.cache.move(starts_R1 + path_RD, starts_R1 + places_D)

    def prefill(self, tokens_RC: np.ndarray, rows: Sequence[int], lengths_K: np.ndarray) -> None:
        """Read the first `lengths_K` tokens of these rows, rows of similar length together, in calls that get smaller if memory runs out.
        Padding is written too: only later positions see it, and it is overwritten before they are used. Raises TooLittleMemory when even
        the smallest call does not fit.
        """
        slack = None if self.compiled is None else COMPILED_SLACK
        for group in _similar_lengths(lengths_K, self.prefill_tokens, slack):
            longest = int(lengths_K[group].max())
            group_rows = [rows[index] for index in group]
            everyone = group_rows == list(range(self.cache.rows))
            start = 0
            while start < longest:
                columns = max(1, self.prefill_tokens // len(group))
                ids_KQ = upload(tokens_RC[group_rows, start : min(start + columns, longest)], self.device)
                try:
                    kept = 0 if self.compiled is not None else 1  # not read
                    self.feed(ids_KQ, np.full(len(group), start), kept, None if everyone else group_rows, once=True)
                except RuntimeError as error:
                    self._shrink_prefill(error)
                    continue
                start += columns

    @property
    def how(self) -> str:
        """How its calls run, in words."""
        if self._fused is not None:
            return "fused kernels in CUDA graphs"
        return "compiled code" if self.compiled is not None else "CUDA graphs" if self.runner.static else "eager calls"

    def keep(self, rows: Sequence[int]) -> None:
        """Compact to these rows, in this order."""
        self.cache.keep(upload(np.array(rows), self.device))

    def close(self) -> None:
        """End the decode call; recordings are kept for the next one."""
        if not self._shares:
            give_back(self.model, self.memory)

    def _shrink_prefill(self, error: RuntimeError) -> None:
        """Halve the size of prefill calls after an out-of-memory error; re-raise any other error."""
        if not out_of_memory(error):
            raise error
        if self.prefill_tokens <= FEWEST_PREFILL_TOKENS:
            raise TooLittleMemory(
                f"out of memory while the {self.name} reads the prompts ({self.cache.rows} rows of "
                f"{self._capacity} positions): lower the batch size, max_tokens or the prompt length"
            ) from error
        self.prefill_tokens //= 2

    def _call(
        self, ids_KQ: torch.Tensor, positions_KQ: torch.Tensor, masks: list[torch.Tensor] | None, logits_kept: int
    ) -> torch.Tensor:
        if self._last_position is not None:
            # Drafted tokens may overshoot the context; they are cut from the response, so any position does.
            positions_KQ = positions_KQ.clamp_max(self._last_position)
        keep = {"logits_to_keep": logits_kept} if self._takes_logits_to_keep else {}

        with grouped_queries(self.model, self.device):
            logits: torch.Tensor = self.model(
                input_ids=ids_KQ,
                attention_mask=None if masks is None else by_layer_kind(masks),
                position_ids=positions_KQ,
                past_key_values=self.cache,
                use_cache=True,
                **keep,
            ).logits
            return logits[:, -logits_kept:]

    def feed_static(self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, prefix: int, kept: int) -> torch.Tensor:
        """Logits (R, kept, V) of a call of all rows that can be captured: nothing comes from the host, and shapes and
        addresses depend only on the arguments' shapes, `prefix` and `kept`.
        """
        if self._fused is not None:
            return self._fused(ids_RQ, positions_RQ, kept)
        self.cache.begin(positions_RQ, prefix)
        return self._call(ids_RQ, positions_RQ, self._masks(positions_RQ, prefix), kept)

    def static_prefix(self, stop: int) -> int:
        """Number of positions a compiled or captured call reads if its last written position is `stop` - 1."""
        if self._fused is not None:
            return self._capacity  # It reads each row to its last token, so one recording does.
        steps = self.runner.prefixes
        unit = STATIC_PREFIX // steps
        while unit * 2 * steps <= stop:
            unit *= 2
        return min(-(-stop // unit) * unit, self._capacity)

    def _eager_prefix(self, stop: int) -> int:
        return stop if self._exact_prefix else min(whole_steps(stop), self._capacity)

    def _masks(self, positions_KQ: torch.Tensor, prefix: int) -> list[torch.Tensor]:
        """Additive masks (K, 1, Q, P), one per kind of layer: a token sees its position and everything before."""
        own_KQ1, seen_P = positions_KQ.unsqueeze(2), self._positions_C[:prefix]
        visible_KQP = seen_P <= own_KQ1
        return [
            self._additive(visible_KQP if window is None else visible_KQP & (seen_P > own_KQ1 - window))
            for window in self._windows
        ]

    def _additive(self, visible_KQP: torch.Tensor) -> torch.Tensor:
        # Added once here; a boolean mask would be converted again in every layer.
        zeros = torch.zeros(visible_KQP.shape, dtype=self._mask_dtype, device=self.device)
        return zeros.masked_fill_(~visible_KQP, self._hidden).unsqueeze(1)

    def _shared_masks(self, start: int, query_length: int) -> list[torch.Tensor] | None:
        """`_masks` for rows that all start at `start`, with a prefix that ends with the last token, as views. None if one token sees
        everything, or if these tokens are the whole text: the model then uses its own path without a mask.
        """
        if (query_length == 1 or start == 0) and self._windows == [None]:
            return None
        masks = []
        for window in self._windows:
            # Column C + i - d of this strip is the token d places before query i, for any start: a slice fits.
            strip_QS = self._triangles.get((query_length, window))
            if strip_QS is None:
                own_Q1 = self._capacity + torch.arange(query_length).unsqueeze(1)
                columns_S = torch.arange(self._capacity + query_length)
                visible_QS = columns_S <= own_Q1
                if window is not None:
                    visible_QS &= columns_S > own_Q1 - window
                strip_QS = self._additive(visible_QS.unsqueeze(0))
                if query_length <= REMEMBERED_QUERY:
                    self._triangles[query_length, window] = strip_QS
            masks.append(strip_QS[..., self._capacity - start :])
        return masks


def _similar_lengths(lengths_K: np.ndarray, tokens: int, slack: int | None = None) -> Iterator[list[int]]:
    """Indices in groups with little padding: no text is more than `slack` tokens shorter than its group's longest;
    None: a quarter and 16.
    """
    group: list[int] = []
    for index in np.argsort(-lengths_K, kind="stable").tolist():
        longest = int(lengths_K[group[0]]) if group else 0
        crowded = (len(group) + 1) * longest > tokens
        if group and (crowded or longest - lengths_K[index] > (longest / 4 + 16 if slack is None else slack)):
            yield sorted(group)
            group = []
        group.append(index)
    if group:
        yield sorted(group)
