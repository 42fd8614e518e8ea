"""What is a name on the Hugging Face hub and what a local path, and whether the hub can be reached."""

import functools
import logging
import re
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id

_CACHED = re.compile(r"(?:models|datasets)--([^/]+)/snapshots/[^/]+/?$")
# The hub has no users of the first names, and a run's folder has the last.
# Of these answers the hub's client asks again, for a minute and for each file.
TRIED_AGAIN = (429, 500, 502, 503, 504)
_LOCAL = ("models", "datasets", "spaces", "runs")


def hub_id(path: str) -> str | None:
    """The hub's name of a model or dataset: a snapshot in the hub's cache, or a name that is no local path; else None.

    `a/b` is a local path if `a` is a folder here and the cache has no `a/b`.
    """
    path = re.sub(r"(^|/)[^/]+\.gguf$", "", path)  # A file of a repository.
    if match := _CACHED.search(path):
        return match[1].replace("--", "/")
    owner, _, name = path.partition("/")
    try:
        validate_repo_id(path)
    except HFValidationError:
        return None
    cached = any(Path(constants.HF_HUB_CACHE).glob(f"*s--{path.replace('/', '--')}"))
    local = Path(path).exists() or owner in _LOCAL or (name and Path(owner).is_dir() and not cached)
    return None if local else path


@functools.cache
def reach_hub(endpoint: str) -> None:
    """Ask the hub for a sign of life once; without one, only its cache is read from now on, instead of retries for each file."""
    try:
        if not constants.HF_HUB_OFFLINE:
            status = get_session().head(endpoint, timeout=constants.HF_HUB_ETAG_TIMEOUT).status_code
            if status in TRIED_AGAIN:
                raise HTTPError(f"status {status}")
    except HTTPError:
        logging.getLogger(__name__).warning("the hub cannot be reached, so only its cache on this machine is used")
        constants.HF_HUB_OFFLINE = True
