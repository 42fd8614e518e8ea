"""Compare a draft's vocabulary with the target's, and repair row counts.

A *token* is a string that a tokenizer maps to an id; a *row* is a line of the embedding matrix (`config.vocab_size`).
Models often have more rows than tokens (padding, for speed). These rows may differ between draft and target and can be added or
trimmed. Token strings must not differ, since the draft would then propose other text than the target reads.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from distill.models.quantized import quantization_of
from speculative.errors import UserError

# Model types whose separate head engines load if the config is untied. For Gemma, Cohere and GPT-2 they do not.
UNTIED_IN_ENGINES = ("llama", "mistral", "qwen2", "qwen3", "granite")
ROLES = ("bos", "eos", "pad", "unk")

TokenDifference = tuple[int, str | None, str | None]  # id, string in the target, string in the draft (None: no token)
LONGEST_VALUE = 120  # characters of a shown value


@dataclass(frozen=True)
class VocabularyAgreement:
    """Result of `compare_vocabularies`.

    `agree`: same strings, same rows, same special ids. `repair`: same strings, but the number of padded rows or the
    role of a token (bos, eos, pad, unk, the `special` flag) differs; `repair_rows` repairs rows, and the target's
    tokenizer gives the roles. `refuse`: an id has two different strings.
    """

    verdict: Literal["agree", "repair", "refuse"]
    detail: str
    draft_rows: int
    token_rows: int  # rows 0 .. token_rows-1 hold the target's tokens; the target's rows after them are padding
    rowless: tuple[int, ...] = ()  # special tokens without a row in the draft; prompts must not use them


def vocabulary_rows(config: Any) -> int:
    """Return the rows of the token embedding in a `transformers` config (the text part of a composite one)."""
    return int(config.get_text_config().vocab_size)


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Return every token string by id, including added and special tokens."""
    strings: dict[int, str] = {}
    for string, token_id in tokenizer.get_vocab().items():
        # Two strings may share an id (aliases in some older tokenizers). Take the smaller, so the order does not matter.
        strings[token_id] = min(string, strings.get(token_id, string))
    return strings


def first_string_difference(
    target_tokens: dict[int, str], draft_tokens: dict[int, str], start: int = 0
) -> TokenDifference | None:
    """Return the lowest id >= `start` whose strings differ or that only one of the two has."""
    for token_id in sorted(target_tokens.keys() | draft_tokens.keys()):
        if token_id >= start and target_tokens.get(token_id) != draft_tokens.get(token_id):
            return token_id, target_tokens.get(token_id), draft_tokens.get(token_id)
    return None


def added_ends(tokenizer: Any) -> list[str]:
    """Return the tokens that a tokenizer adds to a text, such as bos."""
    strings = tokens_by_id(tokenizer)
    return [strings.get(one, str(one)) for one in tokenizer("")["input_ids"]]


