"""`understudy serve`: start an engine with the command of SERVING.md, wait until it answers, and stop it on exit."""

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from data.hub import hub_id
from data.responses.engine_http import answers, listening
from distill.commands.options import ServeOptions
from distill.config.layout import CONFIG, EXPORT, SERVING_FILE, near_path, run_of
from distill.config.load import load_config
from distill.engines.protocol.engine import Engine, Service, known_engines
from distill.engines.protocol.facts import EngineFacts, Serving
from distill.engines.protocol.verdict import check, check_directory_name, server_command
from distill.export.pair import check_pair
from distill.faults import Interrupted
from distill.models.files.gguf import GGUF
from distill.models.load import resolve
from speculative.errors import UserError
from speculative.progress import phase

BUILT = Path(__file__).resolve().parents[2]  # where `make engines` makes environments
TOLD_LINES = 12  # log lines printed when an engine exits on its own
GRACE_SECONDS = 15.0  # for an engine to exit after a signal, before it is killed
POLL_SECONDS = 0.5
# What a launcher of ranks gives its processes: an engine would take itself for one of them.
_LAUNCHED = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|(MASTER|TORCHELASTIC|ACCELERATE|FSDP)_.*")
_SET_PDEATHSIG = 1  # PR_SET_PDEATHSIG of Linux's prctl


class _Ended(Interrupted):
    """A signal asked us to stop; `number` is passed on to the engine."""

    def __init__(self, number: int) -> None:
        super().__init__("the engine was stopped")
        self.number = number


def serve(options: ServeOptions) -> int:
    """Run the engine in the foreground until it exits or a signal arrives. Return 0 after a signal to a running server.

    Raises UserError: no export, the engine refuses the pair, no engine installed, port in use, or the engine exited on its own.
    Interrupted: a signal arrived while the engine was starting.
    """
    directory, facts = read_export(options.run)
    target = _target(options, directory, facts.target)
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
        with _running(words, log) as process:
            seconds = _wait(process, name, options, log)
            answered = True
            print("\n".join(_lines(options, name, target, facts.request, seconds, log)), flush=True)
            process.wait()
            _died(process, name, log)
    except _Ended:
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
    engine, words = engine_words(options, directory, facts, _target(options, directory, facts.target))
    log = log_of(options, directory)
    listening(options.host, options.port, True).close()
    with _running(words, log) as process:
        _wait(process, engine.name, options, log)
        yield _url(options.host, options.port)


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


def startable(option: str) -> tuple[Engine, Service]:
    """Return the engine that --engine names, and how it is started."""
    found = {one.key: (one, one.service) for one in known_engines().values() if one.service is not None}
    if option not in found:
        raise UserError(f"--engine {option}: this engine cannot be started; known: {', '.join(found)}")
    return found[option]


def program_of(engine: Engine, service: Service) -> Path:
    """Return the place of an engine's program. Raises UserError if it is not installed."""
    places = (os.environ.get("PATH", ""), Path(sys.executable).parent, BUILT / service.built / "bin")
    program = shutil.which(service.program, path=os.pathsep.join(map(str, places)))
    if program is None:
        raise UserError(
            f"{engine.name} is not installed: no `{service.program}` in PATH; install it, or run `make engines`"
        )
    return Path(program)


def _target(options: ServeOptions, directory: Path, name: str) -> str:
    """Return the target's place: --target, else the run's target, else the public name in the export.

    Raises UserError: the place is neither a directory, a GGUF file that the engine loads, nor a hub id.
    """
    run = run_of(options.run) or run_of(directory.parent)
    place = resolve(options.target or (load_config(run / CONFIG).target.path if run else name))
    if Path(place).is_file() and place.endswith(GGUF):
        engine = startable(options.engine)[0]
        if not engine.reads_gguf:
            raise UserError(
                f"{place}: {engine.name} loads no GGUF file; give the target's directory or hub id with --target"
            )
        return str(Path(place).resolve())
    if not (Path(place).is_dir() or ("/" in place and hub_id(place))):
        raise UserError(f"{directory}: no target {name} at {place}; give its directory or hub id with --target")
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


@contextlib.contextmanager
def _running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the engine in its own process session. A signal to us stops it, and leaving the block kills all its processes."""

    def end(number: int, _: object) -> NoReturn:
        # Python drops an exception that is raised inside a destructor, so raise it again a second later.
        signal.signal(signal.SIGALRM, lambda *_: end(number, None))
        signal.alarm(1)
        raise _Ended(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        with log.open("wb") as file:
            engine = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={name: value for name, value in os.environ.items() if not _LAUNCHED.fullmatch(name)},
                start_new_session=True,
                preexec_fn=_die_with_us,
            )
        passed_on = signal.SIGTERM
        try:
            yield engine
        except _Ended as ended:
            passed_on = signal.Signals(ended.number)
            raise
        finally:
            signal.alarm(0)
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)
            _end(engine, passed_on)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_us() -> None:
    """Ask the kernel, in the engine's process, to signal the engine if our process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _end(engine: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.send_signal(number)
        engine.wait(GRACE_SECONDS)
    # Its child processes share its session, even after the engine has exited.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()


def _wait(process: subprocess.Popen[bytes], name: str, options: ServeOptions, log: Path) -> float:
    """Wait until the engine answers /health; return the seconds it took."""
    with phase(f"{name} is starting, its log is {log}") as shown:
        while not answers(_url(options.host, options.port)):
            if process.poll() is not None:
                _died(process, name, log)
            shown.facts = (_last_lines(log, 1) or [""])[0]
            time.sleep(POLL_SECONDS)
    return shown.seconds


def _url(host: str, port: int) -> str:
    """Return the address at which this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _died(process: subprocess.Popen[bytes], name: str, log: Path) -> NoReturn:
    for line in _last_lines(log, TOLD_LINES):
        print(f"  {line}", file=sys.stderr)
    raise UserError(f"{name} exited with status {process.returncode}; its last lines are above, the full log is {log}")


def _last_lines(log: Path, count: int) -> list[str]:
    with log.open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip() for line in deque(file, maxlen=count)]


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
