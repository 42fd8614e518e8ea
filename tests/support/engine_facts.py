"""A pair that every engine serves, and what a shell makes of the engines' commands."""

import subprocess

import yaml

from distill.engines.protocol.facts import EngineFacts
from distill.engines.protocol.verdict import check
from speculative.rules.sampling import SamplingSettings

DRAFT, TARGET = "/models/my draft's $HOME", "org/target-8b"


SERVED = SamplingSettings(temperature=0.8, top_p=0.95)


# Sampled drafts are accepted more often than argmax drafts.
TAUS = {"sample": 3.7, "sample-untruncated": 3.63, "greedy-draft": 2.01, "block": 3.8}


GOOD = EngineFacts(
    target=TARGET,
    draft=DRAFT,
    gamma=5,
    target_rows=4096,
    draft_rows=4096,
    measured_rule="sample",
    sampling=SERVED,
    taus=TAUS,
)


# What a shell calls, each printing its words with a NUL behind each and a last one of its own.
STUBS = "".join(
    f"{name}() {{ printf '%s\\0' {name} \"$@\"; printf '\\n\\0'; }}\n"
    for name in ("vllm", "python", "llama-server", "trtllm-serve", "mlx_lm.server")
)


def calls(command, draft=DRAFT, target=TARGET, cwd=None):
    """The programs that a real shell calls for a command, each as its list of words."""
    environment = {"DRAFT": draft, "TARGET": target, "LLAMA_CPP": "/src/llama.cpp", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-euc", STUBS + command], env=environment, cwd=cwd, capture_output=True, check=True)
    return [call.split("\0")[:-1] for call in done.stdout.decode().split("\n\0")[:-1]]


def options(command, draft=DRAFT):
    """The last program called as (words before the first option, {option: value})."""
    words = calls(command, draft)[-1]
    first = next(i for i, word in enumerate(words) if word.startswith("-") and len(words[i]) > 2)
    pairs = words[first:]
    assert len(pairs) % 2 == 0
    return words[:first], dict(zip(pairs[::2], pairs[1::2], strict=True))


def tensorrt_file(facts, folder):
    (serve,) = calls(check("TensorRT-LLM", facts).command, cwd=folder)
    return serve, yaml.safe_load((folder / "tensorrt_llm.yaml").read_text())