def _tree(tokenizer: Any) -> dict[str, Any]:
    """Return the entries of tokenizer.json and of its `model`, the merges as a hash."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    tree = json.loads(core.to_str()) if core is not None else {"model": {"type": type(tokenizer).__name__}}
    merges = json.dumps(tree["model"].get("merges")).encode()
    return tree | tree["model"] | {"merges": hashlib.sha256(merges).hexdigest()[:8]}


# Name of a check -> (file: key, the value of a tokenizer).
_SETTINGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "ends": ("tokenizer.json: post_processor (tokenizer_config.json: add_bos_token, add_eos_token)", added_ends),
    "added": ("tokenizer.json: added_tokens", lambda one: one.get_added_vocab()),
    "kind": ("tokenizer.json: model", lambda one: {key: _tree(one).get(key) for key in ("type", "byte_fallback")}),
    "rules": (
        "tokenizer.json",
        lambda one: {key: _tree(one).get(key) for key in ("normalizer", "pre_tokenizer", "merges")},
    ),
    "roles": (
        "tokenizer_config.json",
        lambda one: {f"{role}_token": getattr(one, f"{role}_token", None) for role in ROLES},
    ),
    "template": (
        "chat_template.jinja (tokenizer_config.json: chat_template)",
        lambda one: getattr(one, "chat_template", None),
    ),
}


def tokenizer_differences(target: Any, draft: Any) -> dict[str, str]:
    """Return every setting of two tokenizers that differs, by name, as text: file, key and both values (of mappings, what differs)."""
    differences = {}
    for name, (place, read) in _SETTINGS.items():
        ours, theirs = read(target), read(draft)
        if isinstance(ours, dict):
            ours, theirs = ({k: v for k, v in a.items() if b.get(k) != v} for a, b in ((ours, theirs), (theirs, ours)))
        if ours != theirs:
            differences[name] = f"{place}: {shown(ours)} in the target, {shown(theirs)} in the draft"
    return differences


def shown(value: Any) -> str:
    """Return a value as text on one line, cut if it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def compare_vocabularies(
    target_tokenizer: Any, target_rows: int, draft_tokenizer: Any, draft_rows: int, found: TokenDifference | None = None
) -> VocabularyAgreement:
    """Compare the vocabularies of two `transformers` tokenizers id by id. Rows: see `vocabulary_rows`; ``found``: what they do not show."""
    target_tokens, draft_tokens = tokens_by_id(target_tokenizer), tokens_by_id(draft_tokenizer)
    token_rows = min(max(target_tokens, default=-1) + 1, target_rows)
    rowless = tuple(i for i in sorted(target_tokens) if draft_rows <= i < target_rows)

    def agreement(verdict: Any, detail: str) -> VocabularyAgreement:
        return VocabularyAgreement(verdict, detail, draft_rows, token_rows, rowless)

    if difference := found or first_string_difference(target_tokens, draft_tokens):
        return agreement("refuse", f"token id {difference[0]} is {_sides(*difference[1:])}")
    # Special tokens without a role, such as image tokens, are not text, so they may get a made-up row.
    unused = special_ids(target_tokenizer) - {getattr(target_tokenizer, f"{role}_token_id", None) for role in ROLES}
    if needed := [i for i in rowless if i not in unused]:
        detail = f"token id {needed[0]} is {_quoted(target_tokens[needed[0]])} and the draft has only {draft_rows} rows"
        return agreement("refuse", detail)
    repairs = [f"{_quoted(target_tokens[i])} is special and gets a made-up row" for i in rowless]
    if draft_rows != target_rows:
        how = "padded" if draft_rows < target_rows else "trimmed"
        repairs.append(f"the draft's {draft_rows} rows are {how} to the target's {target_rows}")
    repairs += _role_differences(target_tokenizer, draft_tokenizer, target_tokens)[:1]
    compared = len(target_tokens.keys() | draft_tokens.keys())
    if not repairs:
        return agreement("agree", f"all {compared} token strings and {target_rows} rows are the same")
    return agreement("repair", f"all {compared} token strings are the same; " + "; ".join(repairs))


def require_agreement(agreement: VocabularyAgreement) -> VocabularyAgreement:
    """Raise `UserError` with the first differing id and both strings if `compare_vocabularies` refuses."""
    if agreement.verdict == "refuse":
        raise UserError(
            f"draft and target do not share a vocabulary: {agreement.detail}; choose a draft of the target's family, "
            "or carve one from the target"
        )
    return agreement


def refuse_rowless(agreement: VocabularyAgreement, tokenizer: Any, texts: Iterable[Sequence[int]]) -> None:
    """Raise `UserError` if a text (token ids) uses a special token that has no row of its own in the draft."""
    rowless = set(agreement.rowless)
    for ids in texts if rowless else ():
        if used := rowless.intersection(ids):
            token = _quoted(tokens_by_id(tokenizer).get(min(used)))
            raise UserError(
                f"draft and target do not share a vocabulary: a prompt (or its end) uses {token}, and the draft has only "
                f"{agreement.draft_rows} rows; leave such prompts out, or carve a draft from the target"
            )


def repair_rows(model: Any, rows: int, token_rows: int) -> None:
    """Pad or trim the input embedding and the head of a causal LM to `rows`, in place, and set `config.vocab_size`.

    A new row is the mean of the real rows, in the embedding, the head and the head's bias. Its logit is then
    mean_v(logit_v), a convex combination of the real logits, so it is never the strict maximum: a padded id is never
    the draft's argmax, and by Jensen's inequality its softmax weight is at most that of an average token. (In low
    precision the rounding of the mean counts only where all logits are equal to within that rounding.)
    Tied weights stay tied. Parameters are replaced: build the optimizer afterwards.

    ``token_rows``: see `VocabularyAgreement`; rows after them do not enter the mean.

    Raises UserError: a row that holds a token would be trimmed.
    """
    old_rows = model.get_input_embeddings().weight.shape[0]
    real_rows = min(token_rows, old_rows)
    if rows < real_rows:
        raise UserError(
            f"cannot trim the draft to {rows} rows: row {rows} belongs to a token ({real_rows} rows do); "
            "use a draft with the target's tokenizer"
        )
    if rows == old_rows:
        return
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # transformers initialises new rows at random; the fork keeps this out of the run's random state.
        matrices = row_tensors(model)
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in matrices]
        means = [tensor[:real_rows].mean(dim=0, dtype=dtype) for tensor, dtype in zip(matrices, wide, strict=True)]
        model.resize_token_embeddings(rows, mean_resizing=False)
        for tensor, mean in zip(row_tensors(model), means, strict=True):
            assert tensor.shape[0] == rows
            tensor[old_rows:] = mean.to(tensor.dtype)
    model.config.get_text_config().vocab_size = rows


