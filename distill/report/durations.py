"""Parse durations such as `25ms`, `0.025s` or `3us`; a plain number is milliseconds."""

import math
import re

from speculative.errors import UserError

# Both characters that look like a micro sign: U+00B5, which keyboards have, and the Greek letter.
SECONDS_OF = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9, "": 1e-3}
_DURATION = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z\u00b5\u03bc]*)\s*", re.IGNORECASE)


def parse_seconds(text: str, option: str) -> float:
    """Seconds of a duration: a number followed by s, ms, us, µs or ns, or a plain number of milliseconds.

    Raises UserError, with the option in the message, for anything else and for a time that is not above 0 or not finite.
    """
    match = _DURATION.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in SECONDS_OF:
        raise UserError(f"{option} {text}: give a time such as 25ms, 0.025s or 300us (a plain number is milliseconds)")
    seconds = float(match.group(1)) * SECONDS_OF[unit]
    if not (seconds > 0 and math.isfinite(seconds)):
        raise UserError(f"{option} {text}: a time must be above 0 and finite")
    return seconds
