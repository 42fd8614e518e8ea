"""Write the weights that an 8-bit model in OpenVINO's format computes with beside it, so that it can be loaded and replayed like any model.

    python openvino_weights.py DIR

It runs in the engine's environment. DIR is one that `openvino_server.py` made.
"""

import json
import sys
import tempfile
from pathlib import Path

import openvino as ov
import torch
from transformers import AutoModelForCausalLM

MARK = "._openvino_orig_weight"  # after the layer's name; its scale and zero point have this name and a suffix
WRITTEN = ("config.json", "model.safetensors")


def main(place: Path) -> None:
    """Multiply out weights of 8 bits, and take the others from the model that was converted."""
    model = AutoModelForCausalLM.from_pretrained(json.loads((place / "source.json").read_text())[0], dtype="float32")
    layers, found = dict(model.named_modules()), 0
    nodes = ov.Core().read_model(place / "openvino_model.xml").get_ops()
    values = {one.get_friendly_name(): one.data for one in nodes if one.get_type_name() == "Constant"}
    for name in (name for name in values if name.endswith(MARK)):
        if values[name].dtype.itemsize != 1 or values[name].ndim != 2:
            sys.exit(f"{place}: {name} is not in 8 bits with a scale for each row")
        whole, zero, scale = (
            torch.from_numpy(values[one].astype("float32")) if one in values else 0.0
            for one in (name, f"{name}/zero_point", f"{name}/scale")
        )
        layers[name.removeprefix("self.").removesuffix(MARK)].weight.data.copy_((whole - zero) * scale)
        found += 1
    if not found:
        sys.exit(f"{place}: no weights in 8 bits; replay the model that it was converted from")
    with tempfile.TemporaryDirectory(dir=place) as made:
        model.save_pretrained(made, max_shard_size="1TB")
        for name in WRITTEN:
            Path(made, name).replace(place / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
