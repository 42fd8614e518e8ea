"""Options of `understudy readback`; apart from the command, so that --help does not import it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from distill.commands.options import KeyVariable
from distill.config.command_line import (
    PROMPT_SOURCE,
    Chat,
    Device,
    DraftingName,
    Dtype,
    Json,
    MessagesColumn,
    Out,
    PromptColumn,
    TrustRemoteCode,
    argument,
    option,
)


@dataclass(frozen=True)
class ReadbackOptions:
    """Judge the drafter of a running engine.

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo

    understudy readback http://127.0.0.1:8000/v1 --run runs/demo --plain http://127.0.0.1:8001/v1

    understudy readback http://127.0.0.1:8000/v1 --target Qwen/Qwen3-4B --prompts prompts.jsonl --plain http://127.0.0.1:8001/v1 --parameters

    With --run: sends the run's held-out prompts. Checks that the engine accepts the draft as replay predicts and that its text
    is the target's own. With --target and --prompts it judges whatever the engine drafts with (EAGLE-3, DFlash, MTP, n-grams):
    tau and acceptance by position from the engine's counts, speed, and its text against the target loaded here.

    Only one engine fits? Run the command without --plain, restart the engine without the draft, then repeat it with
    --resume --plain URL.

    Exit status: 0 all that is checked holds, 1 something does not, 2 a mistake in the command or a server that does not answer.
    """

    url: Annotated[str, argument("URL of the running engine with the draft, e.g. http://127.0.0.1:8000/v1")]
    run: Annotated[Path | None, option("run folder whose best draft is served")] = None
    target: Annotated[str, option("or the target that is served: directory, hub id or `embedded`")] = ""
    prompts: Annotated[str, option(f"with --target: {PROMPT_SOURCE}")] = ""
    prompt_column: PromptColumn = ""
    messages_column: MessagesColumn = ""
    chat: Chat = False
    temperature: Annotated[float, option("with --target: sampling temperature; 0 = greedy text only", min=0)] = 1.0
    top_p: Annotated[float, option("with --target: nucleus sampling; 1 = off")] = 1.0
    top_k: Annotated[int, option("with --target: keep the k most probable tokens; 0 = off", min=0)] = 0
    max_tokens: Annotated[int, option("with --target: maximum tokens per response", min=2)] = 128
    to: Annotated[Path, option("with --target: folder for served.json and the answers")] = Path("readback")
    dtype: Dtype = "auto"
    device: Device = ""
    plain: Annotated[str, option("URL of the same engine without the draft, to measure the speed-up")] = ""
    speed: Annotated[bool, option("with --run and --plain: compare speeds with `understudy time`", "--speed")] = False
    parameters: Annotated[
        bool,
        option(
            "with --plain: try penalties, min_p, logit_bias, logprobs, seed and stop on both engines", "--parameters"
        ),
    ] = False
    rule: Annotated[
        str, option("auto, or the engine's rule: greedy (temperature 0), greedy-draft, sample or block")
    ] = "auto"
    gamma: Annotated[int | None, option("drafted tokens per block; default: as exported", min=1, max=128)] = None
    drafting: DraftingName = ""
    count: Annotated[int | None, option("prompts to send; default: all", min=1)] = None
    concurrency: Annotated[int, option("requests sent at once", min=1, max=1024)] = 1
    model: Annotated[str, option("name of the model at the server; default: the only one")] = ""
    timeout: Annotated[float, option("timeout of one request in seconds")] = 600.0
    api_key_env: KeyVariable = ""
    seed: Annotated[int, option("seed of the requests, added to the run's seed")] = 0
    resume: Annotated[bool, option("keep the answers of an interrupted or earlier readback", "--resume")] = False
    trust_remote_code: TrustRemoteCode = False
    json: Json = False
    out: Out = None
