"""Base class of everything stored as JSON: frozen records, and reading them from a file."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, InstanceOf, ValidationError

from speculative.errors import UserError

# Text of models may not be valid UTF-8, so only its type is checked.
Text = InstanceOf[str]


def version_of(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


VERSION = version_of("understudy") or "unknown"


class Record(BaseModel):
    """A frozen record. Unknown keys are preserved, and keys that were never set are not written."""

    FORMAT: ClassVar[int | None] = None
    FILE: ClassVar[str] = ""
    REMEDY: ClassVar[str] = "delete it, and start the command again"  # for a damaged file; {folder} is filled in
    ABSENT: ClassVar[str] = "not there"
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    def record(self) -> dict[str, Any]:
        """Plain values, as they are written to disk."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def stored(cls, place: Path) -> Self | None:
        """The record in a folder's `FILE`, or in a file where records of a class have no name of their own; None if there is none."""
        return cls.read(place / cls.FILE) if (place / cls.FILE).exists() else None

    @classmethod
    def read(cls, path: Path, remedy: str = "") -> Self:
        """The record that a JSON file holds. ``remedy``: for a damaged file; by default the class's.

        Raises UserError: missing, not readable, damaged (NaN is not valid JSON), or a key is missing or has an invalid value.
        """
        remedy = remedy or cls.REMEDY.format(folder=path.parent)
        try:
            tree = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
            if cls.FORMAT is not None and isinstance(tree, dict) and tree.get("format") != cls.FORMAT:
                made = tree.get("format", 1)
                by = "0.1" if made == 1 else tree.get("version")
                raise UserError(
                    f"{path}: written by version {by} of understudy (format {made}); "
                    f"version {VERSION} reads format {cls.FORMAT}: create it again in a new folder, or read it with that version"
                )
            return cls.model_validate(tree)
        except UserError:
            raise
        except FileNotFoundError as error:
            raise UserError(f"{path}: {cls.ABSENT}") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            fault = (
                "is missing" if first["type"] in ("missing", "too_short") else f"has an invalid value ({first['msg']})"
            )
            what = f"key {_dotted(first['loc'])}" if first["loc"] else "the file"
            raise UserError(f"{path}: {what} {fault}; {remedy}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); {remedy}") from error


def _dotted(place: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
