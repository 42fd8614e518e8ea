"""Scores with and without the draft: the hook, the built-in scorers, the intervals, and the check end to end."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from tiny_models import perturbed
from tiny_training import TOKENS, forget_accelerators, tiny_tokenizer, write_target

from data.responses.rendered import RenderedPrompt
from distill.commands.evaluate import scores as module
from distill.commands.evaluate.proofs import lossless_lines, losslessness
from distill.commands.evaluate.scores import Asked, score_lines, task_scores
from distill.config.load import parse_config
from distill.run.result import ScoreDifference
from distill.verdict.scorer import (
    BUILT_IN,
    exact_match,
    exact_match_number,
    load_scorer,
    read_references,
    score_texts,
    summarise,
)
from speculative.decoder import decision
from speculative.decoder.responses import Response
from speculative.errors import UserError
from speculative.explain.losslessness import sampled_texts
from speculative.rules.rule import Rule


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folder with a target, a draft that mostly agrees, and twelve prompts with references."""
    folder = tmp_path_factory.mktemp("scores")
    target = write_target(folder / "target")
    perturbed(target, 0.1).save_pretrained(folder / "draft")
    tiny_tokenizer().save_pretrained(folder / "draft")
    rows = [{"prompt": f"What is {n} + 4?", "answer": f"It is so.\n#### {n + 4}"} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder, temperature=1.0, **source):
    forget_accelerators()
    own = {"path": str(folder / "prompts.jsonl"), "reference_column": "answer", **source}
    tree = {
        "name": "run",
        "output": str(folder),
        "target": {"path": str(folder / "target")},
        "data": {"train": [{"path": "unused.jsonl"}], "heldout": [own], "template": {"mode": "plain"}},
        "serving": {"temperature": temperature, "max_tokens": 16},
        "judge": {"every": 2},
    }
    # Sources of training prompts are read too: give the same file.
    tree["data"]["train"] = [{**own, "path": str(folder / "train.jsonl")}]
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "Say something.", "answer": "1"}) + "\n")
    return parse_config(tree, "test")


def asked_of(folder, rule="sample", gamma=3, temperature=1.0, draft=None, reference_column="answer", **own):
    config = config_of(folder, temperature, reference_column=reference_column)
    return Asked(config, str(draft or folder / "draft"), Rule.named(rule), gamma, **own)


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("so 3 + 4 = 7.", "3 and 4 make\n#### 7", 1.0),
        ("the answer is 1,234.50 dollars", "#### 1234.5", 1.0),
        ("it is -5", "#### -5", 1.0),
        ("between 3-2", "2", 1.0),
        ("7, or rather 8", "#### 7", 0.0),
        ("no idea", "#### 7", 0.0),
        ("9", "6 and then 9", 1.0),
        ("7", "5 + 2 = 7 #### 7 (of 12)", 1.0),
    ],
)
def test_exact_match_number_reads_gsm8k_answers(response, reference, score):
    assert exact_match_number("", response, reference) == score


def test_exact_match_is_of_words():
    assert exact_match("", " a  b\n", "a b") == 1.0
    assert exact_match("", "a c", "a b") == 0.0


def test_a_scorer_is_found_in_a_module_and_in_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(prompt, response, reference):\n    return 0.5\n")
    assert load_scorer(f"{file}:score")("", "", None) == 0.5
    assert load_scorer("distill.verdict.scorer:exact_match") is exact_match
    assert load_scorer("exact-match-number") is exact_match_number


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gsm8k", None, "give module:function, file.py:function, or exact-match or exact-match-number"),
        ("no_such_room:score", None, "no_such_room cannot be imported (ModuleNotFoundError"),
        ("gone.py:score", None, "gone.py cannot be imported (FileNotFoundError"),
        ("mine.py:score", "def score(:", "cannot be imported (SyntaxError"),
        ("mine.py:score", "import sys\n1 / 0", "cannot be imported (ZeroDivisionError"),
        ("mine.py:score", "def scores(): ...", "has no function 'score'; it has scores"),
    ],
)
def test_a_scorer_that_cannot_be_had_is_refused_by_name(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    said = refused(load_scorer, name)
    assert message in said
    assert name in said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "gave nan on prompt key"),
        (float("inf"), "gave inf"),
        (1.5, "gave 1.5"),
        (-0.1, "gave -0.1"),
        ("1", "gave '1'"),
        (None, "gave None"),
        (ValueError("bad\nday"), "raised ValueError: bad on prompt key"),
    ],
)
def test_a_scorer_that_gives_no_score_is_named(value, message):
    def scorer(prompt, response, reference):
        if isinstance(value, Exception):
            raise value
        return value

    texts = [Response("key", [5, 6], response_ids=[40, 41])]
    prompts = [RenderedPrompt("key", "d", (5, 6), "hi")]
    said = refused(score_texts, "mine:score", scorer, tiny_tokenizer(), prompts, texts, {})
    assert f"scorer mine:score: {message}" in said


