"""The picture of a run: alpha and tau of every judged checkpoint over steps, the undistilled baseline as a line."""

import io
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from data.files import write_bytes
from distill.config.layout import PLOT
from distill.run.checkpoint import load_judgements
from distill.run.verdict_record import Judgement

_PANELS = (("alpha", "alpha (acceptance rate)"), ("tau", "tau (tokens per target call)"))


def plot_run(run: Path) -> Path:
    """Writes `plot.png` into the run's folder from its judgements; intervals are shaded. Returns the file."""
    records = load_judgements(run)
    best = max(records, key=lambda record: record.score or 0.0)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, (key, label) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        _panel(axis, records, best, key, label)
    figure.suptitle(
        f"{run.name}: rule {records[0].rule}, gamma {records[0].gamma}, {records[0].prompts} held-out prompts"
    )
    write_figure(figure, run / PLOT)
    return run / PLOT


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Writes a picture, png or svg by the file's name, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=path.suffix.lower().removeprefix("."), **options)
    write_bytes(path, content.getvalue())


def _panel(axis: Any, records: list[Judgement], best: Judgement, key: str, label: str) -> None:
    steps = [record.step for record in records]
    if all(getattr(record, f"{key}_ci") for record in records):  # replay alone gives tau no interval
        low, high = zip(*(getattr(record, f"{key}_ci") for record in records), strict=True)
        axis.fill_between(steps, low, high, alpha=0.2, label="95 % interval")
    axis.plot(steps, [getattr(record, key) for record in records], marker="o", label="distilled")
    axis.axhline(getattr(records[0], key), linestyle="--", color="grey", label="baseline (step 0)")
    axis.plot(
        [best.step], [getattr(best, key)], marker="*", markersize=14, linestyle="none", color="tab:red", label="best"
    )
    axis.set(xlabel="optimizer step", ylabel=label)
    axis.legend(fontsize=8, loc="lower right")
    axis.grid(alpha=0.3)
