"""The cascade: who proposes in which row, how the two answers are mixed, and what decoding makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from host_rows import SMALL_DRAFT, SMALL_VOCAB, TARGET, HostRows, repeating_prompts, sampled_text_p_value
from tiny_models import perturbed

from speculative.decode import decode
from speculative.decoder import block_loop
from speculative.decoder.block_loop import BlockLoop
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.drafter import Ask, Drafter, ModelDrafter, Proposal, Seats
from speculative.drafters.lookup import PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.errors import UserError
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings, one_hot, row_uniforms
from speculative.rules.tree import TokenTree

DRAFT = perturbed(TARGET)


class Scripted(Drafter):
    """A drafter that answers what it was given and notes what it was told."""

    def __init__(self, name: str, proposal: Proposal, source_names: tuple[str, ...] = ()):
        self.name, self.proposal, self.source_names = name, proposal, source_names or (name,)
        self.told: list[tuple[Any, ...]] = []

    def start(self, seats: Seats) -> None:
        self.told.append(("start", seats.rows))

    def admit(self, rows: list[int], tokens_RC: np.ndarray, lengths_R: np.ndarray) -> None:
        self.told.append(("admit", rows))

    def propose(self, ask: Ask) -> Proposal:
        self.told.append(("propose", ask.gamma, ask.lengths_R.tolist()))
        rows = len(ask.lengths_R)
        return self.proposal if ask.gamma else Proposal(torch.zeros((rows, 0), dtype=torch.int64))

    def observe(self, fed_ids_RG1: np.ndarray, predicted_ids_RG1: np.ndarray, accepted_R: np.ndarray) -> None:
        self.told.append(("observe", fed_ids_RG1.tolist()))

    def keep(self, rows: list[int]) -> None:
        self.told.append(("keep", rows))


def chains(*rows: list[int]) -> Proposal:
    width = max(map(len, rows))
    ids_RG = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return Proposal(ids_RG, counts_R=np.array([len(row) for row in rows]))


def asked(cascade: LookupDraft, gamma: int, rows: int, active: tuple[int, ...] | None = None) -> Proposal:
    told = HostRows(cascade, rows)
    for row in range(rows) if active is None else active:
        told.apply(("admit", (row, [1] * (row + 2))))
    return cascade.propose(told.ask(gamma))


def test_rows_take_the_first_drafter_where_it_found_enough():
    first = Scripted("first", chains([1, 2], [], [], [4, 5]), ("a", "b"))
    first.proposal = first.proposal._replace(sources_R=np.array([0, 1, 0, 1]))
    then = Scripted("then", Proposal(torch.arange(12).reshape(4, 3) + 20))
    mixed = asked(LookupDraft(first, then), 3, 4)
    assert mixed.ids_RG.tolist() == [[1, 2, 0], [23, 24, 25], [26, 27, 28], [4, 5, 0]]
    assert mixed.counts_R.tolist() == [2, 3, 3, 2]
    assert mixed.probs_RGV is None
    assert mixed.sources_R.tolist() == [0, 2, 2, 1]
    assert LookupDraft(first, then).source_names == ("a", "b", "then")


@pytest.mark.parametrize("found", [[1, 2, 3], [1, 2]])
def test_looked_up_rows_are_one_hot_beside_the_drafts_probabilities(found):
    probs_RGV = torch.rand(3, 2, 6, dtype=torch.float64)
    kept, peaks_RG = probs_RGV.clone(), torch.ones(3, 2)
    first = Scripted("first", chains(found, [], [4]))
    then = Scripted("then", Proposal(torch.tensor([[5, 5], [4, 3], [2, 1]]), probs_RGV, None, peaks_RG))
    mixed = asked(LookupDraft(first, then), 3, 3)
    width = len(found)
    assert mixed.ids_RG.tolist() == [found, [4, 3, 0][:width], [4, 0, 0][:width]]
    assert mixed.counts_R.tolist() == [width, 2, 1]
    assert mixed.probs_RGV.dtype == torch.float64
    assert torch.equal(mixed.probs_RGV[0], one_hot(torch.tensor(found), 6, torch.float64))
    assert torch.equal(mixed.probs_RGV[1, :2], probs_RGV[1])
    assert torch.equal(mixed.probs_RGV[2, :1], one_hot(torch.tensor([4]), 6, torch.float64))
    assert torch.equal(probs_RGV, kept), "the draft's own rows are its own"
    assert mixed.peaks_RG is peaks_RG


def test_the_second_proposes_only_when_an_active_row_needs_it_and_always_gets_the_text():
    first, then = Scripted("first", chains([1], [], [2])), Scripted("then", chains([7], [8], [9]))
    mixed = asked(LookupDraft(first, then), 1, 3, active=(0, 2))
    assert mixed.ids_RG.tolist() == [[1], [0], [2]]
    assert mixed.sources_R.tolist() == [0, 0, 0]
    assert then.told[-1] == ("propose", 0, [2, 1, 4])
    assert asked(LookupDraft(first, then), 1, 3, active=(0, 1)).ids_RG.tolist() == [[1], [8], [9]]
    assert then.told[-1] == ("propose", 1, [2, 3, 1])
    assert asked(LookupDraft(first, then), 0, 3).ids_RG.shape == (3, 0)
    assert then.told[-1][:2] == ("propose", 0)


def test_all_rows_are_the_seconds_when_the_first_finds_nothing():
    first, then = Scripted("first", chains([], []), ("a", "b")), Scripted("then", chains([7, 7], [8]))
    proposal = asked(LookupDraft(first, then), 2, 2)
    assert proposal.ids_RG is then.proposal.ids_RG
    assert proposal.counts_R.tolist() == [2, 1]
    assert proposal.sources_R.tolist() == [2, 2]


def test_a_token_tree_in_the_settings_gives_chains():
    prompts, tree = repeating_prompts(3), TokenTree.from_branching((2, 2))
    plain, _ = decode(TARGET, None, prompts, DecodeSettings(GREEDY, 0, Rule.named("greedy"), max_tokens=20))
    settings = DecodeSettings(GREEDY, 2, Rule.named("greedy"), max_tokens=20, tree=tree)
    responses, _ = decode(TARGET, LookupDraft(PromptLookup(2, 2), ModelDrafter(DRAFT)), prompts, settings)
    assert [one.response_ids for one in responses] == [one.response_ids for one in plain]
    assert {count for one in responses for count in one.drafted_counts} == {2}


def test_a_first_drafter_that_draws_is_refused():
    drawing = Scripted("drawing", Proposal(torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, 4)))
    with pytest.raises(UserError, match="drawing samples its proposals"):
        asked(LookupDraft(drawing, PromptLookup()), 2, 1)


class SecondBest(Scripted):
    """Proposes, at every third length, the target's second most likely token and its favourites behind it.

    Often accepted, seldom what another would have drawn.
    """

    def __init__(self) -> None:
        super().__init__("second best", Proposal(torch.zeros(0, 0, dtype=torch.int64)))

    def propose(self, ask: Ask) -> Proposal:
        ids_RG = torch.zeros(len(ask.lengths_R), ask.gamma, dtype=torch.int64)
        for row, length in enumerate(ask.lengths_R):
            text = ask.tokens_RC[row, :length].tolist()
            for place in range(ask.gamma):
                text.append(int(TARGET(torch.tensor([text])).logits[0, -1].topk(2)[1][int(place == 0)]))
            ids_RG[row] = torch.tensor(text[length:])
        return Proposal(ids_RG, counts_R=(ask.lengths_R % 3 == 0) * ask.gamma)


def accepted_of_the_draft(cascade: LookupDraft, gamma: int = 3) -> tuple[list[bool], set[int]]:
    """Whether each token that the second drafter proposed was accepted, and who proposed in this run."""
    prompts = repeating_prompts()
    settings = DecodeSettings(SamplingSettings(2.0, top_k=2), gamma, max_tokens=60)
    loop = BlockLoop(TARGET, cascade, len(prompts), 120, settings)
    passed: list[bool] = []
    sources: set[int] = set()
    with torch.no_grad():
        loop.admit(range(len(prompts)), prompts)
        for block in range(12):
            outcome = loop.run_block(0 if block == 7 else gamma)
            sources |= set(outcome.sources_R.tolist())
            for row in np.flatnonzero(outcome.sources_R == 1):
                passed += [place < outcome.accepted_R[row] for place in range(outcome.drafted_counts_R[row])]
            if block == 5:
                loop.keep([7, 0, 1, 2, 5])
    return passed, sources


def test_the_second_drafter_never_reads_tokens_that_were_not_emitted(monkeypatch):
    """The target as its own draft is always right, unless it remembers tokens that another drafter's replaced."""
    cascade = LookupDraft(SecondBest(), ModelDrafter(TARGET))
    passed, sources = accepted_of_the_draft(cascade)
    assert all(passed)
    assert len(passed) > 30
    assert sources == {0, 1}
    monkeypatch.setattr(LookupDraft, "_call_back_strayed", lambda self, ask: None)
    assert not all(accepted_of_the_draft(cascade)[0]), "this test would not see what it is there to see"


