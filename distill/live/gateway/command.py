"""`understudy gateway`: makes arms, a log writer and a server from the options, and serves until it is stopped."""

import os
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from data.responses.endpoint_keys import key_in, root_of
from data.responses.engine_http import listening
from distill.live.arms import ARMS, BY_FLAGS, Arm, Arms, read_arms, write_arms
from distill.live.gateway.app import Gateway
from distill.live.gateway.limits import HEADER_BYTES, BoundedProtocol, Limits
from distill.live.gateway.request import parse_sampling
from distill.live.options import GatewayOptions
from distill.live.traffic.writer import LogWriter
from speculative.errors import UserError

_NAMES = "abcdefghijklmnopqrstuvwxyz"
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
        writer = LogWriter(
            options.log, options.text, options.reservoir, options.retention_days, trust_clock=options.trust_clock
        )
        arms = _begin_with(options.log / ARMS, flags)
        config = configured(Gateway(options, key, arms, writer), _clients_for(options.max_connections))
        host, port = listener.getsockname()[:2]
        print(f"the gateway answers at http://{f'[{host}]' if ':' in host else host}:{port}, logging to {options.log}")
        for arm in arms.arms:
            when = f"share {arm.share:g}" if arm.drafts else "under load"
            print(f"  {arm.name}: {arm.url}, {when}, draft {arm.draft_version}")
        sys.stdout.flush()
        uvicorn.Server(config).run(sockets=[listener])


def configured(gateway: Gateway, clients: int) -> uvicorn.Config:
    """The server for this number of clients at once. A request may be twice its largest body, because chunks can be tiny."""
    limits = Limits(clients, 2 * gateway.options.max_body + HEADER_BYTES)
    protocol: Any = partial(BoundedProtocol, limits)
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
    """The arms of the flags: a, b, .. in order, `plain` for the engine without a draft. The first arm gets the rest of the shares.

    Raises UserError: shares or versions that do not fit the engines.
    """
    engines, shares, versions = options.engine, options.share or [], options.draft_version or []
    if len(engines) > len(_NAMES) or len(shares) != len(engines) - 1:
        raise UserError(
            f"--share: {len(shares)} for {len(engines)} engines; give one for each --engine after the first"
        )
    if len(versions) > len(engines):
        raise UserError(f"--draft-version: {len(versions)} for {len(engines)} engines; at most one each, in order")
    versions = [*versions, *["unknown"] * (len(engines) - len(versions))]
    arms = [
        Arm(name, root_of(url), share, version, options.target_version)
        for name, url, share, version in zip(_NAMES, engines, [1 - sum(shares), *shares], versions, strict=False)
    ]
    if options.plain_engine:
        arms.append(Arm("plain", root_of(options.plain_engine), 0.0, "none", options.target_version, drafts=False))
    return Arms(BY_FLAGS, tuple(arms))


def _clients_for(wanted: int) -> int:
    """The number of clients for which there are open files: two each, one of them for the engine. The usual limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = 2 * wanted + _OWN_FILES
    most = max(soft, needed if hard == resource.RLIM_INFINITY else min(hard, needed))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if (clients := min(wanted, (most - _OWN_FILES) // 2)) < wanted:
        print(f"--max-connections: {clients}, not {wanted}, because the system allows {most} open files (ulimit -n)")
    return max(1, clients)


def _begin_with(path: Path, flags: Arms) -> Arms:
    """The arms in the file if a rollout wrote them; otherwise write the flags' arms to the file."""
    if path.exists():
        written = read_arms(path)
        if written.by != BY_FLAGS:
            print(f"{path}: keeping the arms of {written.by}; delete the file to start from the flags")
            return written
    write_arms(path, flags)
    return flags
