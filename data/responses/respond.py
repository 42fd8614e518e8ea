"""Store the target's responses to prompts: in batches, shared between ranks, and continued after an interruption."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedModel

from data.prompts.template import loss_mask
from data.responses.rendered import RenderedPrompt, prompt_lengths, texts_of
from data.responses.store import Row, Store, row_keys
from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings, Response
from speculative.drafters.drafter import Drafter
from speculative.engine.memory import release
from speculative.progress import phase


class ResponsePlan:
    """All wanted responses as jobs (prompt, sample number) in shards; depends only on the arguments.

    Longest prompts first, so that a batch has prompts of similar length and memory runs out at the start or never. J jobs.
    Each rank makes every `ranks`-th shard.
    """

    def __init__(
        self, prompts: Sequence[RenderedPrompt], samples_per_prompt: int, shard_size: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self.prompts, self.shard_size, self.rank, self.ranks = prompts, shard_size, rank, ranks
        columns = pa.table({"length": prompt_lengths(prompts), "prompt_id": texts_of(prompts, "prompt_id")})
        keys = [("length", "descending"), ("prompt_id", "ascending")]
        order = pc.sort_indices(columns, sort_keys=keys).to_numpy()
        self.numbers_J = np.repeat(order, samples_per_prompt)
        self.samples_J = np.tile(np.arange(samples_per_prompt, dtype=np.int32), len(order))
        self.keys = row_keys(columns["prompt_id"].take(self.numbers_J), pa.array(self.samples_J))

    def __len__(self) -> int:
        return -(-len(self.numbers_J) // self.shard_size)

    def domains(self) -> pa.Array:
        """Domains of the jobs' prompts, in order."""
        return texts_of(self.prompts, "domain").take(pa.array(self.numbers_J))

    def job(self, number: int) -> tuple[RenderedPrompt, int]:
        """The job at a place in the order."""
        return self.prompts[int(self.numbers_J[number])], int(self.samples_J[number])

    def shard(self, number: int) -> range:
        """Places of the jobs of a shard."""
        return range(number * self.shard_size, min((number + 1) * self.shard_size, len(self.numbers_J)))

    def share(self, store: Store) -> tuple[list[tuple[int, list[int]]], int]:
        """(shards of this rank with the places of jobs that the store lacks, total number of its jobs)."""
        present_J, mine = store.present(self.keys), range(self.rank, len(self), self.ranks)
        lacking = [(shard, [job for job in self.shard(shard) if not present_J[job]]) for shard in mine]
        return [(shard, jobs) for shard, jobs in lacking if jobs], sum(len(self.shard(shard)) for shard in mine)


def respond(
    store: Store,
    plan: ResponsePlan,
    target: PreTrainedModel,
    settings: DecodeSettings,
    *,
    batch_size: int,
    show: bool = True,
    drafter: Drafter | None = None,
) -> None:
    """Make the responses of this rank that an opened store lacks; with a drafter, by speculative decoding.

    A response depends only on (settings.seed, prompt id, sample number), so a killed and resumed run gives the same ones.

    Raises UserError: a prompt that does not fit; disk full.
    """
    lacking, total = plan.share(store)
    done = total - sum(len(numbers) for _, numbers in lacking)
    with phase(f"{store.folder.name} responses", total, done, show and plan.rank == 0) as shown:
        for shard, numbers in lacking:
            jobs = [plan.job(number) for number in numbers]
            keyed = [(f"{prompt.prompt_id}:{sample}", prompt.prompt_ids) for prompt, sample in jobs]
            responses, _ = decode(target, drafter, keyed, settings, batch_size=batch_size, shown=shown)
            pairs = zip(jobs, responses, strict=True)
            store.write_shard(shard, [row_of(prompt, sample, response) for (prompt, sample), response in pairs])
    release()  # Training may follow, and needs the memory.


def row_of(prompt: RenderedPrompt, sample: int, response: Response) -> Row:
    """The row of a response. Of one decoded with a draft, it marks the target's corrections."""
    rejected = rejected_tokens(response) if any(response.drafted_counts) else []
    input_ids = [*prompt.prompt_ids, *response.response_ids]
    mask = loss_mask(len(prompt.prompt_ids), len(input_ids))
    log_probs = list(response.log_target_probs)
    return Row(prompt.prompt_id, sample, prompt.domain, input_ids, mask, log_probs, response.finished, rejected)


def rejected_tokens(response: Response) -> list[bool]:
    """Which response tokens are the target's correction of a rejected draft token.

    A block emits its accepted tokens and one more: a correction if a draft token was rejected, else a bonus token.
    Positions beyond the end of a cut response are left out.
    """
    rejected, start = [False] * len(response.response_ids), 0
    for drafted, accepted in zip(response.drafted_counts, response.accepted_counts, strict=True):
        if accepted < drafted and start + accepted < len(rejected):
            rejected[start + accepted] = True
        start += accepted + 1
    return rejected