class Remembering(ModelDrafter):
    """Keeps the tokens it drew last."""

    drawn_RG = torch.zeros(0, 0, dtype=torch.int64)

    def propose(self, ask: Ask) -> Proposal:
        proposal = super().propose(ask)
        if ask.gamma:
            self.drawn_RG = proposal.ids_RG
        return proposal


class Peeking(Scripted):
    """Decides by what the draft drew for later places of the block before, whether or not they were discarded."""

    def __init__(self, draft: Remembering):
        super().__init__("peeking", Proposal(torch.zeros(0, 0, dtype=torch.int64)))
        self.draft = draft

    def propose(self, ask: Ask) -> Proposal:
        rows = len(ask.lengths_R)
        counts_R = np.zeros(rows, dtype=np.int64)
        if self.draft.drawn_RG.shape == (rows, ask.gamma):
            counts_R[(self.draft.drawn_RG[:, 1] >= SMALL_VOCAB // 2).numpy()] = 1
        return Proposal(torch.full((rows, 1), 3), counts_R=counts_R)


def test_a_decision_may_depend_on_discarded_tokens_of_earlier_blocks(monkeypatch):
    """Each block draws numbers of its own. The same chi-square sees a block that uses those of a position again."""
    draft = Remembering(SMALL_DRAFT)
    cascade, settings = LookupDraft(Peeking(draft), draft), DecodeSettings(gamma=3)
    assert sampled_text_p_value(cascade, settings) > 1e-3

    def by_position(seed, key, length, places, columns):
        return row_uniforms(seed, key, length + places).unfold(0, places, 1)[:length].transpose(1, 2)

    monkeypatch.setattr(block_loop, "block_uniforms", by_position)
    assert sampled_text_p_value(cascade, settings) < 1e-6
