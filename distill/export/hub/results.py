"""What was measured, in the hub's two formats: `model-index` of a model card, and files in `.eval_results`."""

from collections.abc import Sequence
from dataclasses import replace

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml

from data.prompts.prompt import PromptSource
from data.prompts.sources import dataset_id
from distill.run.verdict_record import Verdict
from speculative.measure.measured import HELD_OUT

EVAL_RESULTS = ".eval_results/understudy.yaml"


def benchmark_of(sources: Sequence[PromptSource]) -> EvalResultEntry | None:
    """An entry without a value, if one dataset of the hub is the only source of held-out prompts. Its task is the subset, or `default`."""
    name = dataset_id(sources[0].path) if len(sources) == 1 else None
    if name is None or "/" not in name:
        return None
    return EvalResultEntry(name, sources[0].subset or "default", None, sources[0].revision)


def results_file(verdict: Verdict, benchmark: EvalResultEntry, target: str) -> str:
    """The text of EVAL_RESULTS: tau of the judged draft."""
    row = verdict.judged(verdict.drafts[-1].way)
    if row is None or row.tau is None:
        return ""
    how = f"gamma {row.gamma}, rule {row.rule}, {row.prompts} prompts, {row.how.get('tau')}"
    entry = replace(benchmark, value=round(row.tau, 6), notes=f"tau (tokens per target call) with {target}, {how}")
    return str(yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False))


def index_of(verdict: Verdict, data: Sequence[str]) -> list[EvalResult]:
    """For `model-index`: alpha and tau of the judged draft on the held-out text and each domain, and its speed-up."""
    way, others = verdict.drafts[-1].way, {one.target for one in verdict.targets}
    texts = dict.fromkeys(one.text for one in verdict.measured if one.way == way and one.text not in others)
    found = [(verdict.judged(way, text), name) for text in texts for name in ("alpha", "tau")]
    return [
        EvalResult(
            task_type="text-generation", dataset_type=data[0] if len(data) == 1 else HELD_OUT, dataset_name=f"{row.text} prompts",
            dataset_config=None if row.text == HELD_OUT else row.text, metric_type=name, metric_value=round(value, 6),
            metric_name=f"{name} at gamma {row.gamma}, rule {row.rule}, {row.how.get(name, 'timed')}",
        )
        for row, name in [*found, (verdict.row(way), "speed_up")]
        if row is not None and (value := getattr(row, name)) is not None
    ]  # fmt: skip