def untie_for_adapters(model: Any, adapted: Sequence[str] | str) -> bool:
    """Give a tied head its own weights if an adapter (names as in peft) targets it or the embedding. Return whether it did.

    Merged into one of two tied tables, it would change the other too. UserError: engines always load this head as tied.
    """
    config, tables = model.config.get_text_config(), (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f".{name}" for name, module in model.named_modules() if module in tables]
    wanted = () if isinstance(adapted, str) else adapted  # all-linear excludes the head
    if not config.tie_word_embeddings or not any(name.endswith(f".{one}") for name in names for one in wanted):
        return False
    refuse_tied(config, wanted)
    give_own_head(model)
    return True


def give_own_head(model: Any) -> None:
    """Untie a tied head, in place: it gets a copy of the weights."""
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


def refuse_two_heads(what: str, model: Any) -> None:
    """Raise UserError if the config ties the head to the embedding and the two differ: engines then disagree about the model."""
    head = model.get_output_embeddings()
    if head is None or not model.config.tie_word_embeddings or quantization_of(model.config) is not None:
        return
    table = model.get_input_embeddings().weight
    if (
        head.weight is not table
        and head.weight.shape == table.shape
        and not torch.equal(head.weight.cpu(), table.cpu())
    ):
        raise UserError(
            f"{what}: config.json says tie_word_embeddings: true, but the file has a head that differs from the embedding: transformers 5 "
            "computes with it, engines without; set it to false in config.json, or delete the head's weight (lm_head.weight)"
        )


def refuse_tied(text_config: Any, adapted: Sequence[str]) -> None:
    """Raise UserError if an adapter targets a tied head that must stay tied."""
    if text_config.tie_word_embeddings and text_config.model_type not in UNTIED_IN_ENGINES:
        raise UserError(
            f"student.lora.target_modules = {list(adapted)}: the head is tied to the embedding, so merging an adapter into one would "
            f"change the other, and engines load {text_config.model_type} as tied only; leave the head and the embedding out"
        )


def row_tensors(model: Any) -> list[torch.Tensor]:
    """Return the tensors with one line per vocabulary row: embedding, head (once if tied), head bias."""
    tensors = [model.get_input_embeddings().weight]
    head: nn.Module | None = model.get_output_embeddings()
    if head is not None:
        if head.weight is not tensors[0]:
            tensors.append(head.weight)  # type: ignore[arg-type]
        if getattr(head, "bias", None) is not None:
            tensors.append(head.bias)  # type: ignore[arg-type]
    return tensors


def _role_differences(target_tokenizer: Any, draft_tokenizer: Any, target_tokens: dict[int, str]) -> list[str]:
    """Return phrases: roles (bos, eos, pad, unk) with different tokens, then the lowest id whose `special` flag differs."""
    phrases = []
    for role in ROLES:
        ids = [getattr(one, f"{role}_token_id", None) for one in (target_tokenizer, draft_tokenizer)]
        if ids[0] != ids[1]:
            strings = (None if i is None else target_tokens.get(i) for i in ids)
            phrases.append(f"{role} is {_sides(*strings)}: the target's is used")
    if differing := special_ids(target_tokenizer) ^ special_ids(draft_tokenizer):
        string = _quoted(target_tokens.get(min(differing)))
        phrases.append(f"{string} is special in one tokenizer only: the target's flag is used")
    return phrases


def _sides(target: str | None, draft: str | None) -> str:
    return f"{_quoted(target)} in the target and {_quoted(draft)} in the draft"


def role_ids(rows: int, *places: Any) -> dict[str, Any]:
    """Return bos, eos and pad id, each from the first place (tokenizer or config) that has one with a row; other models cannot be built."""
    ids: dict[str, Any] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values = (getattr(place, name, None) for place in places)
        with_rows = ([i for i in v if i < rows] if isinstance(v, list) else v for v in values if v is not None)
        ids[name] = next((v for v in with_rows if v != [] and (isinstance(v, list) or v < rows)), None)
    return ids


def tokens_without_row(tokenizer: Any, rows: int) -> dict[int, str]:
    """Return the tokens that a model of these rows cannot read, by id, rising."""
    return {i: string for i, string in sorted(tokens_by_id(tokenizer).items()) if i >= rows}


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids that the tokenizer marks as special in any way."""
    flagged = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return flagged | set(tokenizer.all_special_ids)


def _quoted(string: str | None) -> str:
    return "no token" if string is None else repr(string)
