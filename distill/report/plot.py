"""Plot of a run: alpha and tau of every judged checkpoint over steps, with the undistilled draft as a line."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from data.files import write_bytes
from distill.config.layout import PLOT
from distill.report.figures import COLOURS, plot_steps
from distill.run.checkpoint import load_judgements
from speculative.evaluate import Judgement
from speculative.measure.measured import DRAFT

STYLE = {"color": COLOURS[DRAFT], "marker": "o", "label": "distilled"}


def plot_run(run: Path) -> Path:
    """Write `plot.png` into the run's folder from its judgements. Returns the file."""
    plot_judgements(load_judgements(run), run.name, run / PLOT)
    return run / PLOT


def plot_judgements(records: Sequence[Judgement], name: str, to: Path) -> None:
    """Write the plot of a run's judgements, step 0 first, with intervals shaded."""
    best = max(records, key=lambda record: record.score or 0.0)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, key in zip(figure.subplots(1, 2), ("alpha", "tau"), strict=True):
        plot_steps(axis, records, key, best.step, STYLE)
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.3)
    first = records[0]
    figure.suptitle(f"{name}: rule {first.rule}, gamma {first.gamma}, {first.prompts} held-out prompts")
    write_figure(figure, to)


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a picture atomically, png or svg by the file's name."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=path.suffix.lower().removeprefix("."), **options)
    write_bytes(path, content.getvalue())
