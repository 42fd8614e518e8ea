"""A run's prompts and responses as a dataset: two parquet files and a card in the run's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.responses.store import Store
from distill.config.layout import CONFIG, HELDOUT, RESPONSES, TRAINING, best_student, run_of
from distill.config.load import load_config
from distill.export.destination import appearing_directory
from distill.models.load import load_tokenizer, public_name

KEPT = ("log_target_probs", "prompt_id", "sample", "domain", "finished")
CARD = """---
tags: [speculative-decoding, understudy]
license: other
configs:
- config_name: default
  data_files: [{{split: train, path: train.parquet}}, {{split: heldout, path: heldout.parquet}}]
---
# Responses of `{target}`

Prompts and responses that `{target}` sampled ({sampling}): {train:,} to train on, {heldout:,} held out. Made with Understudy.

`prompt` and `response` are text as the target saw it, `prompt_ids` and `response_ids` its tokens. `log_target_probs` is the logarithm of
the target's probability of each response token at these settings. `tokenizer` is a fingerprint of what made the tokens. The licences of
target and prompts apply.
"""


def write_responses(path: Path) -> Path:
    """Write the folder `dataset` of a run and return it.

    Raises UserError: responses are missing or damaged, or the folder cannot be written.
    """
    from datasets import IterableDataset

    run = run_of(path) or path
    config, tokenizer, counts = load_config(run / CONFIG), load_tokenizer(str(best_student(run))), {}

    def records(name: str) -> Iterator[dict[str, Any]]:
        store = Store(run / RESPONSES / name)
        same = {"tokenizer": store.manifest()["tokenizer"]}
        for row in store.rows():
            ids = {"prompt": row.prompt_ids, "response": row.response_ids}
            texts = {key: tokenizer.decode(own) for key, own in ids.items()}
            yield (
                texts
                | {f"{key}_ids": own for key, own in ids.items()}
                | {key: getattr(row, key) for key in KEPT}
                | same
            )

    with appearing_directory(run / "dataset") as working:
        for split, name in (("train", TRAINING), ("heldout", HELDOUT)):
            counts[split] = len(Store(run / RESPONSES / name).rows())
            IterableDataset.from_generator(records, gen_kwargs={"name": name}).to_parquet(working / f"{split}.parquet")
        card = CARD.format(target=public_name(config.target.path), sampling=config.serving.sampling.as_dict(), **counts)
        (working / "README.md").write_text(card, encoding="utf-8")
    return run / "dataset"
