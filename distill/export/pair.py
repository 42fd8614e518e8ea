"""Check the files of a pair before it is served: what each engine refuses, and what it serves otherwise than measured."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from distill.export.engine import check, known_engines
from distill.export.facts import EngineFacts, gather_facts
from distill.export.gguf import read_gguf
from distill.models.quantized import quantization_of
from distill.models.target import TargetSide
from distill.models.vocabulary import added_ends, first_string_difference, shown, tokens_by_id
from speculative.engine.models import max_positions
from speculative.errors import UserError

TABLES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "lm_head.weight")
# Differences that no engine refuses.
_AFFECTED = {
    "template": "every engine fills in the target's, so a draft trained with its own meets prompts it has never seen; train it on the target's",
    "roles": "engines end a text at the target's, so a draft trained to end elsewhere proposes the wrong end; use the target's tokenizer files",
    "rules": "text gets other ids than the draft was trained on, so acceptance falls without an error; use the target's tokenizer files",
}


class Finding(NamedTuple):
    """What was found, what happens otherwise, and the fix, as one text. breaks: whether the engines do not serve the pair right."""

    engines: tuple[str, ...]  # with versions; empty: all
    text: str
    breaks: bool

    def __str__(self) -> str:
        return f"{'breaks' if self.breaks else 'note for'} {', '.join(self.engines) or 'every engine'}: {self.text}"


def check_pair(
    target: TargetSide, draft: TargetSide, ggufs: Sequence[Path] = (), *, engines: Sequence[str] = (), tensor_parallel: int = 1
) -> list[Finding]:  # fmt: skip
    """Return everything that is wrong with a pair, what breaks serving first.

    ggufs: files made from either model, compared with the target's. engines: those to check; empty means all.

    Raises:
        UserError: a file cannot be read.
    """
    known = {name: one for name, one in known_engines().items() if not engines or name in engines}
    facts = gather_facts(target, draft, draft.name, gamma=1, tensor_parallel=tensor_parallel)
    told: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for name, engine in known.items():
        for breaks, texts in ((True, check(name, facts).reasons), (False, engine.notes(facts))):
            for text in texts:
                told[breaks, text].append(f"{name} {engine.version}")
    for path in ggufs if "llama.cpp" in known else ():
        for breaks, texts in zip((True, False), _gguf(path, target), strict=True):
            for text in texts:
                told[breaks, f"{path}: {text}"].append(f"llama.cpp {known['llama.cpp'].version}")
    found = [Finding(tuple(who), text, breaks) for (breaks, text), who in told.items()]
    found += [Finding((), text, False) for text in pair_notes(facts)]
    for which, side in (("target", target), ("draft", draft)):
        found += [Finding((), text, True) for text in _weights(side, which)]
    return sorted(found, key=lambda one: not one.breaks)


def pair_notes(facts: EngineFacts) -> list[str]:
    """Return what every engine serves, but worse than expected."""
    notes = [f"{facts.differences[name]}; {what}" for name, what in _AFFECTED.items() if name in facts.differences]
    if facts.draft_context is not None:
        notes.append(
            f"the draft's context is {facts.draft_context} tokens (config.json: max_position_embeddings), shorter than the target's, so the "
            "commands limit the server to it (beyond it vLLM's model runner V1 drafts dummy tokens; V2 limits itself from vLLM 0.33)"
        )
    return notes


def _weights(side: TargetSide, which: str) -> Iterable[str]:
    """Compare the rows of embedding and head in the weight files with config.json."""
    text, rows = side.config.get_text_config(), dict[str, int]()
    for file in sorted(Path(side.name).glob("*.safetensors")) if Path(side.name).is_dir() else ():
        try:
            with safe_open(file, "pt") as tensors:
                rows |= {name: (tensors.get_slice(name).get_shape() or [0])[0] for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a complete safetensors file ({error}); copy it again") from error
    tables = TABLES[:1] if quantization_of(side.config) else TABLES  # a quantised head may be packed
    for name, count in rows.items():
        if name.endswith(tables) and count != text.vocab_size:
            yield (
                f"{name} has {count} rows in the {which}'s safetensors, and config.json: vocab_size is {text.vocab_size}; engines fail to load "
                "it or leave rows unset; save the model again with equal numbers"
            )
    embedded, head = (any(word in name for name in rows) for word in (TABLES[0], "lm_head."))
    if embedded and not head and not text.tie_word_embeddings:
        yield (
            f"config.json: tie_word_embeddings false in the {which}, and its safetensors have no lm_head.weight; the head stays unset and "
            "every token is noise; set tie_word_embeddings to true or save the head"
        )


def _gguf(path: Path, target: TargetSide) -> tuple[list[str], list[str]]:
    """Compare a GGUF file with the target's files. Return (what breaks serving, notes)."""
    metadata, shapes = read_gguf(path)
    tokens, strings = metadata.get("tokenizer.ggml.tokens"), tokens_by_id(target.tokenizer)
    if not isinstance(tokens, list):
        raise UserError(f"--gguf {path}: it has no tokenizer.ggml.tokens; give a language model's file")
    broken, notes = [], []
    own = {one: token for one, token in enumerate(tokens) if one in strings}
    if difference := first_string_difference(strings, own):
        broken.append(
            f"tokenizer.ggml.tokens: id {difference[0]} is {difference[2]!r}, and {difference[1]!r} in the target's tokenizer.json; it refuses "
            "a pair with other strings; convert a model with the target's tokenizer"
        )
    adds, ends = _added(metadata, tokens), added_ends(target.tokenizer)
    if adds is not None and adds != ends:
        broken.append(
            f"tokenizer.ggml.add_bos_token, add_eos_token: adds {adds} to a text, and the target's tokenizer adds {ends}; it refuses a pair "
            "whose files differ in this, and else serves other text than was measured; convert it again with the target's tokenizer"
        )
    for name in ("token_embd.weight", "output.weight"):
        if name in shapes and shapes[name][-1:] != [len(tokens)]:
            broken.append(f"{name}: {shapes[name][-1:]} rows for {len(tokens)} tokens; it does not load; convert again")
    ours, its = getattr(target.tokenizer, "chat_template", None), metadata.get("tokenizer.chat_template")
    if ours != its:
        notes.append(
            f"tokenizer.chat_template is {shown(its)}, and the target's {shown(ours)}; llama-server uses that of its target file, so prompts "
            "can differ from the measured ones; convert it again"
        )
    key, limit = f"{metadata.get('general.architecture')}.context_length", max_positions(target.config)
    if metadata.get(key) and limit and metadata[key] < limit:
        notes.append(f"{key} is {metadata[key]}, the target's {limit}; start llama-server with -c {metadata[key]}")
    return broken, notes


def _added(metadata: dict[str, Any], tokens: list[str]) -> list[str] | None:
    """Return the tokens that llama.cpp adds to a text; None if its source decides by the kind of tokenizer."""
    known: dict[Any, str] = dict(enumerate(tokens))
    bos = metadata.get(
        "tokenizer.ggml.add_bos_token", True if metadata.get("tokenizer.ggml.model") == "llama" else None
    )
    adds = {"bos": bos, "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name, added in adds.items() if added]
    return None if bos is None else [known.get(one, "no token") for one in ids]
