"""Settings of a target behind a server. Needs no torch, so that reading a config is fast."""

import contextlib
import os
import re
import urllib.parse

from pydantic import Field

from data.prompts.prompt import Section
from speculative.errors import UserError

SERVER = "vLLM 0.10.2 or later"  # What gives responses and top-k signals; SGLang gives responses only.


class Endpoint(Section):
    """The target at an OpenAI-compatible server (vLLM; SGLang gives responses only). The fields are keys of a config."""

    url: str = Field(description="address of the server, including /v1")
    model: str | None = Field(None, description="name of the model at the server; null = the only one served")
    api_key_env: str = Field("", description="environment variable with the API key, e.g. OPENAI_API_KEY; empty = none")
    concurrency: int = Field(32, ge=1, description="requests sent at once")
    timeout: float = Field(600.0, gt=0, description="timeout of one request in seconds")
    retries: int = Field(5, ge=0, description="how often a request is repeated after a dropped connection, 429 or 5xx")


def is_address(url: str) -> bool:
    """Whether this is an http or https address with a valid host."""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        valid_host = re.fullmatch(r"[\w.:-]+", parts.hostname or "") is not None
        return parts.scheme in ("http", "https") and valid_host and parts.port != 0 and not parts.query
    return False


def key_in(variable: str) -> str:
    """The API key in the variable that ``--api-key-env`` names; empty if it names none; UserError if the variable is empty."""
    if variable and not os.environ.get(variable):
        raise UserError(f"--api-key-env {variable}: the variable is empty; export it with the API key")
    return os.environ[variable] if variable else ""


def root_of(url: str) -> str:
    """The address without /v1, where a server has its counters."""
    return url.rstrip("/").removesuffix("/v1")
