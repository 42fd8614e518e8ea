"""The keys of result.json as Markdown, made from the types' own fields; docs/reference/verdict.md carries it."""

import types
import typing
from dataclasses import is_dataclass
from typing import Any

from distill.run.result import Result
from speculative.measure.record import Record

WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}


def key_table() -> str:
    """One table for each kind of thing in result.json, the file itself first; rows: key, type, meaning."""
    parts: list[str] = []
    waiting: list[type[Any]] = [Result]
    for model in waiting:
        if is_dataclass(model):
            parts.append(_dataclass_table(model))
            continue
        parent = model.__base__
        own = model.model_fields.items() if parent is Record else model.__annotations__.items()
        fields = [(name, model.model_fields[name]) for name, _ in own]
        found = [parent, *(_record_in(field.annotation) for _, field in fields)]
        waiting += [one for one in dict.fromkeys(found) if one not in (None, Record, *waiting)]
        rows = [
            f"| `{name}` | {_kind(field.annotation)} | {(field.description or '').replace('|', chr(92) + '|')} |"
            for name, field in fields
        ]
        about = " ".join((model.__doc__ or "").split())
        more = "" if parent is Record else f" The keys of `{parent.__name__}`, and:"
        title = f"`{model.__name__}`: {about}{more}"
        parts.append("\n".join([title, "", "| key | type | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _dataclass_table(model: type) -> str:
    """Of a dataclass whose annotations carry the meaning; where they do not, its docstring does."""
    hints = typing.get_type_hints(model, include_extras=True)
    told = {name: (getattr(hint, "__metadata__", None) or ("see above",))[0] for name, hint in hints.items()}
    rows = [f"| `{name}` | {_kind(hint)} | {told[name]} |" for name, hint in hints.items()]
    about = " ".join((model.__doc__ or "").split())
    return "\n".join([f"`{model.__name__}`: {about}", "", "| key | type | meaning |", "|---|---|---|", *rows])


def _record_in(annotation: Any) -> type[Any] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, Record) or is_dataclass(annotation) else None
    return next((found for part in typing.get_args(annotation) if (found := _record_in(part))), None)


def _kind(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(parts[0])
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if part is types.NoneType else _kind(part) for part in parts)
    if origin is list:
        return f"list of {_kind(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_kind, parts))}]"
    if origin is dict:
        return f"{{{_kind(parts[0])}: {_kind(parts[1])}}}"
    return WORDS.get(annotation) or f"`{annotation.__name__}`"


if __name__ == "__main__":
    print(key_table())
