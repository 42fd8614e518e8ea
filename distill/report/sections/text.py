"""Sections on the text: repetition, losslessness and task scores, and a few held-out responses with the model that wrote each token."""

from collections import Counter

from distill.report.section import Content, Piece, say, section
from distill.report.sections.slices import CONTROL_SIGNS, prompts_of
from distill.report.table import Cell, Column, Table
from distill.report.view import View


@section("repetition", "How much of the text repeats", order=75)
def repetition(view: View) -> Content:
    """Repeated and looping shares, whole and by domain."""
    found = view.verdict.repetition
    if found is None:
        return None
    parts = {"all": found, **(found.by_domain if len(found.by_domain) > 1 else {})}
    table = Table(["text", Column("repeated", ".1%"), Column("looping", ".1%"), Column("tokens", ",")])
    for name, part in parts.items():
        tokens = view.verdict.tokens if part.tokens is None else part.tokens
        table.add(name, Cell(part.repeated, bar=part.repeated), Cell(part.looping, bar=part.looping), tokens)
    return [*say("repetition"), table]


@section("proofs", "Is the text still the target's?", order=78)
def proofs(view: View) -> Content:
    """Losslessness and task scores, if `understudy evaluate` added them."""
    test, scores = view.result.losslessness, view.result.scores
    if test is None and not scores:
        return None
    table = Table(
        ["scorer", Column("with the draft", ".3f"), Column("target alone", ".3f"), Column("difference", "+.3f")],
        title="Task scores",
    )
    for score in scores:
        note = f"{prompts_of(score.prompts)} x {score.samples}"
        table.add(
            Cell(score.scorer, note=note, mark="" if score.passed else "differs"),
            Cell(score.speculative.score, score.speculative.ci),
            Cell(score.alone.score, score.alone.ci),
            Cell(score.difference.value, score.difference.ci),
        )
    return [*say("proofs", test, scores), *([table] if scores else [])]


OPEN_RESPONSES = 2  # the others are folded
SHOWN_OF_TOKEN = {"text", "id", "by", "block", "target_prob", "draft_prob", "target_top", "draft_top"}


def token_text(text: str) -> str:
    """A token in running text: a newline is shown as a sign and also breaks the line; other control characters become signs."""
    return text.translate(CONTROL_SIGNS | {ord("\n"): "↵\n", ord("\t"): "⇥\t"}) or "∅"


@section("tokens", "Who wrote each token", order=90, nav="Tokens")
def tokens(view: View) -> Content:
    """The token view. Both models' most probable tokens are in the page's data."""
    shown = view.result.token_view
    if shown is None:
        return "There is no token view: nothing was decoded live."
    written = [Counter(token.by for token in response.tokens) for response in shown.responses]
    values = {
        "written": sum(written, Counter()),
        "responses": list(zip(shown.responses, written, strict=True)),
        "open": OPEN_RESPONSES,
        "data": [
            [token.model_dump(include=SHOWN_OF_TOKEN) for token in response.tokens] for response in shown.responses
        ],
    }
    return [*say("tokens", shown), Piece("tokens", values)]
