"""The two pages of an exported directory: README.md (the model card) and SERVING.md. Pure functions from records to text.

`serving` is the content of serving.json (see `distill.export.export`). The text is in distill/export/templates.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from distill.engines.protocol.facts import EngineFacts
from distill.engines.protocol.verdict import environment, place_of, places
from distill.models.files.gguf import GGUF
from distill.models.load import EMBEDDED, without_folders
from distill.report.measured import ways_tables
from distill.run.verdict_record import Verdict

TEMPLATES = Path(__file__).with_name("templates")
LONGEST_SHOWN = 500  # characters of one provenance entry
NO_GAIN = (
    "No certain gain: in the engine that the run timed, or else in Understudy's decoder, the draft by itself is not certainly faster than "
    "the target alone. "
    "The commands still use gamma {gamma}."
)
NOT_MEASURED = "not measured: this export has no verdict. Run `understudy evaluate` on it before you serve it."


def model_card(serving: dict[str, Any], verdict: Verdict | None, provenance: dict[str, Any] | None) -> str:
    """Return README.md of the exported directory: YAML front matter for the hub, the verdict, how to reproduce it.

    Of the provenance, `base`, `data` (a name or a list), `license` and `command` (or `argv`) have their own lines; the rest is shown as
    JSON. ``verdict``: None if nothing was measured.
    """
    facts = {"base": None, "license": None} | (provenance or {})
    named = facts.get("data") or []
    data = [named] if isinstance(named, str) else [str(name) for name in named]
    recorded = {key: value for key, value in (provenance or {}).items() if key not in ("command", "argv")}
    # Long strings such as a whole config would fill the card.
    long = [key for key, value in recorded.items() if isinstance(value, str) and len(value) > LONGEST_SHOWN]
    recorded |= dict.fromkeys(long, "see provenance.json")
    record = without_folders(json.dumps(recorded, indent=2, default=str, ensure_ascii=False)) if recorded else ""
    page = environment(TEMPLATES).get_template("README.md.j2")
    return page.render(
        serving=serving,
        verdict=verdict,
        facts=facts,
        front=_front_matter(serving, facts, data),
        data=data,
        tables=[table.markdown() for table in ways_tables(verdict)] if verdict else [],
        no_gain=NO_GAIN.format(gamma=serving["gamma"]),
        not_measured=NOT_MEASURED,
        command=facts.get("command") or shlex.join(map(str, facts.get("argv") or [])),
        recorded=record,
    )


def serving_page(serving: dict[str, Any]) -> str:
    """Return SERVING.md: for each engine whether it supports the pair, its acceptance rule, and the command."""
    timed = serving["facts"].get("timed_in")
    page = environment(TEMPLATES).get_template("SERVING.md.j2")
    return page.render(
        serving=serving,
        places=places('"$PWD"', _place(serving["target"]["name"], serving["facts"]["revision"])),
        by_load=EngineFacts.load_words(serving["gamma_by_load"]),
        own_by_load=EngineFacts.load_words(timed.by_load) if timed else "",
    )


def _place(target: str, revision: str | None) -> str:
    """Return the target as a shell word; a directory or file gets a comment, since its path differs on each machine."""
    if target == EMBEDDED:
        return "\"$(python -c 'import distill.models as here; print(*here.__path__)')/embedded\""
    kind = "file" if target.endswith(GGUF) else "directory"
    return place_of(target, revision) + ("" if "/" in target else f"  # change to the target's {kind} on this machine")


def _front_matter(serving: dict[str, Any], facts: dict[str, Any], data: list[str]) -> str:
    target = serving["target"]["name"]
    names = facts.get("hub") or {"base": facts["base"] or target, "data": data}
    card = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "understudy"],
        base_model=names["base"],
        target_model=target,
        license=facts["license"] or "other",
        datasets=names["data"] or None,
    )
    return f"{card.to_yaml()}\n"
