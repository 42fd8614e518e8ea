"""Check the files of a pair before it is served: what breaks serving in which engine, and what is served otherwise than measured."""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from distill.config.layout import SERVING_FILE
from distill.engines.protocol.engine import known_engines
from distill.engines.protocol.facts import EngineFacts, Serving, gather_facts
from distill.engines.protocol.verdict import check
from distill.models.files.gguf import read_gguf, tokens_of
from distill.models.load import base_of_adapter, resolve
from distill.models.target import TargetSide, load_target_side
from distill.models.vocabulary import added_ends, first_string_difference, shown, tokens_by_id
from speculative.engine.models import max_positions
from speculative.errors import UserError

TABLES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "lm_head.weight")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NOT_A_MODEL = ("adapter_", "training_args", "optimizer", "scheduler")  # Files that begin so lie beside one.
MERGE = (
    "an adapter of {base}, and engines load whole models; merge it (peft: merge_and_unload), save it "
    "with its tokenizer and give that directory"
)
# Differences that no engine refuses.
_AFFECTED = {
    "template": "every engine fills in the target's, so a draft trained with its own meets prompts it has "
    "never seen; train it on the target's",
    "roles": "engines end a text at the target's, so a draft trained to end elsewhere proposes the "
    "wrong end; use the target's tokenizer files",
    "rules": "text gets other ids than the draft was trained on, so acceptance falls without an error; use the target's tokenizer files",
}


def check_pair(
    target: str,
    draft: str,
    ggufs: Sequence[Path] = (),
    *,
    engines: Sequence[str] = (),
    tensor_parallel: int = 1,
    trusted: bool = False,
    revision: str | None = None,
) -> tuple[list[str], list[str]]:
    """Return (what breaks serving, notes): a line has the engines, what was found, what happens otherwise, and the fix.

    target, draft: directories or hub ids. ggufs: made from either model. engines: those to check; empty means all. revision: of
    the target.

    Raises UserError: a file cannot be read.
    """
    asked = (("target", target, revision), ("draft", draft, None))
    sides = {what: load_target_side(path, trusted, version, what=what) for what, path, version in asked}
    facts = gather_facts(
        sides["target"], sides["draft"], sides["draft"].name, tensor_parallel=tensor_parallel, **_schedule(draft)
    )
    engines_by_line: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for name, engine in known_engines().items():
        if engines and name not in engines:
            continue
        verdict = check(name, facts)
        lines = [(True, text) for text in verdict.reasons] + [(False, text) for text in verdict.warnings]
        lines += [text for path in ggufs if engine.reads_gguf for text in _gguf(path, sides["target"])]
        for line in lines:
            engines_by_line[line].append(f"{name} {engine.version}")
    general = [(True, text) for what, side in sides.items() for text in _weights(side, what, bool(ggufs))]
    engines_by_line |= {line: ["every engine"] for line in (*general, *((False, text) for text in pair_notes(facts)))}
    broken = [f"breaks {', '.join(who)}: {text}" for (breaks, text), who in engines_by_line.items() if breaks]
    return broken, [
        f"note for {', '.join(who)}: {text}" for (breaks, text), who in engines_by_line.items() if not breaks
    ]


def _schedule(draft: str) -> dict[str, Any]:
    """Return the gammas that an export is served with; only `gamma` for another draft."""
    with contextlib.suppress(UserError):
        facts = Serving.read(Path(resolve(draft)) / SERVING_FILE).facts
        return {name: getattr(facts, name) for name in ("gamma", "gamma_by_load", "timed_in", "one_pass")}
    return {"gamma": 1}


def pair_notes(facts: EngineFacts) -> list[str]:
    """Return what every engine serves, but worse than expected."""
    notes = [f"{facts.differences[name]}; {what}" for name, what in _AFFECTED.items() if name in facts.differences]
    if facts.draft_context is not None:
        notes.append(
            f"the draft's context is {facts.draft_context} tokens, shorter than the target's (config.json: "
            "max_position_embeddings), so the "
            "commands limit the server to it"
        )
    return notes


