"""Checkpoints judged, evidence gathered, the answer in words."""
