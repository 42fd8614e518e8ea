"""What the rules, the drafters and the decoder refuse, each in one line that names the value."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from host_rows import repeating_prompts
from refusals import refused
from tiny_models import VOCAB, perturbed, tiny_model

from speculative.decode import decode, generate
from speculative.decoder.responses import DecodeSettings
from speculative.drafters.draft import ParallelDrafter
from speculative.drafters.drafter import ModelDrafter
from speculative.drafters.early_exit import EarlyExit
from speculative.drafters.gamma import AdaptiveGamma, FixedGamma
from speculative.drafters.lookup import Lookahead, PromptLookup
from speculative.drafters.lookup_draft import LookupDraft
from speculative.drafters.past_responses import PastResponses, ResponseIndex
from speculative.drafters.registry import Parts, recipes
from speculative.measure.token_scores import score_tokens
from speculative.rules.processors import LogitsRules
from speculative.rules.rule import Rule
from speculative.rules.sampling import GREEDY, SamplingSettings
from speculative.rules.tree import MAX_NODES, TokenTree
from speculative.rules.verify import draft_settings_for

TARGET = tiny_model()
DRAFTER = ModelDrafter(perturbed(TARGET))
GREEDILY = DecodeSettings(GREEDY, 2, Rule.named("greedy"), max_tokens=10)
WARM, BLOCK, LENIENT = SamplingSettings(0.9), Rule.named("block"), Rule.named("sample").lenient(2.0)
TREE = TokenTree.from_branching((2, 1, 1))
FINE = [("fine", [1])]
MARKED = tiny_model("lfm2", layer_types=["conv", "full_attention"])
MARKED.config.pard_token = 3
Refusal = tuple[Callable[[], Any], str]


def settings(message: str, **wrong: Any) -> Refusal:
    return lambda: DecodeSettings(**{"sampling": GREEDY, "gamma": 3, **wrong}), message


def decoding(message: str, prompts: Any = FINE, drafter: Any = DRAFTER, asked: Any = GREEDILY, **how: Any) -> Refusal:
    return lambda: list(generate(TARGET, drafter, prompts, asked, **how)), message


def logits_rules(message: str, **wrong: Any) -> Refusal:
    return lambda: LogitsRules(**wrong), message


def unknown_ids(message: str, **wrong: Any) -> Refusal:
    return lambda: LogitsRules(**wrong).check(VOCAB), message


def index(message: str, responses: list[list[int]], **sizes: int) -> Refusal:
    return lambda: ResponseIndex.build(responses, 4, **sizes), message


SETTINGS = [
    settings("gamma", gamma=-1),
    settings("gamma", gamma="3"),
    settings("max_tokens", max_tokens=0),
    settings("max_tokens", max_tokens=5.0),
    settings("eos_ids", eos_ids=2),
    settings("stop", stop="abc"),
    settings("stop has '': every stop string needs at least one character", stop=("",)),
    settings("stop has 3", stop=("a", 3)),
    settings("seed", seed=None),
    settings("min_tokens", min_tokens=500),
    settings("depth 3", gamma=2, tree=TREE),
    settings("does not support token trees", sampling=WARM, rule=BLOCK, tree=TREE),
    settings("does not support token trees", sampling=WARM, rule=LENIENT, tree=TREE),
    settings("use a chain", tree=TREE, rules=LogitsRules(2.0)),
    settings("temperature 0", rule=BLOCK),
]
DECODING = [
    decoding("'empty' is empty", [("empty", [])]),
    decoding(r"'strange' has token id 50 but the target knows ids 0\.\.49", [("strange", [1, VOCAB])]),
    decoding(r"'long' has 250 tokens; with max_tokens = 10 .* context of 256", [("long", [1] * 250)]),
    decoding("context of 32 of the draft", [("long", [1] * 30)], ModelDrafter(tiny_model(max_position_embeddings=32))),
    decoding("has logits for 40 token ids and the target for 50", FINE, ModelDrafter(tiny_model(vocab_size=40))),
    decoding("gamma = 2 needs a draft", FINE, None),
    decoding("LlamaForCausalLM is not a drafter: give ModelDrafter", FINE, TARGET),
    *(decoding("give pairs", [prompt]) for prompt in ("hello", [1, 2, 3], ("a", "hello"))),
    decoding("stop strings need the tokenizer", asked=DecodeSettings(GREEDY, stop=("x",))),
    decoding("batch_size = 0", batch_size=0),
    decoding("runner = 'fast': must be one of auto, eager, compile, graph", runner="fast"),
    decoding("needs a CUDA device", runner="graph"),
    decoding("but gamma = 2", policy=AdaptiveGamma(9)),
    decoding("a fixed gamma, its depth", asked=DecodeSettings(GREEDY, 3, tree=TREE), policy=AdaptiveGamma(3)),
    decoding(r"FixedGamma\(3\)", asked=DecodeSettings(GREEDY, 3, tree=TREE), policy=FixedGamma(1)),
    decoding(
        "built for a vocabulary of 49 token ids but the target has 50",
        repeating_prompts(1),
        PastResponses(ResponseIndex.build([[1, 2, 3]], VOCAB - 1)),
    ),
]
RULES = [
    (lambda: SamplingSettings(-1.0), "temperature"),
    (lambda: SamplingSettings(math.nan), "temperature"),
    (lambda: SamplingSettings(1e-40), "at least 1e-30"),
    (lambda: SamplingSettings(top_k=-1), "top_k"),
    (lambda: SamplingSettings(top_p=0.0), "top_p"),
    (lambda: SamplingSettings(min_p=1.5), "min_p"),
    (lambda: draft_settings_for(Rule.named("greedy"), WARM), "greedy-draft"),
    (lambda: Rule.named("argmax"), "argmax"),
    (lambda: Rule.named("sample").lenient(0.9), "must be at least 1"),
    (lambda: Rule.named("sample").lenient(math.inf), "must be at least 1"),
    logits_rules("repetition_penalty = 0.0: must be a positive number", repetition_penalty=0.0),
    logits_rules("repetition_penalty = nan", repetition_penalty=math.nan),
    logits_rules("repetition_penalty = inf", repetition_penalty=math.inf),
    logits_rules("repetition_penalty = '2'", repetition_penalty="2"),
    logits_rules("min_tokens = -1", min_tokens=-1),
    logits_rules("min_tokens = 1.5", min_tokens=1.5),
    logits_rules("allowed_ids has -2: token ids start at 0", allowed_ids=(1, -2)),
    logits_rules(r"banned_ids = \('a',\): must be a list of token ids", banned_ids=("a",)),
    logits_rules("eos_ids = 3: must be a list", eos_ids=3),
    logits_rules(r"token id 1 is inf: must be finite \(use banned_ids to forbid a token\)", bias=((1, math.inf),)),
    logits_rules("bias has token id 1 more than once", bias=((1, 2.0), (4, 1.0), (1, 3.0))),
    logits_rules("bias has -1", bias=((-1, 2.0),)),
    logits_rules(r"must be a list of \(token id, number\) pairs", bias=(1, 2.0)),
    logits_rules(r"must be a list of \(token id, number\) pairs", bias=((1, "much"),)),
    logits_rules("banned_ids forbids every allowed token", allowed_ids=(1, 2), banned_ids=(2, 1)),
    logits_rules("min_tokens = 3 forbids the end tokens", allowed_ids=(1, 2), min_tokens=3, eos_ids=(1, 2)),
    unknown_ids(r"bias has token id 50 but the model knows ids 0\.\.49", bias=((1, 1.0), (50, 1.0))),
    unknown_ids("allowed_ids has token id 50", allowed_ids=(50, 1)),
    unknown_ids("every allowed token", banned_ids=tuple(range(VOCAB))),
    unknown_ids("min_tokens = 1", banned_ids=tuple(range(1, VOCAB)), min_tokens=1, eos_ids=(0,)),
    (lambda: TokenTree(()), "0 nodes"),
    (lambda: TokenTree((0,) * (MAX_NODES + 1)), "1025 nodes"),
    (lambda: TokenTree((0, 2)), "node 2 .* parent 2"),
    (lambda: TokenTree((0, -1)), "node 2 .* parent -1"),
    (lambda: TokenTree((0, 0.5)), r"node 2 .* parent 0\.5"),
    (lambda: TokenTree((0, 1, 0)), "level by level"),
    *(
        (lambda branching=branching: TokenTree.from_branching(branching), "token tree")
        for branching in ((), (2, 0), (2, -1), (1.5,), ("3",), (10, 10, 10, 10), (2,) * 64)
    ),
]
DRAFTERS = [
    (lambda: AdaptiveGamma(0), "max_gamma = 0: must be at least 1"),
    (lambda: PromptLookup(0, 0), "must be 1 <= min_ngram <= max_ngram"),
    (lambda: PromptLookup(2, 3), "must be 1 <= min_ngram <= max_ngram"),
    (lambda: Lookahead(1), "ngram = 1: must be at least 2"),
    (lambda: LookupDraft(DRAFTER, PromptLookup()), "the draft always proposes, .* swap the two"),
    (lambda: LookupDraft(Lookahead(), PromptLookup()), "the lookahead pool always proposes"),
    (lambda: LookupDraft(PromptLookup(), Lookahead(), then_gamma=0), "then_gamma = 0"),
    (lambda: EarlyExit(TARGET, 2), r"must be 1\.\.1"),
    (lambda: ParallelDrafter(TARGET), "has no mask token"),
    (
        lambda: score_tokens(TARGET, decode(TARGET, None, FINE, GREEDILY.under(GREEDILY.rule, 0))[0], WARM, offsets=3),
        "no mask",
    ),
    (lambda: ParallelDrafter(MARKED), "recurrent state"),
    (lambda: recipes()["draft"].drafter(Parts(TARGET)), "draft needs a draft model"),
    (lambda: recipes()["past-responses"].drafter(Parts(TARGET)), "past-responses needs past responses"),
    index("would be empty", []),
    index("would be empty", [[], []]),
    index("the responses of the index have token id 4 but vocab_size is 4", [[1, 2], [1, 4]]),
    index("token id -7", [[1, -7, 2]]),
    index("no response .* longer than min_ngram = 1", [[1], [2]]),
    index("min_ngram <= max_ngram", [[1, 2]], min_ngram=3, max_ngram=2),
]


@pytest.mark.parametrize(("make", "message"), [*SETTINGS, *DECODING, *RULES, *DRAFTERS])
def test_what_makes_no_sense_is_refused_in_one_line(make: Callable[[], Any], message: str) -> None:
    assert re.search(message, refused(make))
