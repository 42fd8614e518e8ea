"""From the config's sources, or a command's, to rendered prompts: read, de-duplicate, split, render, check."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.files import MANIFEST, Manifest, read_manifest, write_manifest
from data.prompts.prompt import PromptRow, Template
from data.prompts.sources import format_of, load_source, source_state
from data.prompts.split import content_hash, deduplicate, held_out, remove_overlap, split_groups
from data.prompts.template import check_lengths, render_prompt, render_reference, template_fingerprint
from data.responses.rendered import SCHEMA, RenderedPrompt, StoredPrompts, write_prompts
from distill.config.layout import CHECKPOINTS, PROMPTS
from distill.config.sections import DataConfig, SourceConfig
from distill.models.load import tokenizer_fingerprint
from distill.run.run import Run
from speculative.decoder.responses import Prompt
from speculative.errors import UserError

TRAIN_FILE, HELDOUT_FILE = "train.arrow", "heldout.arrow"
# Prompts held out of the training sources unless `data.heldout_count` says otherwise, whatever `judge.prompts` is: they may be
# judged, or not, and no more of them be judged, without that another prompt is trained on.
HELD_OUT = 256
CACHE_FORMAT = 2


@dataclass(frozen=True)
class PromptSets:
    """Training and held-out prompts, disjoint, and one line that says what was left out."""

    train: Sequence[RenderedPrompt]
    heldout: list[RenderedPrompt]
    report: str


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    context_length: int,
    max_tokens: int,
    heldout_prompts: int,
    *,
    heldout_only: bool = False,
    folder: Path | None = None,
    ranks: Run | None = None,
) -> PromptSets:
    """All prompts of a run, rendered by the target's tokenizer.

    They are rendered once, by the main process, into the run's folder, and read from there while sources, tokenizer and limits
    are the same. What does not fit is left out before the split.

    Args:
        context_length: tokens that prompt + response may have at most.
        heldout_prompts: keep this many held-out prompts: the first ones by hash, so that more of them begin with these.
        heldout_only: leave `train` empty (for evaluation alone); the run's folder is read, never written.
        folder: the run's; None = nothing is kept.
        ranks: given when all ranks of a run call.

    Raises:
        UserError: sources missing, empty or all duplicates; a prompt too long (`data.too_long: error`); no template; other prompts
            than those that a run with checkpoints began with.
    """
    made_with = _made_with(data, tokenizer, context_length, max_tokens)
    if folder is not None:
        own, kept = folder / PROMPTS, folder / PROMPTS / MANIFEST

        def make() -> None:
            if not _is_kept(own, made_with, heldout_prompts):
                _refuse_untold(own.parent)
                _make(data, tokenizer, own, made_with, heldout_prompts)

        if not heldout_only:
            if ranks is None:
                make()
            else:
                ranks.once(kept, make)
                ranks.await_seen(lambda: all((own / name).exists() for name in (TRAIN_FILE, HELDOUT_FILE)), own)
            return _read(own, heldout_prompts)
        if _is_kept(own, made_with, heldout_prompts):
            return _read(own, heldout_prompts)
        if not data.heldout:
            _refuse_untold(folder)
        # Under other limits than the run's.
        if drawn := _own_heldout(own, made_with, heldout_prompts):
            return PromptSets([], drawn, "")
    if heldout_only and data.heldout:
        render = _Renderer(data, tokenizer, made_with)
        rows = rows_of(data.heldout, render.bad_rows)[0]
        return PromptSets([], _asked_heldout(rows, render, heldout_prompts), "")
    with tempfile.TemporaryDirectory(prefix="understudy-prompts-") as passing:
        _make(data, tokenizer, Path(passing), made_with, heldout_prompts)
        return _read(Path(passing), heldout_prompts)


def rows_of(sources: Sequence[SourceConfig], bad_rows: list[UserError] | None = None) -> tuple[list[PromptRow], int]:
    """The sources' prompts without repeats, and how many those were; what is no usable prompt goes into ``bad_rows`` where that is given."""
    return deduplicate([row for source in sources for row in load_source(source, bad_rows=bad_rows)])


