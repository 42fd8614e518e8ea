"""A few held-out responses token by token, with the model that wrote each token."""

from collections import Counter

from distill.report.section import Content, Piece, section
from distill.report.sections.slices import CONTROL_SIGNS
from distill.report.sentences import say
from distill.report.view import View

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
