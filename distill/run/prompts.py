"""Read, de-duplicate, split and render the prompts of a config or a command."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.files import MANIFEST, Manifest, read_manifest, write_manifest
from data.prompts.notes import render_notes
from data.prompts.prompt import PromptRow, PromptSource, Template
from data.prompts.sources import format_of, load_source, source_state
from data.prompts.split import content_hash, deduplicate, held_out, remove_overlap, split_groups
from data.prompts.template import check_lengths, render_prompt, template_fingerprint
from data.responses.rendered import SCHEMA, RenderedPrompt, StoredPrompts, write_prompts
from distill.config.layout import CHECKPOINTS, PROMPTS
from distill.config.origin import spelled
from distill.config.sections import DataConfig
from distill.models.load import tokenizer_fingerprint
from distill.run.run import Run
from speculative.decoder.responses import Prompt
from speculative.errors import UserError
from speculative.progress import each

log = logging.getLogger(__name__)

TRAIN_FILE, HELDOUT_FILE = "train.arrow", "heldout.arrow"
# Default of `data.heldout_count`. It does not depend on `judge.prompts`, so that judging more or fewer prompts does not change the
# prompts that are trained on.
HELD_OUT = 256
CACHE_FORMAT = 4


@dataclass(frozen=True)
class PromptSets:
    """Training and held-out prompts, which are disjoint, one line about what was left out, and one for each oddity of rows."""

    train: Sequence[RenderedPrompt]
    heldout: list[RenderedPrompt]
    report: str


def load_prompts(
    data: DataConfig,
    tokenizer: Any,
    context_length: int,
    max_tokens: int,
    judged: int,
    *,
    run: Run | None = None,
    vocab_rows: int | None = None,
) -> PromptSets:
    """All prompts of a run, rendered with the target's tokenizer.

    The main process renders them once into the run's folder. They are read from there while sources, tokenizer and limits stay the
    same. Prompts that do not fit are left out before the split.

    Args:
        context_length: maximum tokens of prompt + response.
        judged: number of held-out prompts to keep, the first ones by hash, so that a larger number contains a smaller one.
        run: all its ranks call this together; None = keep nothing.
        vocab_rows: vocabulary rows of the target; None = any id will do.

    Raises UserError: sources missing, empty or all duplicates; a prompt too long (`data.too_long: error`) or with a token that has no
    row; no template; the prompts of a run with checkpoints have changed.
    """
    made_with = _made_with(data, tokenizer, context_length, max_tokens)
    if run is None:
        with tempfile.TemporaryDirectory(prefix="understudy-prompts-") as passing:
            _make(data, tokenizer, Path(passing), made_with, judged, vocab_rows)
            return _read(Path(passing), judged)
    folder, made_with = run.folder / PROMPTS, spelled(made_with, run.folder)

    def make() -> None:
        if not _is_stored(folder, made_with, judged):
            _refuse_untold(folder.parent)
            _make(data, tokenizer, folder, made_with, judged, vocab_rows)

    run.once(folder / MANIFEST, make)
    run.await_seen(lambda: all((folder / name).exists() for name in (TRAIN_FILE, HELDOUT_FILE)), folder)
    return _read(folder, judged)


def load_heldout(
    data: DataConfig,
    tokenizer: Any,
    context_length: int,
    max_tokens: int,
    count: int,
    *,
    folder: Path,
    vocab_rows: int | None = None,
) -> list[RenderedPrompt]:
    """The first held-out prompts of a run by hash: from its folder if they are there, else from the sources. Nothing is written.

    Arguments and errors as in `load_prompts`; ``folder``: the run's.
    """
    made_with = spelled(_made_with(data, tokenizer, context_length, max_tokens), folder)
    if stored := _stored_heldout(folder / PROMPTS, made_with, count):
        return stored
    if not data.heldout:
        _refuse_untold(folder)
        return load_prompts(data, tokenizer, context_length, max_tokens, count, vocab_rows=vocab_rows).heldout
    render = _Renderer(data, tokenizer, made_with, vocab_rows)
    return _first_heldout(rows_of(data.heldout, render.bad_rows)[0], render, count)


def rows_of(sources: Sequence[PromptSource], bad_rows: list[UserError] | None = None) -> tuple[list[PromptRow], int]:
    """(prompts of the sources without repeats, number of repeats). With ``bad_rows``, errors of unusable rows are added to it."""
    return deduplicate(
        [row for source in each(sources, "reading prompts") for row in load_source(source, bad_rows=bad_rows)]
    )


def _made_with(data: DataConfig, tokenizer: Any, context_length: int, max_tokens: int) -> Manifest:
    """Everything that affects the prompts of a run, except the number that is judged, as plain JSON values."""
    facts = {
        "format": [CACHE_FORMAT, *SCHEMA.names],
        "context_length": context_length,
        "max_tokens": max_tokens,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer, data.template)[:16],
        "data": data.model_dump(mode="json", exclude={"mix", "rollouts", "responses", "logged_share"}),
        "sources": [source_state(source) for source in (*data.train, *data.heldout)],
    }
    return json.loads(json.dumps(facts))


def _is_stored(folder: Path, made_with: Manifest, judged: int) -> bool:
    """Whether these prompts are stored and undamaged. A source that is gone is not needed."""
    with contextlib.suppress(UserError, OSError, KeyError):  # Missing or damaged prompts are rendered again.
        stored = read_manifest(folder)
        enough = stored["heldout"] >= judged or stored["heldout_whole"]
        sources = [now or then for now, then in zip(made_with["sources"], stored["made_with"]["sources"], strict=False)]
        same = stored["made_with"] == {**made_with, "sources": sources}
        return same and enough and stored["files"] == _digests(folder)
    return False


def _stored_heldout(folder: Path, made_with: Manifest, count: int) -> list[RenderedPrompt]:
    """The run's held-out prompts that fit these limits; none if they are unknown, too few or their source was changed.

    A new split under other limits could judge prompts that the run was trained on. A source that is gone is not needed.
    """
    with contextlib.suppress(UserError, OSError, KeyError):  # Missing or damaged.
        stored = read_manifest(folder)
        if _drawn_from(stored["made_with"], made_with) == _drawn_from(made_with, made_with):
            if stored["files"] != _digests(folder):
                return []
            heldout = StoredPrompts(folder / HELDOUT_FILE)[:]
            longest = made_with["context_length"] - made_with["max_tokens"]
            longest = min(longest, made_with["data"]["max_prompt_tokens"] or longest)
            fitting = [prompt for prompt in heldout if len(prompt.prompt_ids) <= longest]
            if len(fitting) < len(heldout):
                longer = f"{len(heldout) - len(fitting)} of {len(heldout)} held-out prompts"
                print(f"understudy: {longer} have more than {longest} tokens and are not judged", file=sys.stderr)
            return fitting[:count] if len(fitting) >= count or stored["heldout_whole"] else []
    return []


def _drawn_from(made_with: Manifest, now: Manifest) -> Manifest:
    """What decides which prompts a run may hold out and their ids. The state of the training sources is not part of it."""
    sides = {side: made_with["data"][side] for side in ("train", "heldout")}
    identity = {name: made_with[name] for name in ("format", "tokenizer", "template")}
    first = len(now["data"]["train"])
    # Other numbers of sources differ in their sides.
    there = [state for state, found in zip(made_with["sources"][first:], now["sources"][first:], strict=False) if found]
    return identity | sides | {"files": there}


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for name in (TRAIN_FILE, HELDOUT_FILE):
        with (folder / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _read(folder: Path, judged: int) -> PromptSets:
    train, manifest = StoredPrompts(folder / TRAIN_FILE), read_manifest(folder)
    heldout = StoredPrompts(folder / HELDOUT_FILE)[:judged]
    parts = [f"{len(train)} training and {len(heldout)} held-out prompts"]
    parts += [f"{count} left out ({what})" for what, count in manifest["left_out"].items() if count]
    if len(heldout) < judged:
        parts.append(f"judge.prompts = {judged}, but no more are held out; raise data.heldout_count or add sources")
    notes = (f"\nwarning: {origin}: {what}" for what, origin in manifest["notes"].items())
    return PromptSets(train, heldout, "".join([", ".join(parts), *notes]))


def _make(
    data: DataConfig, tokenizer: Any, folder: Path, made_with: Manifest, judged: int, vocab_rows: int | None
) -> None:
    """Read, de-duplicate, render and split into a folder; the manifest is written last."""
    render, overlapping = _Renderer(data, tokenizer, made_with, vocab_rows), 0
    train_rows, repeats = rows_of(data.train, render.bad_rows)
    making = folder / ".making"
    shutil.rmtree(making, ignore_errors=True)
    if data.heldout:
        wanted, heldout_rows = max(judged, HELD_OUT), rows_of(data.heldout, render.bad_rows)[0]
        heldout = _first_heldout(heldout_rows, render, wanted)
        whole, fingerprints = len(heldout) < wanted, [write_prompts(making / HELDOUT_FILE, heldout)]
        train_rows, overlapping = remove_overlap(train_rows, heldout_rows)
        fingerprints.append(
            write_prompts(making / TRAIN_FILE, filter(None, map(render, each(train_rows, "rendering prompts"))))
        )
    else:
        rendered = filter(None, map(render, each(train_rows, "rendering prompts"), split_groups(train_rows)))
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
        "made_with": made_with,
        "fingerprints": fingerprints,
        "heldout": len(StoredPrompts(making / HELDOUT_FILE)),
        "heldout_whole": whole,
        "files": _digests(making),
        "notes": render.notes,
        "left_out": {
            "duplicates": repeats,
            "in both sets": overlapping,
            "too long": render.dropped,
            f"bad rows, the first {render.bad_rows[0]}" if render.bad_rows else "bad rows": len(render.bad_rows or ()),
        },
    }
    for name in (TRAIN_FILE, HELDOUT_FILE):
        os.replace(making / name, folder / name)
    shutil.rmtree(making)
    write_manifest(folder, manifest)


def _first_heldout(rows: Sequence[PromptRow], render: "_Renderer", count: int) -> list[RenderedPrompt]:
    """The first held-out prompts by hash that fit. Rows after the last one needed are not rendered."""
    rendered = (render(row) for row in sorted(rows, key=content_hash))
    found = list(itertools.islice(filter(None, rendered), count))
    _require_some(bool(found), "heldout", render)
    return found


def _require_some(some: bool, side: str, render: "_Renderer") -> None:
    if not some:
        if render.bad_rows and len(render.bad_rows) >= render.dropped:
            # The last error: rows are rendered after all are read, and a mistake in the config shows up while rendering.
            raise render.bad_rows[-1]
        if not render.dropped:
            raise UserError(f"data.{side}: no prompt is left to train on beside one to hold out; give more prompts")
        raise UserError(
            f"data.{side}: every prompt is too long ({render.dropped} left out); lower serving.max_tokens, or raise "
            f"data.max_prompt_tokens or the context (now {render.context_length} tokens for prompt and response)"
        )


def _refuse_untold(run: Path) -> None:
    if (run / CHECKPOINTS).exists() and not (run / PROMPTS / MANIFEST).exists():
        raise UserError(
            f"{run / PROMPTS / MANIFEST}: is missing, so it is unknown which prompts the checkpoints were trained on "
            "(did another version make them?); start again with another name=..., or delete the folder; "
            "set data.heldout to judge its draft on other prompts"
        )


def _refuse_others(folder: Path, fingerprints: list[str]) -> None:
    """Raise UserError if a run with checkpoints has other prompts than at its start."""
    run, stored = folder.parent, (folder / MANIFEST).exists()
    if (run / CHECKPOINTS).exists() and stored and read_manifest(folder)["fingerprints"] != fingerprints:
        raise UserError(
            f"{run}: the prompts differ from those that its checkpoints were trained and judged on; choose another name=... "
            "(copy responses/ there to make only missing ones), or delete its checkpoints/"
        )


# What the message of a config's source says to do; a command has no such keys.
_COLUMN_KEYS = re.compile(r"set (prompt_column|messages_column)( or messages_column)?( to)?[^;]*")


def command_rows(path: str) -> list[PromptRow]:
    """The rows of a command's `--prompts PATH`, read like a source of a config.

    Raises UserError: see `load_source`; the message starts with the option.
    """
    # A file with an unknown suffix is read as plain lines.
    plain = Path(path).is_file() and format_of(Path(path)) is None
    try:
        return load_source(PromptSource(path=path, format="txt" if plain else "auto"), preferred="prompt")
    except UserError as error:
        raise UserError(
            f"--prompts {_COLUMN_KEYS.sub('name the column `prompt` or `messages`', str(error))}"
        ) from error


def render_rows(rows: Sequence[PromptRow], tokenizer: Any, chat: bool) -> list[Prompt]:
    """(key, ids) of each row. Conversations, and with `chat` plain prompts too, use the chat template. The key is FILE:LINE.

    Raises UserError: a missing chat template, a row that it refuses, a prompt without a token.
    """
    if chat and not tokenizer.chat_template:
        raise UserError("--chat: the target's tokenizer has no chat template")
    keys = [row.origin.rpartition("/")[2] for row in rows]
    prompts: list[Prompt] = []
    notes: dict[str, str] = {}
    # Files with the same name in several folders keep their folders in the key.
    for row, key in zip(rows, keys if len(set(keys)) == len(keys) else [row.origin for row in rows], strict=True):
        template = Template(mode="chat" if chat or row.messages is not None else "plain")
        prompts.append((key, render_prompt(row, tokenizer, template)))
        notes |= dict.fromkeys(render_notes(row, prompts[-1][1], tokenizer, template), row.origin) | notes
    for what, origin in notes.items():
        log.warning("warning: %s: %s", origin, what)
    return prompts


class _Renderer:
    def __init__(self, data: DataConfig, tokenizer: Any, made_with: Manifest, vocab_rows: int | None) -> None:
        self.data, self.tokenizer, self.rows = data, tokenizer, vocab_rows
        self.context_length, self.max_tokens = made_with["context_length"], made_with["max_tokens"]
        self.tokenizer_fingerprint, self.same_tokenizer = made_with["tokenizer"], set[Path | str]()
        self.dropped, self.notes = 0, dict[str, str]()  # what is odd about rows, and the first such row
        self.bad_rows: list[UserError] | None = [] if data.bad_rows == "drop" else None

    def __call__(self, row: PromptRow, group: str = "") -> RenderedPrompt | None:
        """The rendered prompt, or None if it is too long or unusable and may be left out."""
        if row.prompt_ids is not None and row.prompt_id:
            self._require_own_ids(row)
        try:
            prompt_ids = render_prompt(row, self.tokenizer, self.data.template)
            highest = max(prompt_ids, default=0)
            if self.rows is not None and highest >= self.rows:
                raise UserError(
                    f"{row.origin}: token {self.tokenizer.convert_ids_to_tokens(highest)!r} has id {highest}, but the target has "
                    f"rows 0..{self.rows - 1} only (config.json: vocab_size); leave the row out, or give the target's embedding more rows"
                )
        except UserError as error:
            if self.bad_rows is None:
                raise
            self.bad_rows.append(error)
            return None
        if row.prompt_ids is None:
            found = render_notes(row, prompt_ids, self.tokenizer, self.data.template)
            self.notes = dict.fromkeys(found, row.origin) | self.notes
        limit = self.data.max_prompt_tokens
        if (limit is not None and len(prompt_ids) > limit) or not check_lengths(
            prompt_ids, row.origin, self.context_length, self.max_tokens, self.data.too_long
        ):
            self.dropped += 1
            return None
        messages = row.messages or ({"role": "user", "content": row.text},)
        turns = {"messages": messages} | ({"tools": row.tools} if row.tools else {})
        as_turns = json.dumps(turns) if row.messages or row.tools else ""
        text = row.text if row.text is not None else str(messages[-1].get("content") or "")
        key = content_hash(row)
        return RenderedPrompt(key, row.domain, tuple(prompt_ids), text, as_turns, group, row.reference, row.logged)

    def _require_own_ids(self, row: PromptRow) -> None:
        """Raise UserError unless the row of a rendered prompt, or the manifest beside it, has this tokenizer."""
        folder = Path(row.origin).parent
        if (row.tokenizer or folder) in self.same_tokenizer:
            return
        if not (row.tokenizer or (folder / MANIFEST).exists()):
            raise UserError(
                f"{row.origin}: nothing says of which tokenizer its prompt_ids are (no column `tokenizer`, no {MANIFEST} beside it); "
                "set prompt_column or messages_column to read its text instead"
            )
        tokenizer = row.tokenizer or read_manifest(folder).get("made_with", {}).get("tokenizer")
        if tokenizer != self.tokenizer_fingerprint:
            raise UserError(
                f"{folder}: its token ids are from another tokenizer ({tokenizer}, now {self.tokenizer_fingerprint}); "
                "use the original source of the prompts, or export the traffic of this target"
            )
        self.same_tokenizer.add(row.tokenizer or folder)
