"""The stub engine with vLLM's command line: `vllm serve TARGET --speculative-config JSON --host HOST --port PORT`."""

from __future__ import annotations

import argparse
import json
import sys

from stub_engine import EngineOptions, run


def options_of(words: list[str]) -> EngineOptions:
    """Read the flags that decide how the pair decodes; the others have no meaning here."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("target")
    parser.add_argument("--speculative-config", type=json.loads, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    given, _ = parser.parse_known_args(words)
    drafts = given.speculative_config
    rule = "sample" if drafts.get("draft_sample_method") == "probabilistic" else "greedy-draft"
    return EngineOptions(given.target, drafts["model"], given.port, given.host, drafts["num_speculative_tokens"], rule)


if __name__ == "__main__":
    sys.exit(run(options_of(sys.argv[1:])))
