"""Ways to decode as a user names them: in judge.ways, `generate --drafter` and `compare`."""

from typing import TYPE_CHECKING

from distill.config.retired import retired
from speculative.errors import UserError

if TYPE_CHECKING:
    from speculative.drafters.registry import Recipe


def way_named(name: str) -> "Recipe":
    """The way of this name. Raises UserError for an unknown and for a retired name."""
    from speculative.drafters.registry import recipes  # Imported late: reading a config needs no torch.

    if instead := retired(f"way: {name}"):
        raise UserError(instead)
    if name not in recipes():
        raise UserError(f"unknown way to decode {name!r}: must be one of {', '.join(sorted(recipes()))}")
    return recipes()[name]
