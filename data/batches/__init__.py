"""Which sequences share a step, as tensors."""
