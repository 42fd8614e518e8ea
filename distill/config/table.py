"""All keys of a config as Markdown tables, made from the fields of `RunConfig`.

`understudy config` prints them, and docs/reference/config.md contains them.
"""

from pydantic.fields import FieldInfo

from distill.config.run import RunConfig
from distill.config.sections import Section, section_in

# The keys that people set most, in the order of a config file.
COMMON = (
    "name",
    "target.path",
    "student.init",
    "student.path",
    "data.train.N.path",
    "serving.engine",
    "serving.temperature",
    "serving.top_p",
    "serving.max_tokens",
    "loss.name",
    "optim.lr",
    "train.epochs",
    "train.batch_size",
    "judge.every",
    "judge.gamma",
)
HEAD = "| key | default | meaning |\n|---|---|---|\n"


def print_table(_: object) -> None:
    print(config_table())


def config_table() -> str:
    """The most used keys in one table, then all keys in another: dotted name, default, meaning."""
    rows = _rows(RunConfig, "", {})
    common = "\n".join(f"| **`{key}`** | {rows[key]} |" for key in COMMON)
    every = "\n".join(f"| {f'**`{key}`**' if key in COMMON else f'`{key}`'} | {row} |" for key, row in rows.items())
    return f"## Most used keys\n\n{HEAD}{common}\n\n## All keys\n\nThe most used keys are bold.\n\n{HEAD}{every}"


def _rows(section: type[Section], prefix: str, seen: dict[type[Section], str]) -> dict[str, str]:
    """Dotted name -> "default | meaning". ``seen``: sections that have their rows, and where; their keys are not repeated."""
    rows: dict[str, str] = {}
    for name, field in section.model_fields.items():
        key, meaning = f"{prefix}{name}", " ".join((field.description or "").split()).replace("|", "\\|")
        inner = section_in(field.annotation)
        if inner is None:
            rows[key] = f"{_default(field)} | {meaning}"
            continue
        if "tuple" in str(field.annotation):
            key = f"{key}.N"
        if inner in seen:
            rows[f"{key}.*"] = f"{_default(field)} | {meaning}; the same keys as `{seen[inner]}.*`"
            continue
        seen[inner] = key
        if meaning:
            rows[key] = f"{_default(field)} | {meaning}"
        rows.update(_rows(inner, f"{key}.", seen))
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "null" if value is None else f"`{list(value) if isinstance(value, tuple) else value}`"
