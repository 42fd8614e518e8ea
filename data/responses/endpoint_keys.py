"""Settings of a target behind servers. Needs no torch, so that reading a config is fast."""

import contextlib
import os
import re
import urllib.parse
from typing import Literal

from pydantic import Field, field_validator

from data.prompts.prompt import Section
from speculative.errors import UserError

SERVER = "vLLM 0.10.2 or later"  # What gives responses and top-k signals; SGLang gives responses only.


class Endpoint(Section):
    """The target at OpenAI-compatible servers (vLLM; SGLang gives responses only). The fields are keys of a config."""

    urls: tuple[str, ...] = Field(
        min_length=1, description="addresses of the servers, each including /v1; each answers what it has room for"
    )
    weights: Literal["local", "server"] = Field(
        "local",
        description="local: the servers answer, and the weights of `path` do the rest; server: the servers score too, and only config "
        "and tokenizer of `path` are read",
    )
    model: str | None = Field(None, description="name of the model at the servers; null = the only one served")
    api_key_env: str = Field("", description="environment variable with the API key, e.g. OPENAI_API_KEY; empty = none")
    concurrency: int = Field(32, ge=1, description="requests sent at once to each server")
    timeout: float = Field(600.0, gt=0, description="timeout of one request in seconds")

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := next((url for url in urls if not is_address(url)), None):
            raise ValueError(f"{wrong} is not an address; write e.g. http://127.0.0.1:8000/v1")
        if len({root_of(url) for url in urls}) < len(urls):
            raise ValueError("an address is listed twice; target.endpoint.concurrency says how many requests each gets")
        return urls

    @property
    def url(self) -> str:
        """The first address; objects that talk to one server have an endpoint with one."""
        return self.urls[0]


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
