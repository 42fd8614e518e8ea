"""`understudy serve`: start an engine with the command of SERVING.md, wait until it answers, and stop it on exit."""

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from data.hub import hub_id
from data.responses.engine_http import listening
from distill.commands.options import ServeOptions
from distill.config.layout import CONFIG, EXPORT, SERVING_FILE, near_path, run_of
from distill.config.load import load_config
from distill.config.run import RunConfig
from distill.engines.protocol.engine import Engine
from distill.engines.protocol.facts import EngineFacts, Serving
from distill.engines.protocol.process import (
    Ended,
    Program,
    died,
    program_of,
    running,
    startable,
    wait_until_answering,
)
from distill.engines.protocol.verdict import check, check_directory_name, server_command
from distill.export.pair import check_pair
from distill.faults import Interrupted
from distill.models.files.gguf import GGUF
from distill.models.load import load_pretrained, resolve
from speculative.errors import UserError


def serve(options: ServeOptions) -> int:
    """Run the engine in the foreground until it exits or a signal arrives. Return 0 after a signal to a running server.

    Raises UserError: no export, the engine refuses the pair, no engine installed, port in use, or the engine exited on its own.
    Interrupted: a signal arrived while the engine was starting.
    """
    directory, facts = read_export(options.run)
    options = replace(options, engine=engine_to_start(options.engine, _config_of(options, directory)))
    target = _target(options, directory, facts)
    engine, words = engine_words(options, directory, facts, target)
    name = engine.name
    if not options.alone:
        _check_files(name, words, directory, target)
    keyed = startable(options.engine)[1].key_variable in os.environ or any(
        word.startswith("--api-key") for word in words
    )
    listening(options.host, options.port, keyed).close()  # fail now and not after minutes of loading
    log = log_of(options, directory)
    answered = False
    try:
        with running([Program(words, log)]) as (process,):
            seconds = wait_until_answering(process, name, _url(options.host, options.port), log)
            answered = True
            print("\n".join(_lines(options, name, target, facts.request, seconds, log)), flush=True)
            process.wait()
            died(process, name, log)
    except Ended:
        if not answered:
            raise Interrupted(f"{name} was stopped while it was starting; its log is {log}") from None
    print(f"{name} stopped; its log is {log}")
    return 0


@contextlib.contextmanager
def started(options: ServeOptions, gamma: int, requests: int, tokens: int) -> Iterator[str]:
    """Serve with ``gamma`` drafted tokens at every load while the block lasts; yields the URL. Raises as `serve`, also later.

    requests, tokens: how many it gets at a time, and how many tokens each has. Every answer has counts, and only the draft proposes.
    """
    directory, facts = read_export(options.run)
    one_pass = facts.one_pass and facts.one_pass._replace(gamma=gamma)
    facts = replace(facts, gamma=gamma, gamma_by_load=(), one_pass=one_pass, timed_in=None, lookup_draft=None)
    service = startable(options.engine)[1]
    room = service.room.format(requests=requests, tokens=requests * tokens).split()
    counts = () if options.alone else service.counts
    options = replace(options, words=[*counts, *room, *(options.words or ())])
    engine, words = engine_words(options, directory, facts, _target(options, directory, facts))
    log = log_of(options, directory)
    listening(options.host, options.port, True).close()
    with running([Program(words, log)]) as (process,):
        wait_until_answering(process, engine.name, url := _url(options.host, options.port), log)
        yield url


def log_of(options: ServeOptions, directory: Path) -> Path:
    """The log of an engine, beside the export: ENGINE.log for a run's own; the target alone has one of its own."""
    parts = (
        options.engine,
        *([directory.name] if directory.name != EXPORT else []),
        *(["alone"] if options.alone else []),
    )
    return directory.parent / f"{'-'.join(parts)}.log"


