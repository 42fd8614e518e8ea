"""The configuration as a Markdown table, made from the config's own fields; docs/reference/config.md carries it and a test compares."""

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from distill.config.run import RunConfig
from distill.config.sections import Section, section_in


def print_table(_: object) -> None:
    """Prints the table."""
    print(config_table())


def config_table() -> str:
    """One row per key: dotted name, default, meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines.extend(_rows(RunConfig, ""))
    return "\n".join(lines)


def _rows(section: type[Section], prefix: str) -> list[str]:
    rows: list[str] = []
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            mark = ".N" if "tuple" in str(field.annotation) else ""
            rows.extend(_rows(inner, f"{prefix}{name}{mark}."))
        else:
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {meaning} |")
    return rows


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value = field.default_factory()  # type: ignore[call-arg]
    elif field.default is PydanticUndefined:
        return "required"
    else:
        value = field.default
    if value is None:
        return "null"
    return f"`{list(value) if isinstance(value, tuple) else value}`"
