"""The pair that the engines serve."""

import re
import shutil
from pathlib import Path

import pytest
from function_heads import write_heads

from distill import train
from distill.commands.export import export_run
from distill.commands.options import ExportOptions
from distill.config import layout
from distill.config.layout import EXPORT
from distill.verdict import conclusion

CONFIG = """
name: pair
output: {folder}/runs
target: {{path: embedded, dtype: float32}}
student: {{init: carved, layers: [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13, 14]}}   # without training half as good as the whole
data:
  train: [{{path: {folder}/train.jsonl, domain: stdlib}}]
  heldout: [{{path: {folder}/heldout.jsonl, domain: stdlib}}]
  template: {{mode: plain}}
  max_prompt_tokens: 80
serving: {{temperature: 0.8, top_p: 0.95, max_tokens: 40, batch_size: 40}}
optim: {{lr: 1.0e-4}}
train: {{steps: 2, batch_size: 8, micro_batch_size: 8}}
judge: {{every: 2, prompts: 40, gamma: 3, batch_size: 40, live: end}}
"""


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the embedded target with its draft exported."""
    folder = tmp_path_factory.mktemp("engine")
    write_heads(folder / "train.jsonl", ["ast"], 16)
    write_heads(folder / "heldout.jsonl", ["random", "statistics", "shutil", "csv"], 40)
    config = folder / "pair.yaml"
    config.write_text(CONFIG.format(folder=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conclusion, "conclude_run", lambda *_: None)  # the verdict takes longer than all before it
        assert train.main([str(config)]) == 0
    run = folder / "runs" / "pair"
    export_run(ExportOptions(run, run / EXPORT))
    return run


@pytest.fixture(scope="session")
def greedy(pair: Path) -> Path:
    """The pair, served at temperature 0."""
    run = pair.parent / "greedy"
    shutil.copytree(pair, run, symlinks=True)
    config = (run / layout.CONFIG).read_text()
    (run / layout.CONFIG).write_text(re.sub("temperature: 0.8", "temperature: 0", config))
    export_run(ExportOptions(run, run / EXPORT, overwrite=True))
    return run
