"""Trains the draft: student, objectives, the Accelerate loop, checkpoints, verdict and export."""
