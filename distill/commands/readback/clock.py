"""`understudy time`: c and v(gamma) of a serving engine by concurrent requests, and the speed-ups that they predict."""

import contextlib
import itertools
import platform
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from data.files import write_json
from data.responses.endpoint_keys import root_of
from data.responses.engine_http import free_ports
from distill.commands.export import export_run
from distill.commands.options import ExportOptions, ServeOptions
from distill.commands.output import check_writable, numbers_of
from distill.commands.readback.options import TimeOptions
from distill.commands.serve import engine_to_start, started
from distill.config.layout import EXPORT, SERVING_FILE, TIMING
from distill.engines.protocol.client import EngineClient
from distill.engines.protocol.process import program_of, startable
from distill.engines.protocol.serving_engine import serving_engine
from distill.report.measured import engine_parts
from distill.report.page import write_page
from distill.run.heldout_set import load_heldout_set
from distill.run.responses import decode_settings
from distill.run.run import Run
from distill.run.verdict_record import load_verdict
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse
from speculative.measure.engine_costs import EngineCosts, Stream, busiest, ratios_of, served_seconds, step_costs
from speculative.progress import phase

REPEATS = 5  # turns of requests at each load and gamma
TURN, FEWEST = 2, 6  # timed requests of each place in a turn, and in all
FEWEST_TOKENS = 4  # of a timed response
SPARE_TOKENS = 64  # in the context of each request, beyond prompt, response and drafted tokens


def time_command(options: TimeOptions) -> int:
    """Time the engines, write engine_costs.json and print its table.

    Raises UserError: an option out of range, no verdict in the run, no server, or a server with a draft that reports no counts.
    """
    verdict, heldout = load_verdict(options.run), load_heldout_set(options.run, trusted=options.trust_remote_code)
    # By default two gammas: each costs the start of an engine and its turns.
    default = f"1,{verdict.gamma}" if verdict.gamma > 1 else "1,3"
    asked = (("--load", options.load), ("--gamma", options.gamma or default))
    loads, gammas = (sorted(numbers_of(*text, int, 1, 1024, least=2)) for text in asked)
    if bool(options.plain) != bool(options.url):
        raise UserError("--plain, --url: give an engine without the draft and two or more with it, or neither")
    options = replace(options, engine=engine_to_start(options.engine, heldout.config))
    out = options.run / EngineCosts.FILE
    check_writable("RUN", out)
    settings = decode_settings(heldout.config.serving, 0, heldout.target)
    blocks, reads, name = (*(defaultdict[tuple[int, int], list[float]](list) for _ in range(2)), "")
    tokens = (
        max(len(text.prompt_ids) for text in heldout.responses)
        + max(FEWEST_TOKENS, settings.max_tokens)
        + gammas[-1]
        + SPARE_TOKENS
    )
    with contextlib.closing(_engines(options, gammas, loads[-1], tokens)) as engines:
        for urls in engines:
            clients = [EngineClient(url, heldout.target.tokenizer, heldout.target.facts.vocab_rows) for url in urls]
            for client in clients:
                client.identify()
                name = f"{client.engine.name} {client.version}".strip()
            texts = {
                client: ((turn, text) for turn in itertools.count() for text in heldout.responses) for client in clients
            }
            for load, client in itertools.product(loads, clients):
                # Not timed: an engine may prepare each size of its steps when it first comes.
                *_, peak = _turn(client, texts[client], load, settings, settings.max_tokens)
                if peak < load:
                    raise UserError(f"--load {load}: the engine decoded {peak} requests at a time; lower it")
            turns = [*itertools.product(range(REPEATS), loads, clients)]
            with phase("timing", len(turns)) as shown:
                for _, load, client in turns:
                    shown.facts = f"{client.endpoint.url}, {load} at a time"
                    gamma, block, read, _ = _turn(client, texts[client], load, settings)
                    if bool(gamma) != urls[client.endpoint.url]:
                        mistake = (
                            "drafts too; start it without the draft"
                            if gamma
                            else "reports no drafts (docs/readback.md)"
                        )
                        raise UserError(f"{client.endpoint.url}: {mistake}")
                    blocks[load, gamma].append(block)
                    reads[load, gamma].append(read)
                    shown.advance()
    if len({gamma for _, gamma in blocks}) < 3 or any(len(of) != REPEATS for of in blocks.values()):
        raise UserError(
            "--gamma, --url: time two or more engines that draft different numbers of tokens, each always the same"
        )
    one_pass = verdict.drafts[-1].drafting == "parallel"
    each = [step_costs({cell: of[row] for cell, of in blocks.items()}, one_pass) for row in range(REPEATS)]
    costs = step_costs({cell: median(of) for cell, of in blocks.items()}, one_pass)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    result = EngineCosts(
        format=1,
        engine=name,
        device=options.plain or device,
        flags=options.words or [],
        costs=costs,
        ratios={text.batch_size: ratios_of(text, repeats) for text, *repeats in zip(costs, *each, strict=True)},
        prefill={load: {gamma: median(of) for (n, gamma), of in sorted(reads.items()) if n == load} for load in loads},
    )
    write_json(out, result.record())
    console = Console(highlight=False)
    for part in engine_parts(verdict.model_copy(update={"engine": result})):
        console.print(part)
    for load in result.unsteady:
        console.print(
            f"load {load}: repeats differ by more than a block takes; time again on a quiet machine",
            style="yellow",
        )
    return 0


