"""`understudy readback --speed`: the speed-up that engine_costs.json predicts beside the served one, at each load it was measured at."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distill.commands.readback.asking import AnswerFile, Replies, ask
from distill.commands.readback.comparison import count, served_row, tau_interval
from distill.engines.protocol.engine import engine_in
from distill.run.readback_record import SpeedCheck
from distill.run.verdict_record import Verdict
from speculative.decoder.responses import DecodeSettings
from speculative.errors import UserError
from speculative.evaluate import HeldoutResponse

MARK = 0.10  # of the predicted speed-up


def seen_in(run: Path, label: str, load: int) -> list[str]:
    """What the engine's log in the run says of slow steps at a load. label: name and version, which each line begins with."""
    engine = engine_in(label)
    log = run / f"{engine.key}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    matches = [(re.search(line, text), meaning) for line, meaning in engine.dialect.log_lines.items()]
    values = [(match.groupdict(), meaning) for match, meaning in matches if match]
    return [f"{label}: {text.format(**of)} ({log.name})" for of, text in values if load > int(of.get("most", 0))]


def speed_checks(
    verdict: Verdict,
    run: Path,
    files: Sequence[AnswerFile],
    replies: tuple[Sequence[HeldoutResponse], DecodeSettings],
    rule: str,
) -> list[SpeedCheck]:
    """Ask both servers in turn at each load of engine_costs.json, and compare. rule: the engine's.

    Raises UserError: as `ask`.
    """
    costs, (texts, settings), checks = verdict.engine, replies, list[SpeedCheck]()
    assert costs is not None
    # In files of their own, because `drift --log` counts the others.
    files = [AnswerFile(one.path.with_name(f"speed-{one.path.name}"), one.client, resume=False) for one in files]
    for load in costs.ratios:
        for file in files:
            file.client.timed = True
            file.client.endpoint = file.client.endpoint.model_copy(update={"concurrency": load})
        answers = ask(files, texts, replace(settings, seed=settings.seed + load), full=True)
        checks.append(check_speed(verdict, load, answers, seen_in(run, costs.engine, load), rule))
    return checks


def check_speed(verdict: Verdict, load: int, replies: Replies, seen: Sequence[str], rule: str) -> SpeedCheck:
    """Compare the answers at a load with the prediction. seen: causes of slow steps. UserError: some steps were without a draft."""
    counted, costs = count(replies, verdict.gamma), verdict.engine
    assert costs is not None
    if counted.undrafted:
        raise UserError(f"--speed: at {load} requests steps were not drafted; start the engine with one gamma for all")
    if counted.gamma not in verdict.replay:
        raise UserError(
            f"--speed: the engine drafts {counted.gamma} tokens; replay knows tau up to {max(verdict.replay)}"
        )
    at_load = next(at_load for at_load in costs.costs if at_load.batch_size == load)
    gamma, tau = counted.gamma, verdict.replay[counted.gamma]
    predicted = costs.row(at_load, gamma, tau, verdict.rule, verdict.response_tokens)
    tau_ci = tau_interval(counted, tau, (tau, tau))
    served, speed = served_row(replies, counted, rule, gamma, tau_ci, load)
    at_tau = costs.speed_up(at_load, gamma, counted.tau, verdict.response_tokens)
    difference, of_tau = ((value or 1.0) / (predicted.speed_up or 1.0) - 1.0 for value in (speed.speed_up, at_tau))
    of_costs, holds, causes = (1.0 + difference) / (1.0 + of_tau) - 1.0, abs(difference) <= MARK, list[str]()
    if not holds and abs(of_tau) > abs(of_costs):
        told = "" if tau_ci[0] <= tau <= tau_ci[1] else ", which chance does not explain"
        other = "" if rule == verdict.rule else f" by rule {verdict.rule}"
        causes = [f"tau {counted.tau:.2f} served by rule {rule}, {tau:.2f} predicted{other}{told}"]
    elif not holds:
        times = f"{1.0 / (1.0 + of_costs):.2f}"
        causes = [f"blocks take {times} times as long, in plain steps, as `understudy time` measured", *seen]
    return SpeedCheck(
        predicted=predicted,
        served=served,
        difference=difference,
        of_tau=of_tau,
        of_costs=of_costs,
        holds=holds,
        causes=causes,
    )
