"""Every sentence of a report, from templates/sentences.j2: facts in, plain text out. The page escapes it, a terminal prints it."""

import functools
import re
from pathlib import Path
from typing import Any

import jinja2

from distill.run.readback_record import SERVED_TEXT
from distill.run.verdict_record import WAYS
from speculative.measure.effects import words
from speculative.measure.replay import WORRYING_Z, agreement_words

TEMPLATES = Path(__file__).parent / "templates"


def say(name: str, *facts: Any) -> list[str]:
    """The paragraphs of a macro of sentences.j2, which blank lines separate; none if it has nothing to say about these facts."""
    text = str(getattr(_macros(), name)(*facts))
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def glossary() -> dict[str, str]:
    """Word -> meaning."""
    return dict(_macros().GLOSSARY)


@functools.cache
def _macros() -> Any:
    # The text is no markup; whoever shows it escapes it.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["f"] = format
    environment.globals |= {"words": words, "agreement_words": agreement_words, "WAYS": WAYS}
    environment.globals |= {"WORRYING_Z": WORRYING_Z, "SERVED_TEXT": SERVED_TEXT}
    return environment.get_template("sentences.j2").module