def _made_with(data: DataConfig, tokenizer: Any, context_length: int, max_tokens: int) -> Manifest:
    """Everything that reaches the prompts of a run but the number that is judged, as JSON has it."""
    return json.loads(
        json.dumps(
            {
                "format": [CACHE_FORMAT, *SCHEMA.names], "context_length": context_length, "max_tokens": max_tokens,
                "tokenizer": tokenizer_fingerprint(tokenizer),
                "template": template_fingerprint(tokenizer, data.template)[:16],
                "data": data.model_dump(mode="json", exclude={"mix", "rollouts", "text", "text_window", "synthetic"}),
                "sources": [source_state(source) for source in (*data.train, *data.heldout)],
            }
        )
    )  # fmt: skip


def _is_kept(folder: Path, made_with: Manifest, heldout_prompts: int) -> bool:
    """Whether these prompts are there, whole."""
    if not (folder / MANIFEST).exists():
        return False
    with contextlib.suppress(UserError, OSError, KeyError):  # damaged: they are rendered again
        kept = read_manifest(folder)
        enough = kept["heldout"] >= heldout_prompts or kept["heldout_whole"]
        return kept["made_with"] == made_with and enough and kept["files"] == _digests(folder)
    return False


def _own_heldout(folder: Path, made_with: Manifest, count: int) -> list[RenderedPrompt]:
    """What a run of these sources holds out, as far as it fits into other limits; none where that is not known, or not enough.

    A split of its own under those limits would judge what the run was trained on.
    """
    with contextlib.suppress(UserError, OSError, KeyError):  # not there, or damaged
        kept = read_manifest(folder)
        if _drawn_from(kept["made_with"]) == _drawn_from(made_with) and kept["files"] == _digests(folder):
            heldout, room = (
                StoredPrompts(folder / HELDOUT_FILE)[:],
                made_with["context_length"] - made_with["max_tokens"],
            )
            room = min(room, made_with["data"]["max_prompt_tokens"] or room)
            fitting = [prompt for prompt in heldout if len(prompt.prompt_ids) <= room]
            if len(fitting) < len(heldout):
                longer = f"{len(heldout) - len(fitting)} of {len(heldout)} held-out prompts"
                print(f"understudy: {longer} are longer than {room} tokens here and are not judged", file=sys.stderr)
            return fitting[:count] if len(fitting) >= count or kept["heldout_whole"] else []
    return []


