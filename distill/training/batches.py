"""Micro-batches of a step, drawn from the pools of `data.mix`. They depend on the step number and the seed only.

Legend: R response tokens, T positions, D hidden width.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from data.batches.collate import PADDING, Batch, Example, collate, collate_packed
from data.batches.examples import Examples, as_examples
from data.batches.mixture import Mixture, Pool
from data.batches.packing import micro_batches, packed_micro_batches
from distill.config.run import RunConfig
from distill.config.sections import ParallelConfig
from distill.loss.definitions import Objective
from distill.loss.offsets import Survival, drawn_depths
from distill.models.heads import SplitModel
from distill.run.run import Run
from distill.training.rollouts import CurrentDraft, Rollouts
from distill.training.teacher import StoredTeacher, TeacherSource
from speculative.engine.models import in_eval_mode
from speculative.errors import UserError

# Distances of hidden states, relative to their norm. Compared with a sequence run alone, shapes and so rounding differ, and in half
# precision a token near a tie may go to another expert, so only the median must be small (TOLERANCE). With other neighbours in the
# same shapes, almost nothing may change at any position (LEAK).
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
LEAK, HALF_LEAK = 1e-4, 5e-3


class BatchSource:
    """Source of micro-batches for the training loop. A step has the same sequences for any number of ranks."""

    def __init__(
        self,
        run: Run,
        examples: Examples | Sequence[Example],
        rollouts: Rollouts | None = None,
    ) -> None:
        """`examples`: responses of the target. `rollouts` are needed if `data.mix` has a share of them.

        Raises UserError: a sequence that is longer than `train.packing`.
        """
        config = run.config
        every = config.data.rollouts.every
        made = {"student": every, "speculative": every}  # generated again by the draft every `every` steps
        pools = [Pool(name, share, made.get(name)) for name, share in config.data.mix.model_dump().items() if share > 0]
        self.config, self.rank, self.ranks, self.rollouts = config, run.rank, run.ranks, rollouts
        self.mixture = Mixture(pools, config.train.batch_size, config.seed)
        # Set by the caller of `micro_batch.chosen_micro_batch`.
        self.micro_batch_size = config.train.micro_batch_size or 1
        # Called with the micro-batches of the next step, in the thread that made them.
        self.read_ahead: Callable[[Sequence[Batch]], None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        # ((step, micro-batch size), the micro-batches being made in the thread).
        self._ahead: tuple[tuple[int, int], Future[list[Batch]]] | None = None
        self._held: dict[str, tuple[int, Examples]] = {}  # (generation, examples) of each pool in memory
        if "target" in self.mixture.pools:
            self._hold("target", 0, examples)

    def micro_batches(self, step: int, draft: CurrentDraft | None = None) -> list[Batch]:
        """This rank's micro-batches of a step. All ranks call it, because `draft` makes new rollouts here when they are due.

        Without rollouts, a thread makes the micro-batches of the next step while this one is computed.

        Without packing every micro-batch has `micro_batch_size` sequences. With packing it has at most that many rows, and a rank's
        last one may have no response tokens. `indices` of a batch number `examples`; other sequences have -1.
        """
        prepared, self._ahead = self._ahead, None
        if prepared is not None:
            wait([prepared[1]])  # also if it is for another step: two threads must not plan at once
        known = prepared is not None and prepared[0] == (step, self.micro_batch_size)
        window = prepared[1].result() if prepared is not None and known else self._window(step, draft)
        if self.rollouts is None and step + 1 < self.config.train.steps:
            self._ahead = (step + 1, self.micro_batch_size), self._thread.submit(self._prepared, step + 1)
        return window

    def _prepared(self, step: int) -> list[Batch]:
        window = self._window(step, None)
        if self.read_ahead is not None:
            self.read_ahead(window)
        return window

    def _window(self, step: int, draft: CurrentDraft | None) -> list[Batch]:
        train = self.config.train
        documents, numbers = self._documents(step, draft)
        lengths = np.array([len(document.input_ids) for document in documents])
        order = np.argsort(-lengths, kind="stable")
        if train.packing is None:
            parts = micro_batches(order, self.micro_batch_size, self.rank, self.ranks)
            return [collate([documents[i] for i in part], indices=[numbers[i] for i in part]) for part in parts]
        packed = packed_micro_batches(lengths, train.packing, self.micro_batch_size, self.rank, self.ranks)
        batches = []
        for rows in packed:
            filled, indices = [[documents[i] for i in row] for row in rows], [numbers[i] for row in rows for i in row]
            batches.append(collate_packed(filled, PADDING, train.packing, indices))
        return batches

    @property
    def longest(self) -> int:
        """Tokens of the longest row that a micro-batch can have."""
        held = [int(examples.lengths_N.max()) for _, examples in self._held.values()]
        rollout = self.rollouts.longest if self.rollouts is not None else 0
        return self.config.train.packing or max(rollout, *held, 2)

    def _documents(self, step: int, draft: CurrentDraft | None) -> tuple[list[Example], list[int]]:
        """The sequences of a step, pool after pool, and their numbers."""
        documents: list[Example] = []
        numbers: list[int] = []
        for name, count in self.mixture.counts(step).items():
            if not count:
                continue
            generation = self.mixture.generation(name, step)
            if self._held.get(name, (-1,))[0] != generation:
                if self.rollouts is None or draft is None:
                    raise ValueError(f"data.mix.{name}: rollouts and a draft are needed")
                self._hold(name, generation, self.rollouts.examples(name, generation, draft))
            _, examples = self._held[name]
            chosen = self.mixture.chosen(name, step, examples.lengths_N).tolist()
            taught = [examples[number] for number in chosen]
            numbered = enumerate(taught, len(documents))
            documents += [self._thinned(self._in_blocks(one, step, place), step, place) for place, one in numbered]
            numbers += chosen if name == "target" else [-1] * count
        return documents, numbers

    def _hold(self, name: str, generation: int, sequences: Examples | Sequence[Example]) -> None:
        examples, packing = as_examples(sequences), self.config.train.packing
        examples = examples.with_prompts(self.config.loss.prompt_weight)
        if not len(examples):
            raise UserError(f"data.mix.{name}: no sequences; check its sources, or set its share to 0")
        if packing is not None and (longest := examples.lengths_N.max()) > packing:
            raise UserError(f"train.packing = {packing}: set it to at least {longest}, for data.mix.{name}")
        self._held[name] = generation, examples

    def _in_blocks(self, example: Example, step: int, place: int) -> Example:
        """The example with a random block depth for each token, drawn from the seed, the step and the place in the step only."""
        parallel = self.config.student.parallel
        if parallel is None:
            return example
        generator = np.random.default_rng((self.config.seed, step, place))
        return replace(example, depths=drawn_depths(generator, example.loss_mask, parallel.tokens))

    def _thinned(self, example: Example, step: int, place: int) -> Example:
        """The example with a random share of its prompt tokens, each with more weight: the same loss in expectation, from fewer rows."""
        share = self.config.loss.prompt_share
        if share == 1.0 or not example.prompt_weight:
            return example
        drawn = np.random.default_rng((self.config.seed, step, place, 1)).random(len(example.loss_mask)) < share
        return replace(example, drawn=example.loss_mask | drawn, prompt_weight=example.prompt_weight / share)


def check_packing(split: SplitModel) -> None:
    """Compare hidden states of packed sequences with those of each sequence alone, and with other neighbours in the row.

    Raises UserError: the architecture, or the attention implementation in use, lets packed sequences attend to each other.
    """
    parameter = next(split.model.parameters())
    vocabulary = min(split.model.config.get_text_config().vocab_size, 997)
    ids = (np.arange(36) * 7919 + 13) % vocabulary
    cuts = [(0, 7), (7, 16), (16, 18), (18, 22), (22, 36)]  # the first three make a row of 18, the last two another
    first = np.zeros(36, dtype=bool)
    first[[*range(7), *range(18, 22)]] = True
    # The first sequence of each row differs, the ones after it are the same.
    other_ids = np.where(first, (ids + 5) % vocabulary, ids)
    attention = getattr(split.model.config, "_attn_implementation", None)
    name, fix = f"{type(split.model).__name__} (attention: {attention})", "set train.packing to null"

    def packed_hidden(row_ids: np.ndarray) -> Tensor:
        probes = [Example(row_ids[start:stop], np.ones(stop - start, dtype=bool)) for start, stop in cuts]
        packed = collate_packed([probes[:3], probes[3:]], 0, 18).to(parameter.device)
        hidden_BTD = split.hidden(packed.input_ids_BT, packed.position_ids_BT)
        return hidden_BTD.reshape(36, -1)

    with torch.no_grad(), in_eval_mode(split.model):
        alone = [split.hidden(torch.tensor(ids[None, start:stop], device=parameter.device))[0] for start, stop in cuts]
        try:
            together_TD, beside_others_TD = packed_hidden(ids), packed_hidden(other_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"train.packing: {name} does not support packed sequences ({str(error).splitlines()[0]}); {fix}"
            ) from error
    same, leak = (TOLERANCE, LEAK) if parameter.dtype in (torch.float32, torch.float64) else (HALF_TOLERANCE, HALF_LEAK)
    behind = torch.from_numpy(~first).to(parameter.device)
    from_alone_T = _distances(together_TD[behind], torch.cat(alone)[behind])
    from_others_T = _distances(together_TD[behind], beside_others_TD[behind])
    if not (from_alone_T.median() <= same and from_others_T.max() <= leak):
        raise UserError(f"train.packing: {name} lets packed sequences attend to each other; {fix}")


def _distances(found_TD: Tensor, expected_TD: Tensor) -> Tensor:
    """(T,) distances between hidden states of a position, relative to the expected one's norm; inf for NaN."""
    distances_T = (found_TD.double() - expected_TD.double()).norm(dim=-1) / expected_TD.double().norm(dim=-1)
    return distances_T.nan_to_num(nan=torch.inf)


