"""Drafters by the names of their ways to decode."""

import pytest
from refusals import refused
from tiny_models import VOCAB, generated, perturbed, prompts_of, texts, tiny_model

from speculative.decode import decode
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import Draft
from speculative.drafters.registry import Parts, make_drafter, registered
from speculative.drafters.retrieval import Datastore
from speculative.rules.sampling import GREEDY

TARGET = tiny_model(num_hidden_layers=3)
PARTS = Parts(TARGET, Draft(perturbed(TARGET)).drafter, Datastore.build([[1, 2, 3, 4]], VOCAB), ngrams=(3, 2))
WAYS = {"draft", "token tree", "prompt lookup", "past responses", "lookup + draft", "early exit", "lookahead"}
WAYS |= {"adaptive draft", "adaptive lookup + draft"}


def test_every_way_is_registered() -> None:
    assert registered().keys() == WAYS


@pytest.mark.parametrize("name", sorted(WAYS))
def test_each_decodes_the_targets_text(name: str) -> None:
    own = registered()[name]
    settings = DecodeSettings(GREEDY, 3, "greedy", max_tokens=12, tree=own.tree)
    policy, prompts = own.policy(3) if own.policy else None, prompts_of([5, 9])
    found = decode(TARGET, make_drafter(name, PARTS), prompts, settings, policy=policy)[0]
    assert texts(found) == generated(TARGET, prompts, 12)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("draft", "needs a draft model"),
        ("lookup + draft", "needs a draft model"),
        ("past responses", "needs a datastore"),
        ("beam", "unknown drafter 'beam': must be one of adaptive draft, adaptive lookup + draft, draft, early exit, "),
    ],
)
def test_what_is_missing_is_said_in_one_line(name: str, said: str) -> None:
    assert said in refused(lambda: make_drafter(name, Parts(TARGET)))
