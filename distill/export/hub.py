"""Uploads to the hub: an export as a model, prompts and responses as a dataset.

Errors are one line; a wrong name and a missing login are found before anything is made.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from httpx2 import HTTPError
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from data.responses.store import Store
from distill.config.layout import CONFIG, HELDOUT, HELDOUT_GREEDY, RESPONSES, TRAINING, best_student, run_of
from distill.config.load import load_config
from distill.export.destination import appearing_directory
from distill.models.load import load_tokenizer, public_name, reason_of
from speculative.errors import UserError


def check_repository(option: str, repository: str) -> None:
    """Check the name of a repository, and that the hub knows who asks.

    Raises UserError: no ORG/NAME, nobody is logged in, or the hub cannot be reached.
    """
    with _explained(option, repository, "nothing is written"):
        validate_repo_id(repository if "/" in repository else "/")
        huggingface_hub.HfApi().whoami()


def upload(option: str, repository: str, folder: Path, kind: Literal["model", "dataset"]) -> str:
    """Upload a folder to a repository, private if it is new; return a line that says so.

    Raises UserError: the hub refuses or cannot be reached.
    """
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    with _explained(option, repository, f"{folder} is written, but not uploaded"):
        huggingface_hub.HfApi().create_repo(repository, repo_type=kind, private=True, exist_ok=True)
        huggingface_hub.HfApi().upload_folder(repo_id=repository, repo_type=kind, folder_path=folder)
    return f"uploaded: {len(sizes)} files, {sum(sizes):,} bytes: {folder} as {kind} {repository}"


@contextmanager
def _explained(option: str, repository: str, done: str) -> Iterator[None]:
    """Turn the hub's errors into one line with a fix. ``done``: what is true nevertheless."""
    try:
        yield
    except (HTTPError, OSError, ValueError) as error:
        answer: Any = getattr(error, "response", None)
        status, url = (0, "") if answer is None else (answer.status_code, str(answer.url))
        if isinstance(error, HFValidationError):
            fix = "not a name of the hub; give ORG/NAME of letters, digits, -, _ and ."
        elif isinstance(error, LocalTokenNotFoundError) or status == 401:
            fix = "not logged in, or the token is not valid; run `hf auth login`"
        elif status in (403, 404) and url.endswith("/repos/create"):
            fix = f"no user or organisation {repository.split('/')[0]} that you may write to; check the name and the token's rights"
        else:
            fix = reason_of(error)
        raise UserError(f"{option} {repository}: {fix} ({done})") from error


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
        for split, name in (("train", TRAINING), ("heldout", HELDOUT_GREEDY if config.judge_rule.greedy else HELDOUT)):
            counts[split] = len(Store(run / RESPONSES / name).rows())
            IterableDataset.from_generator(records, gen_kwargs={"name": name}).to_parquet(working / f"{split}.parquet")
        card = CARD.format(target=public_name(config.target.path), sampling=config.serving.sampling.as_dict(), **counts)
        (working / "README.md").write_text(card, encoding="utf-8")
    return run / "dataset"
