"""The one exception that means "the user can fix this"."""

LONGEST = 2000  # characters of a message
# Torch raises a plain RuntimeError for some kinds of memory.
OUT_OF_MEMORY = ("allocate memory", "out of memory", "ALLOC_FAILED", "OutOfMemoryError")


class UserError(ValueError):
    """A mistake in a file, an option or a model that the user can fix.

    The message is a single line that names the file, key or value and the fix. Command-line programs print it without a
    traceback and exit with status 2. What it quotes may come from a foreign file: control characters are
    escaped, and the middle of a long message is left out.
    """

    def __init__(self, message: str) -> None:
        line = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in message)
        half = LONGEST // 2 - 2
        super().__init__(line if len(line) <= LONGEST else f"{line[:half]} .. {line[-half:]}")


class TooLittleMemory(UserError):
    """The request does not fit into free memory; a smaller request may fit."""


def out_of_memory(error: Exception) -> bool:
    """Whether torch found too little memory."""
    return isinstance(error, RuntimeError) and any(words in repr(error) for words in OUT_OF_MEMORY)
