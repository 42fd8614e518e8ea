"""The pages a person reads in an exported directory: README.md (model card) and SERVING.md. Pure: records in, text out.

`serving` is the directory's serving.json (see `distill.export.export`).
"""

import json
import shlex
from typing import Any

import yaml

from distill.export.engine import places
from distill.export.load_table import load_words
from distill.run.verdict_record import Interval, Verdict

LONGEST_SHOWN = 500  # characters of one provenance entry
NO_GAIN = (
    "No gain for certain: on the run's machine the target with this draft was not certainly faster than the target alone. "
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
    facts = provenance or {}
    target = serving["target"]["name"]
    base, licence = facts.get("base"), facts.get("license")
    data = _names(facts.get("data"))
    lines = [
        _front_matter(target, base, data, licence),
        f"# A draft model for `{target}`",
        "",
        (
            f"An independent draft for speculative decoding, distilled from the answers of `{target}` with Understudy. "
            "It is an ordinary causal language model with the target's tokenizer; how to serve it is in SERVING.md."
        ),
        "",
        f"- target: `{target}`",
        f"- base of the student: {f'`{base}`' if base else 'not recorded'}",
        f"- data: {', '.join(data) if data else 'not recorded'}",
        f"- parameters: {serving['draft']['parameters']:,} in {serving['draft']['dtype']}",
        (
            f"- licence: {licence or 'not recorded'}. Licence note: these weights derive from the base and were "
            "trained on the target's output; the licences of both, and of the prompts, apply."
        ),
        "",
        "## Verdict",
        "",
        *_verdict_lines(serving, verdict),
        "",
        "## How to reproduce",
        "",
        *_reproduction_lines(facts),
    ]
    return "\n".join(lines) + "\n"


def serving_page(serving: dict[str, Any]) -> str:
    """SERVING.md: for each engine whether it takes the pair, how it accepts, and the command."""
    target = shlex.quote(serving["target"]["name"])
    lines = [
        "# Serving this draft",
        "",
        f"For the target `{serving['target']['name']}`, at gamma {serving['gamma']} ({serving['gamma_source']}). Start here, in this directory:",
        "",
        "```bash",
        places('"$PWD"', target),
        "```",
        "",
        f"Vocabulary: {serving['vocabulary']['detail']}.",
    ]
    if serving["sampling"]:
        settings = json.dumps(serving["sampling"])
        lines += [
            "",
            f"Served at `{settings}`: a client that sets other values, or an engine without a flag for it, needs them in each request.",
        ]
    if serving["run"] is not None:
        names = {"target": "the target alone", "best": "this draft by itself", "best in int8": "this draft in 8 bits"}
        lines += [
            "",
            f"What to run for one request at a time, by the run's verdict: {names.get(serving['run'], serving['run'])}.",
        ]
    lines += _load_lines(serving)
    lines += [f"\n**Warning.** {warning}" for warning in serving["warnings"]]
    for name, engine in serving["engines"].items():
        verdict = "takes this pair" if engine["ok"] else "does NOT take this pair"
        lines += ["", f"## {name}: {verdict}", ""]
        lines += [f"- refused: {reason}" for reason in engine["reasons"]]
        lines += [f"- It {engine['rule_note']}."]
        lines += [f"- {note}" for note in engine["notes"]]
        lines += ["", f"```{engine['language']}", engine["command"], "```"]
    lines += ["", "## Others", "", *(f"- {line}" for line in serving["other_engines"])]
    read = ", ".join(f"{name} {engine['version']}" for name, engine in serving["engines"].items())
    lines += ["", f"As read in {read}. Of the commands those of vLLM and transformers are run by our tests."]
    return "\n".join(lines) + "\n"


def _load_lines(serving: dict[str, Any]) -> list[str]:
    ranges = serving["gamma_by_load"]
    if not ranges:
        return []
    lines = [
        "",
        f"The draft by itself, by number of concurrent requests, as measured where the run was judged: {load_words(ranges)}.",
    ]
    if serving["run_by_load"]:
        lines += ["", f"What was fastest there, prompt lookup and both together beside it: {serving['run_by_load']}."]
    return lines


def _front_matter(target: str, base: str | None, data: list[str], licence: str | None) -> str:
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "understudy"],
        "base_model": base or target,
        "target_model": target,
        "license": licence or "other",
    }
    if data:
        fields["datasets"] = data
    return "---\n" + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True) + "---\n"


def _verdict_lines(serving: dict[str, Any], verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return [NOT_MEASURED[0].upper() + NOT_MEASURED[1:]]
    lines = []
    if serving["gain"] is False:
        lines += [NO_GAIN.format(gamma=serving["gamma"]), ""]
    if verdict.sentence:
        lines += [verdict.sentence, ""]
    lines += [
        (
            f"Rule `{verdict.rule}`, gamma {verdict.gamma}, {verdict.prompts:,} held-out "
            f"prompts, {verdict.tokens:,} tokens. alpha is the acceptance rate per position, tau the "
            "tokens per target call with the corrected or bonus token counted; intervals are 95 %, over prompts."
        ),
        "",
        "| draft | step | alpha | tau | accepted / drafted | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    drafts = (
        ("undistilled baseline", verdict.baseline),
        ("served before", verdict.served),
        ("this draft", verdict.best),
    )
    for label, row in drafts:
        if row is not None:
            cells = [label, _number(row.step), _number(row.alpha) + _interval(row.alpha_ci)]
            cells += [_number(row.tau) + _interval(row.tau_ci)]
            cells += [_number(row.accepted_per_drafted), _number(row.tokens_per_second, 1)]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| the target alone | | | | | {_number(verdict.target_tokens_per_second, 1)} |")
    if verdict.paired is not None:
        gain = f"{verdict.paired.alpha_gain:+.3f}{_interval(verdict.paired.ci)}"
        lines += ["", f"Gain in alpha over the baseline, prompt by prompt: {gain}."]
    lines += ["", f"Gamma of the commands: {serving['gamma']}, {serving['gamma_source']}."]
    if verdict.replay:
        expected = ", ".join(f"{gamma}: {tau:.2f}" for gamma, tau in verdict.replay.items() if 1 <= gamma <= 16)
        lines += ["", f"tau by gamma, from replay of stored responses: {expected}."]
    return lines


def _reproduction_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    command = facts.get("command") or shlex.join(map(str, facts.get("argv") or []))
    if command:
        lines += ["```bash", str(command), "```", ""]
    rest = {key: _short(value) for key, value in facts.items() if key not in ("command", "argv")}
    if rest:
        lines += ["```json", json.dumps(rest, indent=2, default=str, ensure_ascii=False), "```"]
    return lines or ["Not recorded."]


def _short(value: Any) -> Any:
    """A whole config would bury the card."""
    return "see provenance.json" if isinstance(value, str) and len(value) > LONGEST_SHOWN else value


def _names(data: Any) -> list[str]:
    if data is None:
        return []
    return [data] if isinstance(data, str) else [str(name) for name in data]


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "not measured"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def _interval(bounds: Interval | None) -> str:
    return "" if bounds is None else f" [{bounds[0]:.3f}, {bounds[1]:.3f}]"