def engine_words(options: ServeOptions, directory: Path, facts: EngineFacts, target: str) -> tuple[Engine, list[str]]:
    """Return the engine and the words of its command: SERVING.md's command, then host, port and the user's flags.

    The words are built from the numbers in serving.json, since an export may come from somebody else. target: its place.

    Raises UserError: the engine is unknown, refuses the pair or is not installed.
    """
    engine, service = startable(options.engine)
    check_directory_name(directory)
    verdict = check(engine.name, facts)
    if not verdict.ok and not options.alone:
        raise UserError(f"{directory / SERVING_FILE}: {engine.name} refuses this pair: {'; '.join(verdict.reasons)}")
    program = program_of(engine, service)
    places = {"$DRAFT": str(directory), "$TARGET": target, "$PROGRAM": str(program), "$PYTHON": sys.executable}
    words = shlex.split(server_command(engine, facts))
    for variable, place in places.items():
        words = [word.replace(variable, place) for word in words]
    for option in service.draft_options if options.alone else ():
        at = words.index(option)
        del words[at : at + 2]
    words[0] = str(program.parent / words[0])
    return engine, [*words, "--host", options.host, "--port", str(options.port), *(options.words or [])]


def _config_of(options: ServeOptions, directory: Path) -> RunConfig | None:
    """The config of the run whose export is served; None for an export on its own."""
    run = run_of(options.run) or run_of(directory.parent)
    return load_config(run / CONFIG) if run else None


def engine_to_start(asked: str, config: RunConfig | None) -> str:
    """--engine, or the run's serving.engine, or vllm."""
    return asked or (config and config.serving.engine) or "vllm"


def _target(options: ServeOptions, directory: Path, facts: EngineFacts) -> str:
    """Return the target's place: --target, else the run's target, else the public name in the export. One of a revision is fetched, because
    not every engine takes revisions.

    Raises UserError: the place is neither a directory, a GGUF file that the engine loads, nor a hub id.
    """
    config = _config_of(options, directory)
    place = resolve(options.target or (config.target.path if config else facts.target))
    if Path(place).is_file() and place.endswith(GGUF):
        engine = startable(options.engine)[0]
        if not engine.reads_gguf:
            raise UserError(
                f"{place}: {engine.name} loads no GGUF file; give the target's directory or hub id with --target"
            )
        return str(Path(place).resolve())
    if not (Path(place).is_dir() or ("/" in place and hub_id(place))):
        raise UserError(f"{directory}: no target {facts.target} at {place}; give its directory or hub id with --target")
    revision = None if options.target else config.target.revision if config else facts.revision
    if revision and hub_id(place):
        place = load_pretrained("target", place, snapshot_download, revision=revision)
    return str(Path(place).resolve()) if Path(place).is_dir() else place


def _check_files(name: str, words: list[str], directory: Path, target: str) -> None:
    """Raise UserError if the engine would not serve the files of today right; print notes. A target on the hub is not downloaded."""
    if Path(target).exists() and (directory / "config.json").is_file():
        parts = re.search(r"(?:--tensor-parallel-size|-tp)[ =](\d+)", " ".join(words))
        parallel, trusted = int(parts[1]) if parts else 1, "--trust-remote-code" in words
        broken, notes = check_pair(target, str(directory), engines=[name], tensor_parallel=parallel, trusted=trusted)
        if broken:
            raise UserError(f"{directory}: {'; '.join(broken)}")
        print(*notes, sep="\n", end="\n" * bool(notes), file=sys.stderr)


def read_export(path: Path) -> tuple[Path, EngineFacts]:
    """Return (the export that `path` is or contains, the facts that its commands are built from)."""
    directory = (path if (path / SERVING_FILE).exists() else path / EXPORT).resolve()
    serving = Serving.stored(directory)
    if serving is None and run_of(path) is None:
        raise UserError(f"{path}: neither a run nor an export (a directory with {SERVING_FILE}){near_path(path)}")
    if serving is None:
        raise UserError(f"{path}: no export; write it with `understudy export {path} --to {path / EXPORT}`")
    return directory, serving.facts


def _url(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _lines(
    options: ServeOptions, name: str, target: str, sampling: dict[str, Any], seconds: float, log: Path
) -> list[str]:
    """Return the lines that say which server answers and how to call it."""
    url = _url(options.host, options.port)
    body = json.dumps({"model": target, "prompt": "Hello", "max_tokens": 64, **sampling})
    what = "alone" if options.alone else "with the draft"
    lines = [
        f"{name} answers at {url} after {seconds:.0f} s: {target} {what} (log: {log}); Ctrl-C stops it",
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
    ]
    if not options.alone and run_of(options.run) is not None:
        lines.append(f"  understudy readback {url} --run {shlex.quote(str(options.run))}")
    return lines
