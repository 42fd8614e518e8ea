"""The pages a person reads in an exported directory: README.md (model card) and SERVING.md. Pure: records in, text out.

`serving` is the directory's serving.json (see `distill.export.export`); the pages' texts are the templates beside this file.
"""

import json
import shlex
from typing import Any

import yaml

from distill.export.engine import environment, places
from distill.export.load_table import load_words
from distill.models.load import EMBEDDED, without_folders
from distill.report.measured import ways_tables
from distill.run.verdict_record import Verdict

LONGEST_SHOWN = 500  # characters of one provenance entry
NO_GAIN = (
    "No gain for certain: on the run's machine the target with this draft by itself was not certainly faster than the target alone. "
    "The commands use gamma {gamma} all the same."
)
NOT_MEASURED = "not measured: this export carries no verdict; run `understudy evaluate` on it before serving it."


def model_card(serving: dict[str, Any], verdict: Verdict | None, provenance: dict[str, Any] | None) -> str:
    """README.md of the exported directory: YAML front matter for the hub, then the verdict and how to reproduce it.

    Args:
        serving: the directory's `serving.json`.
        verdict: the run's, or None when nothing was measured.
        provenance: what the run wrote about itself; `base`, `data` (name or list), `license`, `command` (or
            `argv`) are shown by name and the rest as it is.

    """
    facts = {"base": None, "license": None} | (provenance or {})
    named = facts.get("data") or []
    data = [named] if isinstance(named, str) else [str(name) for name in named]
    recorded = {key: _short(value) for key, value in (provenance or {}).items() if key not in ("command", "argv")}
    return (
        environment()
        .get_template("README.md.j2")
        .render(
            serving=serving,
            verdict=verdict,
            facts=facts,
            front=_front_matter(serving["target"]["name"], facts, data),
            data=data,
            tables=[table.markdown() for table in ways_tables(verdict)] if verdict else [],
            no_gain=NO_GAIN.format(gamma=serving["gamma"]),
            not_measured=NOT_MEASURED,
            command=facts.get("command") or shlex.join(map(str, facts.get("argv") or [])),
            recorded=without_folders(json.dumps(recorded, indent=2, default=str, ensure_ascii=False))
            if recorded
            else "",
        )
    )


def serving_page(serving: dict[str, Any]) -> str:
    """SERVING.md: for each engine whether it takes the pair, how it accepts, and the command."""
    return (
        environment()
        .get_template("SERVING.md.j2")
        .render(
            serving=serving,
            places=places('"$PWD"', _place(serving["target"]["name"])),
            by_load=load_words(serving["gamma_by_load"]),
        )
    )


def _place(target: str) -> str:
    """A shell word for where the target is; a directory lies elsewhere on each machine."""
    if target == EMBEDDED:
        return "\"$(python -c 'import distill.models as here; print(*here.__path__)')/embedded\""
    return shlex.quote(target) + ("" if "/" in target else "  # its directory on this machine")


def _front_matter(target: str, facts: dict[str, Any], data: list[str]) -> str:
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "understudy"],
        "base_model": facts["base"] or target,
        "target_model": target,
        "license": facts["license"] or "other",
    }
    return yaml.safe_dump(fields | ({"datasets": data} if data else {}), sort_keys=False, allow_unicode=True)


def _short(value: Any) -> Any:
    """A whole config would bury the card."""
    return "see provenance.json" if isinstance(value, str) and len(value) > LONGEST_SHOWN else value
