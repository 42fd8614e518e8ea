"""`understudy time`: c and v(gamma) of a serving engine by concurrent requests, and the speed-ups that they predict."""

import contextlib
import functools
import platform
import time
from collections import defaultdict
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from statistics import median, mode

import torch
from rich.console import Console

from data.files import write_json
from data.responses.endpoint_keys import root_of
from data.responses.engine_client import EngineClient
from distill.commands.options import ServeOptions
from distill.commands.output import check_writable, numbers_of
from distill.commands.serve import started
from distill.config.command_line import TimeOptions
from distill.config.layout import ENGINE_COSTS
from distill.report.measured import engine_parts
from distill.run.frozen_text import load_frozen_text
from distill.run.responses import decode_settings
from distill.run.verdict_record import load_verdict
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.measure.engine_costs import EngineCosts, ratios_of, step_costs, wave_seconds

TRIES = 4  # waves, until one has all requests decoded at the same time
SPARE_TOKENS = 64  # in the context of each request, beyond prompt, response and drafted tokens


def time_command(options: TimeOptions) -> int:
    """Time the engines, write engine_costs.json and print its table.

    Raises UserError: an option out of range, no verdict in the run, no server, or a server with a draft that reports no counts.
    """
    asked = (("--load", options.load), ("--gamma", options.gamma))
    loads, gammas = (sorted(numbers_of(*one, int, 1, 1024, least=2)) for one in asked)
    if bool(options.plain) != bool(options.url):
        raise UserError("--plain, --url: give an engine without the draft and two or more with it, or neither")
    verdict, frozen = load_verdict(options.run), load_frozen_text(options.run)
    out = options.out or options.run / ENGINE_COSTS
    check_writable("--out", out)
    settings = decode_settings(frozen.config.serving, 0, frozen.target)
    waves, reads, name = (*(defaultdict[tuple[int, int], list[float]](list) for _ in range(2)), "")
    tokens = max(len(one.prompt_ids) for one in frozen.responses) + settings.max_tokens + gammas[-1] + SPARE_TOKENS
    with contextlib.closing(_engines(options, gammas, loads[-1], tokens)) as engines:
        for urls in engines:
            clients = [EngineClient(url, frozen.target.tokenizer, frozen.target.facts.vocab_rows) for url in urls]
            for client in clients:
                client.identify()
                name = f"{client.engine} {client.version}".strip()
            for repeat in range(-1, options.repeats):  # The first wave at each load is not timed.
                for load, client in ((load, one) for load in loads for one in clients):
                    texts = [frozen.responses[(repeat * load + row) % len(frozen.responses)] for row in range(load)]
                    gamma, block, read = _wave(client, [one.prompt_ids for one in texts], settings)
                    if bool(gamma) != urls[client.endpoint.url]:
                        told = (
                            "drafts too; start it without the draft"
                            if gamma
                            else "reports no drafts (docs/readback.md)"
                        )
                        raise UserError(f"{client.endpoint.url}: {told}")
                    if repeat >= 0:
                        waves[load, gamma].append(block)
                        reads[load, gamma].append(read)
    if len({gamma for _, gamma in waves}) < 3:
        raise UserError("--url: give two or more engines that draft different numbers of tokens")
    one_pass = verdict.drafts[-1].drafting == "parallel"
    each = [step_costs({cell: of[row] for cell, of in waves.items()}, one_pass) for row in range(options.repeats)]
    costs = step_costs({cell: median(of) for cell, of in waves.items()}, one_pass)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    result = EngineCosts(
        format=1, engine=name, device=options.plain or device, flags=options.words or [], costs=costs,
        ratios={one.batch_size: ratios_of(one, repeats) for one, *repeats in zip(costs, *each, strict=True)},
        prefill={load: {gamma: median(of) for (n, gamma), of in sorted(reads.items()) if n == load} for load in loads},
    )  # fmt: skip
    write_json(out, result.record())
    console = Console(highlight=False)
    for part in engine_parts(verdict.model_copy(update={"engine": result})):
        console.print(part)
    return 0


def _wave(client: EngineClient, prompts: list[list[int]], settings: DecodeSettings) -> tuple[int, float, float]:
    """Send requests at once. Return (gamma, seconds of a block, seconds until all of them have a token).

    Raises UserError: as `wave_seconds`, after some waves: other work on the machine can hold a request back.
    """
    for attempt in range(1, TRIES + 1):
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(functools.partial(client.stream, settings=settings), prompts))
        gamma = mode(gamma for _, gamma in found)
        try:
            block = wave_seconds([stream for stream, _ in found])
        except UserError:
            if attempt == TRIES:
                raise
        else:
            break
    return gamma, block, max(stream.seconds_C[0] for stream, _ in found) - began


def _engines(
    options: TimeOptions, gammas: list[int], requests: int, tokens: int
) -> Generator[dict[str, bool], None, None]:
    """URLs of engines that run at the same time, and whether each drafts: all running ones, or in turn those that we start."""
    if options.plain:
        yield {f"{root_of(url)}/v1": url != options.plain for url in (options.plain, *(options.url or []))}
        return
    for gamma in (0, *gammas):
        asked = ServeOptions(options.run, options.words, options.engine, port=options.port, alone=not gamma)
        with started(asked, max(1, gamma), requests, tokens) as url:
            yield {f"{url}/v1": gamma > 0}
