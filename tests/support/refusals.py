"""What a refusal says."""

from collections.abc import Callable
from typing import Any

import pytest

from speculative.errors import UserError


def refused(call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(UserError) as error:
        call(*given, **named)
    text = str(error.value)
    assert "\n" not in text, text
    return text
