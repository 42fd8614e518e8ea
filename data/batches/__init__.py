"""Which sequences make a step, and their tensors."""