def time_serving_engine(run: Run) -> None:
    """The last stage of a run, on the main process: time serving.engine, unless that is done.

    It is left out, in one line, if the engine is not there, dies or cannot be timed: the run is finished all the same.
    """
    engine, folder, config = serving_engine(run.config), run.folder, run.config
    if engine is None or not run.main or (folder / EngineCosts.FILE).is_file():
        return
    loads = sorted({1, *(config.judge.load if max(config.judge.load, default=1) > 1 else (4,))})
    trusted, load = config.target.trust_remote_code, ",".join(map(str, loads))
    try:
        time_command(TimeOptions(folder, None, engine.key, load=load, port=free_ports()[0], trust_remote_code=trusted))
    except (UserError, ModuleNotFoundError) as error:
        run.say(f"{engine.name} was not timed: {error}; later: understudy time {folder} (docs/serving.md)")
        return
    write_page(folder)
    run.say(load_verdict(folder).headline)


def _turn(
    client: EngineClient,
    texts: Iterator[tuple[int, HeldoutResponse]],
    load: int,
    settings: DecodeSettings,
    fewest: int = FEWEST_TOKENS,
) -> tuple[int, float, float, int]:
    """Send requests, `load` at a time. Return (gamma, seconds of a block, of the rest of a response, most decoded at the same time).

    The first and last ones are not timed: the engine has to be as busy as in service. texts: each with the number of its
    round. fewest: tokens of a response.

    Raises UserError: as `EngineClient.stream`.
    """
    client.endpoint = client.endpoint.model_copy(update={"concurrency": load})
    timed = slice(load, load + max(FEWEST, TURN * load))

    def ask(numbered: tuple[int, HeldoutResponse]) -> tuple[Stream, int]:
        turn, text = numbered
        tokens = max(fewest, len(text.response_ids))
        # Another seed in each round, so that no prompt is in the engine's cache.
        return client.stream(text.prompt_ids, replace(settings, max_tokens=tokens, seed=turn))

    found = [one for _, one in client.each(ask, itertools.islice(texts, timed.stop + load))]
    found.sort(key=lambda one: one[0].sent)
    streams = [stream for stream, _ in found]
    return max(gamma for _, gamma in found), *served_seconds(streams, timed), busiest(streams)


def _engines(
    options: TimeOptions, gammas: list[int], requests: int, tokens: int
) -> Generator[dict[str, bool], None, None]:
    """URLs of engines that run at the same time, and whether each drafts: all running ones, or in turn those that we start."""
    if options.plain:
        yield {f"{root_of(url)}/v1": url != options.plain for url in (options.plain, *(options.url or []))}
        return
    program_of(*startable(options.engine))  # before an export is written
    with _exported(options) as export:
        for gamma in (0, *gammas):
            asked = ServeOptions(export, options.words, options.engine, port=options.port, alone=not gamma)
            with started(asked, max(1, gamma), requests, tokens) as url:
                yield {f"{url}/v1": gamma > 0}


@contextlib.contextmanager
def _exported(options: TimeOptions) -> Iterator[Path]:
    """The run with its export, or an export of its best draft for as long as the block lasts."""
    run = options.run
    if (run / EXPORT / SERVING_FILE).is_file():
        yield run
        return
    export = run / TIMING
    try:
        export_run(ExportOptions(run, export, overwrite=True, trust_remote_code=options.trust_remote_code))
        yield export
    finally:
        for folder in run.glob(f"{TIMING}*"):  # with what an engine made of it
            shutil.rmtree(folder, ignore_errors=True)