def test_every_response_is_scored_with_its_own_prompt_and_reference():
    seen = []

    def scorer(prompt, response, reference):
        seen.append((prompt, response, reference))
        return np.float32(len(seen) % 2)

    tokenizer = tiny_tokenizer()
    prompts = [RenderedPrompt(f"id-{n}", "d", (5,), f"text {n}") for n in range(2)]
    ids = [tokenizer(text).input_ids for text in ("a", "b", "c", "d")]
    texts = [Response("k", [5], response_ids=own) for own in ids]
    scores = score_texts("s", scorer, tokenizer, prompts, texts, {"id-0": "by id", "text 1": "by text"})
    assert seen == [
        ("text 0", "a", "by id"),
        ("text 0", "b", "by id"),
        ("text 1", "c", "by text"),
        ("text 1", "d", "by text"),
    ]
    assert scores.tolist() == [[1, 0], [1, 0]]


def test_the_paired_difference_is_tighter_than_two_scores():
    generator = np.random.default_rng(1)
    easy_P1 = generator.random((80, 1))
    speculative, alone = ((generator.random((80, 8)) < easy_P1).astype(float) for _ in range(2))
    found = summarise(speculative, alone)
    assert found.difference.value == pytest.approx(speculative.mean() - alone.mean())
    assert found.speculative.score == pytest.approx(speculative.mean())
    low, high = found.difference.ci
    assert low < 0 < high
    assert high - low < 0.8 * (found.alone.ci[1] - found.alone.ci[0])
    wide = summarise(speculative, alone, 0.999).difference.ci
    assert wide[0] < low
    assert wide[1] > high


def test_prompts_that_all_agree_do_not_make_certainty():
    found = summarise(np.zeros((30, 2)), np.zeros((30, 2)))
    unseen = 1 - 0.05 ** (1 / 30)
    assert (found.alone.score, found.alone.ci) == (0.0, (0.0, pytest.approx(unseen)))
    assert found.difference.ci == (pytest.approx(-unseen), pytest.approx(unseen))


def test_references_are_read_from_a_file(tmp_path):
    file = tmp_path / "references.jsonl"
    file.write_text('{"prompt": "a", "reference": "1"}\n\n{"id": "b", "reference": "2"}\n')
    assert read_references(file) == {"a": "1", "b": "2"}
    file.write_text('{"prompt": "a", "reference": 1}\n')
    with pytest.raises(UserError, match=r"references\.jsonl:1: each line needs"):
        read_references(file)
    with pytest.raises(UserError, match=r"--references .* cannot be read"):
        read_references(tmp_path / "none.jsonl")


def test_greedy_texts_are_the_same_so_the_scores_are_equal(pair):
    found = task_scores(asked_of(pair, "greedy", temperature=0.0), f"{__file__}:mean_of_characters")
    assert found.passed
    assert found.same_texts == found.prompts == found.with_reference == 12
    assert (found.difference.value, found.difference.ci) == (0.0, (0.0, 0.0))
    assert found.speculative == found.alone
    assert 0 < found.alone.score < 1
    assert "all 12 texts are the same, token by token" in found.sentence
    assert score_lines(found)[-1] == found.sentence
    json.dumps(found.record(), allow_nan=False)


def mean_of_characters(prompt, response, reference):
    """A score that depends on every character."""
    return sum(ord(letter) % 7 for letter in response) / max(1, 6 * len(response))


def test_sampled_scores_differ_by_chance_only(pair, monkeypatch):
    seeds = []

    def watched(target, drafter, prompts, settings, samples, *, batch_size):
        seeds.append(settings.seed)
        return sampled_texts(target, drafter, prompts, settings, samples, batch_size=batch_size)

    monkeypatch.setattr(module, "sampled_texts", watched)
    found = task_scores(asked_of(pair, samples=8), f"{__file__}:mean_of_characters")
    assert found.passed
    assert len(set(seeds)) == 2, "the two sides share no coins"
    assert found.same_texts < 5
    low, high = found.difference.ci
    assert low < 0 < high
    assert found.difference_ci_wide[0] < low
    assert "No difference found" in found.sentence