def _drawn_from(made_with: Manifest) -> Manifest:
    """What decides which prompts a run may hold out, and their ids; the state of the training sources is the run's own."""
    data = made_with["data"]
    told = {name: made_with[name] for name in ("format", "tokenizer", "template")}
    return told | {
        "train": data["train"],
        "heldout": data["heldout"],
        "files": made_with["sources"][len(data["train"]) :],
    }


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for name in (TRAIN_FILE, HELDOUT_FILE):
        with (folder / name).open("rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _read(folder: Path, heldout_prompts: int) -> PromptSets:
    train, kept = StoredPrompts(folder / TRAIN_FILE), read_manifest(folder)
    heldout = StoredPrompts(folder / HELDOUT_FILE)[:heldout_prompts]
    parts = [f"{len(train)} training and {len(heldout)} held-out prompts"]
    parts += [f"{count} left out ({what})" for what, count in kept["left_out"].items() if count]
    if len(heldout) < heldout_prompts:
        parts.append(f"judge.prompts = {heldout_prompts}: no more are held out (data.heldout_count, or more sources)")
    return PromptSets(train, heldout, ", ".join(parts))


def _make(data: DataConfig, tokenizer: Any, folder: Path, made_with: Manifest, heldout_prompts: int) -> None:
    """Reads, de-duplicates, renders and splits into a folder, the manifest last."""
    render, overlapping = _Renderer(data, tokenizer, made_with), 0
    train_rows, repeats = rows_of(data.train, render.bad_rows)
    making = folder / ".making"
    shutil.rmtree(making, ignore_errors=True)
    if data.heldout:
        wanted, heldout_rows = max(heldout_prompts, HELD_OUT), rows_of(data.heldout, render.bad_rows)[0]
        heldout = _asked_heldout(heldout_rows, render, wanted)
        whole, fingerprints = len(heldout) < wanted, [write_prompts(making / HELDOUT_FILE, heldout)]
        train_rows, overlapping = remove_overlap(train_rows, heldout_rows)
        fingerprints.append(write_prompts(making / TRAIN_FILE, filter(None, map(render, train_rows))))
    else:
        rendered = filter(None, map(render, train_rows, split_groups(train_rows)))
        whole, fingerprints = True, [write_prompts(making / "all.arrow", rendered)]
        fitting = StoredPrompts(making / "all.arrow")
        _require_some(len(fitting) > 1, "train", render)
        count = min(data.heldout_count or HELD_OUT, max(2, len(fitting) // 5), len(fitting) - 1)
        numbers = held_out(fitting.column("prompt_id").to_pylist(), count, fitting.column("group").to_pylist())
        write_prompts(making / HELDOUT_FILE, (fitting[number] for number in numbers))
        fitting.write(making / TRAIN_FILE, np.isin(np.arange(len(fitting)), numbers, invert=True))
    _require_some(len(StoredPrompts(making / TRAIN_FILE)) > 0, "train", render)
    _refuse_others(folder, fingerprints)
    manifest = {
        "made_with": made_with, "fingerprints": fingerprints, "heldout": len(StoredPrompts(making / HELDOUT_FILE)),
        "heldout_whole": whole, "files": _digests(making),
        "left_out": {
            "duplicates": repeats, "in both sets": overlapping, "too long": render.dropped,
            f"bad rows, the first {render.bad_rows[0]}" if render.bad_rows else "bad rows": len(render.bad_rows or ()),
        },
    }  # fmt: skip
    for name in (TRAIN_FILE, HELDOUT_FILE):
        os.replace(making / name, folder / name)
    shutil.rmtree(making)
    write_manifest(folder, manifest)


def _asked_heldout(rows: Sequence[PromptRow], render: "_Renderer", count: int) -> list[RenderedPrompt]:
    """The first held-out prompts by hash that fit. Rows behind the last that is needed are not even looked at."""
    fitting = (
        prompt for row in sorted(rows, key=content_hash) if (prompt := render(row, with_reference=False)) is not None
    )
    found = list(itertools.islice(fitting, count))
    _require_some(bool(found), "heldout", render)
    return found


def _require_some(some: bool, side: str, render: "_Renderer") -> None:
    if not some:
        if render.bad_rows and len(render.bad_rows) >= render.dropped:
            # The last one: rows are rendered after all are read, and a mistake of the config's shows in the rendering.
            raise render.bad_rows[-1]
        raise UserError(
            f"data.{side}: every prompt is too long ({render.dropped} left out): lower serving.max_tokens, or raise "
            f"data.max_prompt_tokens or the context (now {render.context_length} tokens for prompt and response)"
        )


def _refuse_untold(run: Path) -> None:
    if (run / CHECKPOINTS).exists() and not (run / PROMPTS / MANIFEST).exists():
        raise UserError(
            f"{run / PROMPTS / MANIFEST}: not there, so nobody knows which prompts the checkpoints beside it were trained on "
            "(another version made them?): a new split could judge those; start again with another name=..., or delete the folder; "
            "its draft can be judged on prompts of data.heldout"
        )


def _refuse_others(folder: Path, fingerprints: list[str]) -> None:
    """A run's checkpoints were trained and judged on the prompts that it began with."""
    run = folder.parent
    if (
        (run / CHECKPOINTS).exists()
        and (folder / MANIFEST).exists()
        and read_manifest(folder)["fingerprints"] != fingerprints
    ):
        raise UserError(
            f"{run}: the prompts are others than those that its checkpoints were trained and judged on; choose another name=... "
            "(responses/ may be copied there: only what is missing is made), or delete its checkpoints/"
        )


def asked_rows(
    path: str, prompt_column: str = "", messages_column: str = "", *, system: str = "", label: str = ""
) -> tuple[list[PromptRow], bool]:
    """(rows of a command's `--prompts PATH`, read as a config's source is; whether a column `label` gives their domain).

    Raises:
        UserError: see `load_source`; the message begins with the option.
    """
    columns = {"prompt_column": prompt_column or None, "messages_column": messages_column or None}
    # A file whose suffix tells nothing is one of plain lines.
    plain = Path(path).is_file() and format_of(Path(path)) is None
    source = SourceConfig(path=path, system=system or None, format="txt" if plain else "auto", **columns)  # type: ignore[arg-type]
    if label:
        # No such column, or a fault that the second reading names.
        with contextlib.suppress(UserError):
            return load_source(source.model_copy(update={"domain_column": label}), preferred="prompt"), True
    try:
        return load_source(source, preferred="prompt"), False
    except UserError as error:
        words = str(error).replace("prompt_column", "--prompt-column").replace("messages_column", "--messages-column")
        raise UserError(f"--prompts {words}") from error


def render_rows(rows: Sequence[PromptRow], tokenizer: Any, chat: bool) -> list[Prompt]:
    """(key, ids) of each row: a conversation by the chat template, a bare prompt too when `chat` says so. The key is its
    FILE:LINE.

    Raises:
        UserError: no template where one is needed, a row that it refuses, a prompt without a token.
    """
    if chat and not tokenizer.chat_template:
        raise UserError("--chat: the target's tokenizer has no chat template")
    keys = [row.origin.rpartition("/")[2] for row in rows]
    prompts: list[Prompt] = []
    # Files of one name in several folders keep their folders.
    for row, key in zip(rows, keys if len(set(keys)) == len(keys) else [row.origin for row in rows], strict=True):
        template = Template(mode="chat" if chat or row.messages is not None else "plain")
        prompts.append((key, render_prompt(row, tokenizer, template)))
    return prompts


class _Renderer:
    def __init__(self, data: DataConfig, tokenizer: Any, made_with: Manifest) -> None:
        self.data, self.tokenizer = data, tokenizer
        self.context_length, self.max_tokens = made_with["context_length"], made_with["max_tokens"]
        self.tokenizer_fingerprint, self.known_folders = made_with["tokenizer"], set[Path]()
        self.dropped = 0
        self.bad_rows: list[UserError] | None = [] if data.bad_rows == "drop" else None

    def __call__(self, row: PromptRow, group: str = "", *, with_reference: bool = True) -> RenderedPrompt | None:
        """The rendered prompt, or None when it is too long, or no usable prompt, and may be left out."""
        if row.prompt_ids is not None:
            self._require_own_ids(Path(row.origin).parent)
        try:
            prompt_ids, reference_ids = self._ids(row, with_reference)
        except UserError as error:
            if self.bad_rows is None:
                raise
            self.bad_rows.append(error)
            return None
        limit = self.data.max_prompt_tokens
        if (limit is not None and len(prompt_ids) > limit) or not check_lengths(
            prompt_ids, row.origin, self.context_length, self.max_tokens, self.data.too_long
        ):
            self.dropped += 1
            return None
        return as_rendered(row, prompt_ids, reference_ids, group)

    def _require_own_ids(self, folder: Path) -> None:
        """Raises UserError unless the manifest beside prompts that were rendered before tells of this tokenizer."""
        if folder not in self.known_folders:
            made_with = read_manifest(folder).get("made_with", {})
            if made_with.get("tokenizer") != self.tokenizer_fingerprint:
                raise UserError(
                    f"{folder}: its token ids are another tokenizer's ({made_with.get('tokenizer')}, now {self.tokenizer_fingerprint}): "
                    "name the prompts' own source, or export the traffic of this target"
                )
            self.known_folders.add(folder)

    def _ids(self, row: PromptRow, with_reference: bool) -> tuple[list[int], tuple[int, ...] | None]:
        template = self.data.template
        if self.data.responses != "reference" or not with_reference:
            return render_prompt(row, self.tokenizer, template), None
        if row.reference is None:
            raise UserError(f"{row.origin}: data.responses is reference, but the row has none; map reference_column")
        prompt_ids, answer_ids = render_reference(row, self.tokenizer, template)
        return prompt_ids, tuple(answer_ids)


def as_rendered(
    row: PromptRow, prompt_ids: Sequence[int], reference_ids: tuple[int, ...] | None = None, group: str = ""
) -> RenderedPrompt:
    """The row with the ids that it is rendered to."""
    said = row.messages or ({"role": "user", "content": row.text},)
    turns = {"messages": said} | ({"tools": row.tools} if row.tools else {})
    as_turns = json.dumps(turns) if row.messages or row.tools else ""
    return RenderedPrompt(
        content_hash(row), row.domain, tuple(prompt_ids), _text_of(row), reference_ids, as_turns, group
    )


def _text_of(row: PromptRow) -> str:
    if row.text is not None:
        return row.text
    return str(row.messages[-1].get("content", "")) if row.messages else ""
