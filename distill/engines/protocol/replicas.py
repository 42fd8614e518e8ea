"""Replicas of a run's target in an installed engine: they answer its prompts, and end with the block that started them."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from data.responses.engine_http import listening
from distill.engines.protocol.engine import Replica
from distill.engines.protocol.process import Ended, Program, program_of, running, startable, wait_until_answering
from distill.faults import Interrupted
from distill.models.load import base_of_adapter, resolve
from distill.models.student import NO_LIMIT
from distill.models.target import Target
from speculative.errors import UserError

VISIBLE, HOST = "CUDA_VISIBLE_DEVICES", "127.0.0.1"
CACHE_SHARE = 0.25  # of a CPU's memory, for the caches of all replicas together
FREE_SHARE = 0.95  # of the free memory of a device, where the run may have the target too


class Replicas:
    """Replicas that share the devices of this machine, or else its cores, in equal parts. `urls`: addresses of their APIs."""

    def __init__(self, engine: str, count: int | None, words: Sequence[str]) -> None:
        """``count``: None: one for each device. ``words``: more flags of the engine.

        Raises UserError: an engine that is unknown, not installed or cannot answer for a run; fewer devices or cores than replicas.
        """
        self.engine, service = startable(engine)
        if service.answering is None:
            raise UserError(
                f"--engine {engine}: {self.engine.name} returns no token ids with their log-probabilities at the sampling settings; "
                "use another engine, or leave --engine out"
            )
        self.answering, self.key_variable, self.words = service.answering, service.key_variable, words
        self.program = program_of(self.engine, service)
        seen = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
        self.devices = seen.split(",") if torch.cuda.is_available() else []
        self.cores = list(range(os.cpu_count() or 1))
        if hasattr(os, "sched_getaffinity"):
            self.cores = sorted(os.sched_getaffinity(0))
        self.count = count or max(1, len(self.devices))
        if self.count > len(self.devices or self.cores):
            what = f"{len(self.devices)} devices" if self.devices else f"{len(self.cores)} cores"
            raise UserError(f"--replicas {self.count}: this machine has {what}; lower it")
        with contextlib.ExitStack() as sockets:
            free = [sockets.enter_context(listening(HOST, 0, True)) for _ in range(self.count)]
            self.ports = [socket.getsockname()[1] for socket in free]
        self.urls = [f"http://{HOST}:{port}/v1" for port in self.ports]

    @contextlib.contextmanager
    def started(self, target: Target, context: int, seed: int, folder: Path) -> Iterator[None]:
        """Run them while the block lasts; their logs are in ``folder``. ``context``: maximum tokens of prompt and response.

        Raises UserError: an adapter; a replica that exits while it starts. Interrupted: a signal arrived.
        """
        programs = [self._program(number, target, context, seed, folder) for number in range(self.count)]
        try:
            with running(programs) as processes:
                for process, program, url in zip(processes, programs, self.urls, strict=True):
                    wait_until_answering(process, self.engine.name, url.removesuffix("/v1"), program.log)
                yield
        except Ended:
            raise Interrupted("finished work is kept; give the same command again to continue") from None

    def _program(self, number: int, target: Target, context: int, seed: int, folder: Path) -> Program:
        config, place = target.config, resolve(target.config.path)
        if base_of_adapter(config.path, config.revision, "target.path") is not None:
            raise UserError(f"target.path {config.path}: --engine cannot serve an adapter; merge it into its base")
        devices, cores = (
            part[number * len(part) // self.count : (number + 1) * len(part) // self.count]
            for part in (self.devices, self.cores)
        )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CACHE_SHARE / self.count
        if devices:
            free, total = torch.cuda.mem_get_info(target.device)
            memory = FREE_SHARE * free / total
        replica = Replica(
            str(Path(place).resolve()) if Path(place).is_dir() else place,
            revision=config.revision,
            trusted=config.trust_remote_code,
            dtype=target.facts.dtype,
            context=None if context == NO_LIMIT else context,
            seed=seed,
            cores=() if devices else tuple(cores),
            memory=memory,
        )
        words, environment = self.answering(replica)
        # What the user's environment says stays.
        environment = {name: os.environ.get(name, value) for name, value in environment.items()}
        environment |= {VISIBLE: ",".join(devices)} if devices else {}
        address = ["--host", HOST, "--port", str(self.ports[number])]
        log = folder / f"{self.engine.key}-{number}.log"
        return Program([str(self.program), *words, *address, *self.words], log, environment)