def make_batches(
    run: Run,
    examples: Examples | Sequence[Example],
    rollouts: Rollouts | None = None,
    teacher: TeacherSource | None = None,
    mask_token: int | None = None,
) -> BatchSource:
    """Make the source of micro-batches.

    ``rollouts``: if `data.mix` has a share of them. ``teacher``: a stored one reads the records of the next step in advance.
    ``mask_token``: of a parallel draft.

    Raises UserError: sequences that are too long or contain the mask token.
    """
    config, packing = run.config, run.config.train.packing
    if rollouts is not None and packing is not None and rollouts.longest > packing:
        raise UserError(f"train.packing = {packing}: set it to at least {rollouts.longest}, for rollouts")
    if mask_token is not None and any(mask_token in examples[number].input_ids for number in range(len(examples))):
        raise UserError(
            f"student.parallel: a training sequence contains the draft's mask token {mask_token}; leave that text out"
        )
    source = BatchSource(run, examples, rollouts)
    if isinstance(teacher, StoredTeacher) and config.signal.source != "capture":
        source.read_ahead = teacher.read_ahead
    return source


def make_objective(config: RunConfig) -> Objective:
    loss = config.loss
    return Objective(
        config.loss_weights(0),
        loss.temperature,
        eta=loss.eta,
        chunk_tokens=loss.chunk_tokens,
        serving=config.serving.sampling,
        rule=config.judge_rule,
        compile=config.train.compile,
    )


def make_survival(parallel: ParallelConfig | None) -> Survival | None:
    """The weights of the offsets of a parallel draft; None for a draft that drafts token by token."""
    return None if parallel is None else Survival(parallel.tokens)
