"""Trains the draft: student, objectives, the Accelerate loop, checkpoints, verdict and export."""

import logging

# transformers imports torchao where it is installed, which warns at every start of a CPU of what only CUDA needs.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
