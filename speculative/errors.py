"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A mistake in a file, an option or a model that the user can mend.

    The message is a single line that names the file, key or value and the fix. Command-line programs print it without a
    traceback and exit with status 2.
    """


class TooLittleMemory(UserError):
    """What was asked for does not fit into the memory that is free; less of it may."""