def _weights(side: TargetSide, what: str, elsewhere: bool) -> Iterable[str]:
    """Yield what weight files lack, and where embedding and head in them do not fit config.json. elsewhere: GGUF files were given."""
    if (base := base_of_adapter(side.name)) is not None:
        yield f"the {what} {side.name} is {MERGE.format(base=base.path)}"
        return
    text, rows, folder = side.config.get_text_config(), dict[str, int](), Path(side.name)
    tables: list[torch.Tensor] = []
    missing = _missing(folder) if folder.is_dir() and not elsewhere else []
    if missing:
        yield f"{folder}: the {what} has no {', '.join(missing)}; engines do not load it; copy its weights there"
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                rows |= {name: (tensors.get_slice(name).get_shape() or [0])[0] for name in tensors.keys()}  # noqa: SIM118
                pair = [name for name in tensors.keys() if name.endswith((TABLES[0], TABLES[-1]))]  # noqa: SIM118
                tables += [tensors.get_tensor(name) for name in pair if text.tie_word_embeddings]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a complete safetensors file ({error}); copy it again") from error
    effect = (
        "engines do not load it or leave rows unset, so tokens are noise; save the model again with numbers that fit"
    )
    for name, count in rows.items():
        if name.endswith(TABLES) and count != text.vocab_size:
            yield f"{name} has {count} rows in the {what}'s safetensors, config.json: vocab_size is {text.vocab_size}; {effect}"
    embedded, head = (any(word in name for name in rows) for word in (TABLES[0], "lm_head."))
    if embedded and not head and not missing and not text.tie_word_embeddings:
        yield f"config.json: tie_word_embeddings false in the {what}, and its safetensors have no lm_head.weight; {effect}"
    if len(tables) == 2 and tables[0].shape == tables[1].shape and not torch.equal(*tables):
        yield (
            f"config.json: tie_word_embeddings true in the {what}, and its safetensors have another "
            "lm_head.weight, which transformers 5 uses "
            "and engines may ignore; set it to false, or delete that weight"
        )


def _missing(folder: Path) -> list[str]:
    """Return the weight files that a model's folder lacks."""
    if not any(one.suffix in WEIGHTS and not one.name.startswith(NOT_A_MODEL) for one in folder.iterdir()):
        return [SAFE_WEIGHTS_NAME]
    # The first of these that is there is loaded.
    order = SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME
    index = next((folder / name for name in order if (folder / name).is_file()), None)
    if index is None or index.name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        return []
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in named if not (folder / name).is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: not an index of weight files ({error}); copy it again") from error


def _gguf(path: Path, target: TargetSide) -> Iterable[tuple[bool, str]]:
    """Yield (whether it breaks serving, text) for what differs between a GGUF file and the target's files."""
    metadata, shapes = read_gguf(path)
    strings, ends = tokens_by_id(target.tokenizer), added_ends(target.tokenizer)
    strings_by_id: dict[Any, str] = tokens_of(path, metadata)
    key = f"{metadata.get('general.architecture')}.context_length"
    # Without the key the engine adds bos by the kind of tokenizer, which only for `llama` is always so.
    metadata.setdefault("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama" or bool(ends))
    adding = [name for name in ("bos", "eos") if metadata.get(f"tokenizer.ggml.add_{name}_token")]
    limit = max_positions(target.config) or 0
    other = (
        first_string_difference(strings, {name: strings_by_id[name] for name in strings if name in strings_by_id})
        or (None,) * 3
    )
    added = [strings_by_id.get(metadata.get(f"tokenizer.ggml.{name}_token_id")) for name in adding]
    rows = shapes.get("token_embd.weight", [len(strings_by_id)])[-1:]
    template = getattr(target.tokenizer, "chat_template", None)
    refused = "it refuses a pair with other strings; convert the right model"
    other_text = (
        "it refuses a pair whose files differ in this, and else serves other text than was measured; "
        "convert it with the target's tokenizer"
    )
    other_prompts = (
        "the engine uses that of its target file, so prompts can differ from the measured ones; convert it again"
    )
    longer = "longer texts degrade; start the server with a -c that is not larger"
    for breaks, place, its, ours, effect in (
        (True, f"tokenizer.ggml.tokens: id {other[0]}", other[2], other[1], refused),
        (True, "tokenizer.ggml.add_bos_token, add_eos_token: added", added, ends, other_text),
        (True, "token_embd.weight: rows", rows, [len(strings_by_id)], "it does not load; convert it again"),
        (False, "tokenizer.chat_template", metadata.get("tokenizer.chat_template"), template, other_prompts),
        (False, key, min(metadata.get(key, limit), limit), limit, longer),
    ):
        if its != ours:
            yield breaks, f"{path}: {place}: {shown(its)}, and {shown(ours)} by the target's files; {effect}"
