"""Replicas of a run's target in an installed engine: they answer its prompts, and end with the block that started them."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from data.responses.endpoint_keys import Endpoint
from data.responses.engine_http import free_ports
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
    """Replicas that share the devices of this machine, or else its cores, in equal parts; not started yet."""

    def __init__(self, engine: str, count: int | None, words: Sequence[str]) -> None:
        """``count``: None: one for each device. ``words``: more flags of the engine.

        Raises UserError: an engine that is unknown, not installed or cannot answer for a run; fewer devices or cores than replicas.
        """
        self.engine, self.service = startable(engine)
        if self.service.answering is None:
            raise UserError(
                f"--engine {engine}: {self.engine.name} returns no token ids with their log-probabilities at the sampling settings; "
                "use another engine, or leave --engine out"
            )
        self.words, self.program = words, str(program_of(self.engine, self.service))
        seen = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
        self.devices = seen.split(",") if torch.cuda.is_available() else []
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self.cores, self.count = [] if self.devices else sorted(usable), count or max(1, len(self.devices))
        if self.count > (most := len(self.devices or self.cores)):
            raise UserError(f"--replicas {self.count}: this machine has {most} devices or cores; lower it")

    @contextlib.contextmanager
    def started(self, target: Target, context: int, folder: Path) -> Iterator[None]:
        """Let them answer for the target while the block lasts. ``context``: maximum tokens of a text. ``folder``: of their logs.

        Raises UserError: an adapter; a replica that exits while it starts. Interrupted: a signal arrived.
        """
        if base_of_adapter(target.config.path, target.config.revision, "target.path") is not None:
            raise UserError(f"target.path {target.config.path}: --engine serves no adapter; merge it into its base")
        roots = [f"http://{HOST}:{port}" for port in free_ports(self.count)]
        programs = [self._program(number, root, target, context, folder) for number, root in enumerate(roots)]
        key, alone = self.service.key_variable, target.config
        try:
            with running(programs) as processes:
                for process, program, root in zip(processes, programs, roots, strict=True):
                    wait_until_answering(process, self.engine.name, root, program.log)
                urls = tuple(f"{root}/v1" for root in roots)
                endpoint = Endpoint(urls=urls, api_key_env=key if key in os.environ else "")
                target.config = alone.model_copy(update={"endpoint": endpoint})
                yield
        except Ended:
            raise Interrupted("finished work is kept; give the same command again to continue") from None
        finally:
            target.config = alone

    def _program(self, number: int, root: str, target: Target, context: int, folder: Path) -> Program:
        every = len(self.devices or self.cores)
        share = slice(number * every // self.count, (number + 1) * every // self.count)
        devices, cores = self.devices[share], self.cores[share]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CACHE_SHARE / self.count
        if devices:
            free, total = torch.cuda.mem_get_info(target.device)
            memory = FREE_SHARE * free / total
        config, limit = target.config, None if context == NO_LIMIT else context
        assert self.service.answering is not None
        served = config.model_copy(update={"path": resolve(config.path)})
        words, environment = self.service.answering(served, target.facts.dtype, limit, cores, memory)
        # What the user's environment says stays.
        environment = {name: os.environ.get(name, value) for name, value in environment.items()}
        environment |= {VISIBLE: ",".join(devices)} if devices else {}
        port = root.rpartition(":")[2]
        log = folder / f"{self.engine.key}-{number}.log"
        return Program([self.program, *words, "--host", HOST, "--port", port, *self.words], log, environment)
