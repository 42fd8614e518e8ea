"""Load exported directories with the transformers of this interpreter, and write their logits: `python load_export.py DIR ...`."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, __version__

print(__version__)
for folder in map(Path, sys.argv[1:]):
    ids_BT = load_file(folder / "ids.safetensors")["ids"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    GenerationConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    text_ids = torch.tensor(tokenizer("def area(width, height):\n    return width * height\n")["input_ids"])
    save_file({"logits": logits_BTV, "text": text_ids}, folder / "loaded.safetensors")
