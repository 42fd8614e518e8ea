"""A result as one HTML file that needs no network: templates/report.html.j2 with the registered sections, style and script inlined.

Text of models and prompts is untrusted: jinja2 escapes it, and a content security policy allows only the page's own script and no
network requests.
"""

import base64
import hashlib
import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from data.files import write_bytes, writing
from distill.config.layout import REPORT, RESULT
from distill.engines.protocol.verdict import environment
from distill.report import sections
from distill.report.figures import figures_of
from distill.report.money import Prices
from distill.report.section import SECTIONS, TEMPLATES, Content, Section
from distill.report.sections.text import token_text
from distill.report.view import OUTCOMES, View
from distill.run.lock import held_for
from distill.run.readback_record import ReadbackRecord
from distill.run.result import Result
from speculative.errors import UserError
from speculative.measure.engine_costs import EngineCosts


def write_page(source: Path, to: Path | None = None, prices: Prices | None = None) -> Path:
    """Write the page of a result and return the file, by default `report.html` next to the result.

    source: a run's folder with `result.json`, or such a file. prices: of an hour, to show the cost of tokens and responses.

    Raises UserError: no result, or one that cannot be read; `to` is not an .html file, cannot be written, or belongs to a run in use.
    """
    path = source / RESULT if source.is_dir() or not source.suffix else source
    result = Result.read(path)
    verdict = result.verdict.in_engine(EngineCosts.stored(path.parent))
    result = result.model_copy(update={"readback": ReadbackRecord.stored(path.parent), "verdict": verdict})
    html = to or path.parent / REPORT
    if html.suffix not in (".html", ".htm"):
        raise UserError(f"--page {html}: must end in .html")
    page = render_page(result, prices)
    with writing(html), held_for(html):
        html.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(html, page.encode("utf-8", "replace"))
    return html


def filled_sections(view: View) -> list[tuple[Section, Content]]:
    """Every registered section that applies to this result, from top to bottom, with its parts or the reason why it is empty."""
    for module in pkgutil.iter_modules(sections.__path__):
        importlib.import_module(f"{sections.__name__}.{module.name}")
    filled = [(section, section.make(view)) for section in sorted(SECTIONS.values(), key=lambda section: section.order)]
    return [(section, content) for section, content in filled if content is not None]


def render_page(result: Result, prices: Prices | None = None) -> str:
    view = View(result, prices)
    view = replace(view, figures=figures_of(view))
    templates = environment(TEMPLATES, escaping=True)
    templates.filters |= {"token_text": token_text, "percent": lambda share: f"{100 * min(1, max(0, share)):.1f}%"}
    script, style = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown, verdict = filled_sections(view), result.verdict
    return templates.get_template("report.html.j2").render(
        result=result,
        verdict=verdict,
        outcome=OUTCOMES[verdict.outcome],
        sections=shown,
        links=[section for section, _ in shown if section.nav],
        style=Markup(style),
        script=Markup(script),
        script_digest=digest,
    )
