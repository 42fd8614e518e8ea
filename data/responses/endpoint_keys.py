"""Where a server is, as a user says it. Free of torch, so that a config is read at once."""

import contextlib
import os
import re
import urllib.parse
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from speculative.errors import UserError


class Endpoint(BaseModel):
    """The target behind an OpenAI-compatible server (vLLM; SGLang gives responses only); a config's keys are these."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    url: str = Field(description="up to and with /v1")
    api: Literal["completions", "chat"] = Field(
        "completions", description="chat: a hosted API of messages; goes with signal.source: response_logprobs"
    )
    model: str | None = Field(None, description="its name there; null = the only one served")
    api_key_env: str = Field(
        "", description="environment variable with the key, e.g. OPENAI_API_KEY; empty: none is sent"
    )
    concurrency: int = Field(32, ge=1, description="requests under way at once")
    timeout: float = Field(600.0, gt=0, description="seconds of one request")
    retries: int = Field(5, ge=0, description="of a request that meets a dropped connection, 429 or 5xx")


def is_address(url: str) -> bool:
    """Whether this is an http address of a host."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        valid_host = re.fullmatch(r"[\w.:-]+", parts.hostname or "") is not None
        return parts.scheme in ("http", "https") and valid_host and parts.port != 0 and not parts.query
    return False


def key_in(variable: str) -> str:
    """The key that ``--api-key-env`` gives the variable of; empty where it gives none.

    Raises:
        UserError: nothing is in that variable.
    """
    if variable and not os.environ.get(variable):
        raise UserError(f"--api-key-env {variable}: the variable is empty; export it with the key")
    return os.environ[variable] if variable else ""


def root_of(url: str) -> str:
    """The server itself, where its counters are, of an address with or without /v1."""
    return url.rstrip("/").removesuffix("/v1")