def test_a_decoder_that_accepts_everything_changes_the_score(pair, monkeypatch, blocks_in_python):
    """The check can fail: of a draft that says nothing but digits, everything is accepted."""
    honest = decision.verify

    def gullible(target_probs, ids, draft_probs, coins, uniforms, drafted, **lossy):
        return honest(target_probs, ids.fill_(20), None, coins.fill_(-1.0), uniforms, drafted, **lossy)

    monkeypatch.setattr(decision, "verify", gullible)
    found = task_scores(asked_of(pair, samples=2), f"{__file__}:share_of_twenty")
    assert not found.passed
    assert "The scores DIFFER" in found.sentence


def test_the_scorer_of_an_lm_eval_task_reads_its_document_back(tmp_path, monkeypatch, capsys):
    """The example of docs/verdict.md, with a task that stands in for lm-eval's."""

    class Task:
        def test_docs(self):
            return [{"question": "1 + 1", "answer": "2"}]

        def doc_to_text(self, doc):
            return f"Question: {doc['question']}"

        def process_results(self, doc, results):
            return {"exact_match": float(doc["answer"] == results[0])}

    tasks = SimpleNamespace(TaskManager=object, get_task_dict=lambda names, manager: {"gsm8k": Task()})
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(tasks=tasks))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    file, references = tmp_path / "gsm8k.py", tmp_path / "gsm8k.jsonl"
    page = Path(__file__).parents[3] / "docs" / "verdict.md"
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "lm_eval" in block)
    file.write_text(code)
    runpy.run_path(str(file), run_name="__main__")
    references.write_text(capsys.readouterr().out)
    scorer = load_scorer(f"{file}:score")
    assert capsys.readouterr().out == "", "reading the scorer writes no references"
    found = read_references(references)
    assert list(found) == ["Question: 1 + 1"]
    scores = [scorer("Question: 1 + 1", response, found["Question: 1 + 1"]) for response in ("2", "3")]
    assert scores == [1.0, 0.0]


def test_few_prompts_do_not_fail_the_check():
    """Ten prompts agree by luck once in 512, more often than one false alarm in a thousand uses."""
    for prompts, said in ((10, "Not certain: "), (11, "The scores DIFFER: ")):
        difference = ScoreDifference(value=-0.5, ci=(-0.6, -0.4))
        passed, sentence = module._sampled_answer(difference, (-0.7, -0.3), prompts, 2)
        assert passed == (prompts == 10)
        assert sentence.startswith(said)
        assert ("10 prompts are too few to be certain; give at least 11" in sentence) == (prompts == 10)


def share_of_twenty(prompt, response, reference):
    """How much of the text is token 20."""
    wanted = tiny_tokenizer().decode([20])
    return min(1.0, response.count(wanted) / max(1, len(response)))


def test_a_scorer_that_draws_lots_is_refused(pair, monkeypatch):
    generator = np.random.default_rng(0)
    monkeypatch.setitem(BUILT_IN, "lots", lambda *_: generator.random())
    with pytest.raises(UserError, match="two scores on prompt"):
        task_scores(asked_of(pair, "greedy", temperature=0.0), "lots")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"reference_column": None}, "raised ValueError: there is no reference: set reference_column"),
        ({"temperature": 0.0, "rule": "greedy", "samples": 4}, "4 samples: at temperature 0"),
        ({"temperature": 0.0}, "--rule sample samples from the target"),
    ],
)
def test_what_cannot_be_scored_is_refused(pair, own, message):
    with pytest.raises(UserError, match=message):
        task_scores(asked_of(pair, **own), "exact-match")


def test_the_losslessness_of_a_config_is_checked_and_read_aloud(pair):
    found = losslessness(asked_of(pair, prompts=6, samples=8))
    assert not found.failed, found.sentence
    assert (found.sampled.prompts, found.sampled.samples, found.dtype) == (6, 8, "float32")
    lines = lossless_lines(found)
    assert lines[0].startswith("greedy text       6 of 6 prompts equal")
    assert lines[-1] == found.sentence
    assert "at most about once in 1,000 uses" in lines[-2]


def test_a_draft_with_a_mask_token_is_tested_in_one_pass_a_block(pair, tmp_path):
    marked = shutil.copytree(pair / "draft", tmp_path / "marked")
    own = json.loads((marked / "config.json").read_text())
    (marked / "config.json").write_text(json.dumps(own | {"pard_token": TOKENS - 1}))
    asked = asked_of(pair, "greedy", temperature=0.0, prompts=6, draft=marked)
    greedy = losslessness(asked)
    assert not greedy.failed
    assert len(lossless_lines(greedy)) == 2
    forget_accelerators()
    found = task_scores(asked, f"{__file__}:mean_of_characters")
    assert found.passed
    assert found.same_texts == 6
