"""The speed-up that an engine's own step times predict, beside the served one, at each number of concurrent requests.

    understudy time runs/lab --plain URL --url URL_GAMMA_1 --url URL_GAMMA_3 --load 1,4,16
    understudy readback URL_GAMMA_3 --plain URL --run runs/lab --speed --concurrency 16
    python bench/engine_speed.py runs/lab --out bench/results/engine_speed_vllm_cpu.json

The first two commands measure and write engine_costs.json and readback.json into the run; this one joins them. `held` is the share of
loads at which the served speed-up is within 10 % of the predicted one. `tau` is the acceptance behind both: of the
verdict, of replay of the
run's text and of the served text in the engine's convention (the first token comes from the prefill), and as served.
"""

from distill.faults import run_script

from pathlib import Path
from typing import Annotated

import typer

from distill.run.provenance import describe_run
from distill.run.readback_record import ReadbackRecord
from distill.run.verdict_record import load_verdict
from result_file import write_result
from speculative.errors import UserError


def main(
    run: Annotated[Path, typer.Argument(help="run with engine_costs.json and readback.json")],
    out: Path = Path("engine_speed.json"),
) -> None:
    """Join the two files and write the result."""
    verdict, served = load_verdict(run), ReadbackRecord.stored(run)
    if verdict.engine is None or served is None or not served.speed:
        raise UserError(f"{run}: use `understudy time` and `understudy readback --speed` first")
    own, replay, expected = served.served, served.replay, served.expected
    taus = {
        "verdict": verdict.replay[own.gamma or 0],
        "run's text": expected.tau,
        "served text": replay.tau,
        "served": own.tau,
    }
    result = {
        "machine": describe_run(0),
        "engine": served.where,
        "rule": own.rule,
        "prompts": own.prompts,
        "costs": verdict.engine.record(),
        "tau": taus,
        "tau_ci": own.tau_ci,
        "z": served.z,
        "speed": [{key: value for key, value in one.record().items() if key != "causes"} for one in served.speed],
        "held": sum(one.holds for one in served.speed) / len(served.speed),
    }
    write_result(out, result)


if __name__ == "__main__":
    run_script(main)
