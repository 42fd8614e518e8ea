"""`understudy gateway`: makes arms, a log writer and a server from the options, and serves until it is stopped."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError

from data.responses.endpoint_keys import key_in
from data.responses.engine_http import listening
from distill.live.arms import ARMS, BY_FLAGS, Arm, Arms, read_arms, write_arms
from distill.live.gateway.app import MOST_CLIENTS, Gateway
from distill.live.gateway.limits import HEADER_BYTES, TimedProtocol
from distill.live.gateway.request import parse_sampling
from distill.live.options import GatewayOptions
from distill.live.traffic.record import first_fault
from distill.live.traffic.writer import LogWriter
from speculative.errors import UserError

_GRACE_SECONDS = 10
_OWN_FILES = 64


def gateway(options: GatewayOptions) -> None:
    """Serve until SIGINT or SIGTERM; responses in flight get _GRACE_SECONDS to end.

    Raises UserError: invalid options, a log directory in use, a port in use.
    """
    os.umask(0o077)
    flags, key = arms_of(options), key_in(options.api_key_env) or None
    parse_sampling(options.sampling)  # refused here, before anything is created
    with listening(options.host, options.port, key is not None) as listener:
        writer = LogWriter(options.log, options.text, options.retention_days)
        arms = _begin_with(options.log / ARMS, flags)
        config = configured(Gateway(options, key, arms, writer, _allowed_clients()))
        host, port = listener.getsockname()[:2]
        print(f"the gateway answers at http://{f'[{host}]' if ':' in host else host}:{port}, logging to {options.log}")
        for arm in arms.arms:
            when = f"share {arm.share:g}" if arm.drafts else "under load"
            print(f"  {arm.name}: {arm.url}, {when}, draft {arm.draft_version}")
        sys.stdout.flush()
        uvicorn.Server(config).run(sockets=[listener])


def configured(gateway: Gateway) -> uvicorn.Config:
    """The server of a gateway."""
    protocol: Any = TimedProtocol
    return uvicorn.Config(
        gateway.app(),
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


def arms_of(options: GatewayOptions) -> Arms:
    """The arms of the flags: a, and `plain` for the engine without a draft. Raises UserError: two engines, no address, an odd version."""
    if len(options.engine) > 1:
        raise UserError(
            f"--engine {options.engine[1]}: give one engine; `understudy rollout` adds the one of a new draft"
        )
    try:
        arms = [Arm("a", options.engine[0], 1.0, options.draft_version, options.target_version)]
        if options.plain_engine:
            arms.append(Arm("plain", options.plain_engine, 0.0, "none", options.target_version, drafts=False))
        return Arms(BY_FLAGS, tuple(arms))
    except ValidationError as error:
        raise UserError(f"arm {first_fault(error)}") from error


def _allowed_clients() -> int:
    """The number of clients for which there are open files: two each, one of them for the engine. The usual limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * MOST_CLIENTS + _OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            print(f"fewer clients than {MOST_CLIENTS} at once, because the system allows {soft} open files (ulimit -n)")
            return max(1, (soft - _OWN_FILES) // 2)
    return MOST_CLIENTS


def _begin_with(path: Path, flags: Arms) -> Arms:
    """The arms in the file if a rollout wrote them; otherwise write the flags' arms to the file."""
    if path.exists():
        written = read_arms(path)
        if written.by != BY_FLAGS:
            print(f"{path}: keeping the arms of {written.by}; delete the file to start from the flags")
            return written
    write_arms(path, flags)
    return flags
