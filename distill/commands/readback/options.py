"""Options of `understudy readback` and `understudy time`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.config import command_line as shared
from distill.config.command_line import PROMPT_SOURCE, argument, option


@dataclass(frozen=True)
class ReadbackOptions:
    """Judge the drafter of a running engine.

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo --plain http://127.0.0.1:8001/v1

    understudy readback http://127.0.0.1:8000/v1 --target Qwen/Qwen3-4B --prompts prompts.jsonl --plain http://127.0.0.1:8001/v1

    With --run: sends the run's held-out prompts. Checks that the engine accepts the draft as replay predicts and that its text
    is the target's own. With --target and --prompts it judges whatever the engine drafts with (EAGLE-3, DFlash, MTP, n-grams):
    tau and acceptance by position from the engine's counts, speed, and its text against the target loaded here.

    Served in other numerics than the run's? Then --draft and --target name what is replayed: a GGUF file is dequantised.

    Only one engine fits? Run the command without --plain, restart the engine without the draft, then repeat it with
    --resume --plain URL.

    Exit status: 0 all that is checked holds, 1 something does not, 2 a mistake in the command or a server that does not answer.
    """

    url: Annotated[str, argument("URL of the running engine with the draft, e.g. http://127.0.0.1:8000/v1")]
    run: Annotated[Path | None, option("run folder whose best draft is served")] = None
    target: Annotated[str, option("target as served: directory, hub id, GGUF or `embedded`; default: the run's")] = ""
    draft: Annotated[str, option("with --run: the draft as it is served, e.g. a GGUF file; default: the run's")] = ""
    prompts: Annotated[str, option(f"with --target: {PROMPT_SOURCE}")] = ""
    chat: shared.Chat = False
    temperature: Annotated[float, option("with --target: sampling temperature; 0 = greedy text only", min=0)] = 1.0
    max_tokens: Annotated[int, option("with --target: maximum tokens per response", min=2)] = 128
    to: Annotated[Path, option("with --target: folder for readback.json and the answers")] = Path("readback")
    plain: Annotated[str, option("URL of the same engine without the draft, to measure the speed-up")] = ""
    speed: Annotated[bool, option("with --run and --plain: compare speeds with `understudy time`", "--speed")] = False
    rule: Annotated[str, option("auto or the engine's: greedy (temperature 0), greedy-draft, sample or block")] = "auto"
    gamma: Annotated[int | None, option("drafted tokens per block; default: as exported", min=1, max=128)] = None
    count: Annotated[int | None, option("prompts to send; default: all", min=1)] = None
    concurrency: Annotated[int, option("requests sent at once", min=1, max=1024)] = 1
    api_key_env: shared.KeyVariable = ""
    resume: Annotated[bool, option("keep the answers of an interrupted or earlier readback", "--resume")] = False
    trust_remote_code: shared.TrustRemoteCode = False


@dataclass(frozen=True)
class TimeOptions:
    """Measure step times in the serving engine.

    understudy time runs/demo --load 1,4,16 -- --enforce-eager --dtype float32

    Starts an engine without the draft and with each --gamma, or asks running ones. Prints and writes c, v and the predicted
    speed-ups to engine_costs.json in the run, whose verdict then says what to run in this engine. Training ends with this, if
    serving.engine is installed.
    """

    run: Annotated[Path, argument("run folder")]
    words: Annotated[list[str] | None, argument("more flags for the engine, given after --")] = None
    engine: Annotated[str, option("engine to start: vllm or llama.cpp; default: serving.engine, or vllm")] = ""
    plain: Annotated[str, option("URL of a running engine without the draft")] = ""
    url: Annotated[list[str] | None, option("URL of one with the draft; repeatable, with other gammas")] = None
    load: Annotated[str, option("concurrent requests, two numbers or more")] = "1,4,16"
    gamma: Annotated[
        str, option("drafted tokens per block of an engine that is started; default: 1 and judge.gamma")
    ] = ""
    port: Annotated[int, option("port for the engine", min=1024, max=65535)] = 8000
    trust_remote_code: shared.TrustRemoteCode = False
