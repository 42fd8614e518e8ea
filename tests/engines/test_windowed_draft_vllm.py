"""A draft with windows of attention in a real vLLM: it stops at start, and with the flag of the exported command it
writes the target's text.
"""

import os
import subprocess

import pytest
import torch
from engine_process import ROOT, built
from tiny_models import tiny_model
from tiny_training import tiny_tokenizer

from distill.engines.protocol.facts import gather_facts
from distill.engines.protocol.verdict import check
from distill.models.target import load_target_side

BUILT = ROOT / ".venv-vllm" / "ready"
pytestmark = [pytest.mark.engine, *built(".venv-vllm", 600)]
FLAG = "--disable-hybrid-kv-cache-manager"


def start(target, draft, manager):
    script = ROOT / "tests" / "engines" / "start_vllm.py"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    environment.pop("PYTHONPATH", None)
    words = [BUILT.parent / "bin" / "python", script, target, draft, manager]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_the_exported_flag_is_what_a_draft_with_windows_needs(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    shape = {"vocab_size": len(tiny_tokenizer()), "hidden_size": 128, "head_dim": 32}
    model = tiny_model(**shape)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    for folder, one in ((target, model), (draft, tiny_model("gemma3_text", **shape, **windows))):
        one.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    facts = gather_facts(load_target_side(str(target)), load_target_side(str(draft)), str(draft), gamma=3)
    assert FLAG in check("vLLM", facts).command
    broken = start(target, draft, "on")
    assert "All drafting layers should belong to the same kv cache group" in broken.stdout + broken.stderr, (
        "it takes such drafts now: leave the flag out"
    )
    told = next(line for line in start(target, draft, "off").stdout.splitlines() if line.startswith("ids "))
    with torch.no_grad():
        ids_BT = model.generate(torch.arange(10, 40)[None], max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert [int(word) for word in told.split()[1:]] == ids_BT[0, 30:].tolist()
