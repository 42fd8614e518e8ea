"""`understudy gateway`: options into arms, a writer and a server; runs until it is ended."""

import os
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from data.responses.endpoint_keys import key_in, root_of
from distill.commands.serve import listening
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
    """Serves until SIGINT or SIGTERM; answers in flight have some seconds to end.

    Raises:
        UserError: options that cannot be, a log directory in use, a port in use.
    """
    os.umask(0o077)
    flags, key = arms_of(options), key_in(options.api_key_env) or None
    parse_sampling(options.sampling)  # refused here, before anything is there
    with listening(options.host, options.port, key is not None) as listener:
        writer = LogWriter(
            options.log, options.text, options.reservoir, options.retention_days, trust_clock=options.trust_clock
        )
        arms = _begin_with(options.log / ARMS, flags)
        config = configured(Gateway(options, key, arms, writer), _clients_for(options.max_connections))
        host, port = listener.getsockname()[:2]
        print(f"the gateway answers at http://{f'[{host}]' if ':' in host else host}:{port}, its log is {options.log}")
        for arm in arms.arms:
            when = f"share {arm.share:g}" if arm.drafts else "under load"
            print(f"  {arm.name}: {arm.url}, {when}, draft {arm.draft_version}")
        sys.stdout.flush()
        uvicorn.Server(config).run(sockets=[listener])


def configured(gateway: Gateway, clients: int) -> uvicorn.Config:
    """A server of the gateway for so many clients at once. A request may take twice its largest body, for chunks of few bytes each."""
    limits = Limits(clients, 2 * gateway.options.max_body + HEADER_BYTES)
    protocol: Any = partial(BoundedProtocol, limits)
    return uvicorn.Config(
        gateway.app(), http=protocol, ws="none", lifespan="on", log_config=None, log_level="critical", access_log=False,
        proxy_headers=False, server_header=False, date_header=False, h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )  # fmt: skip


def arms_of(options: GatewayOptions) -> Arms:
    """The arms that the flags name: a, b, .. with the shares of those behind the first; `plain` for the one without a draft.

    Raises:
        UserError: shares or versions that do not fit the engines.
    """
    engines, shares, versions = options.engine, options.share or [], options.draft_version or []
    if len(engines) > len(_NAMES) or len(shares) != len(engines) - 1:
        raise UserError(f"--share: {len(shares)} for {len(engines)} engines; give one for each further --engine")
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
    """How many clients this process may have files for: each takes one, and its engine another; systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    needed = 2 * wanted + _OWN_FILES
    most = max(soft, needed if hard == resource.RLIM_INFINITY else min(hard, needed))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if (clients := min(wanted, (most - _OWN_FILES) // 2)) < wanted:
        print(f"--max-connections: {clients} and not {wanted}, for the system gives {most} open files (ulimit -n)")
    return max(1, clients)


def _begin_with(path: Path, flags: Arms) -> Arms:
    """Those of the file when a rollout wrote them, else those of the flags, which are in the file then."""
    if path.exists():
        written = read_arms(path)
        if written.by != BY_FLAGS:
            print(f"{path}: the arms are those of {written.by}; delete the file to begin with the flags")
            return written
    write_arms(path, flags)
    return flags
