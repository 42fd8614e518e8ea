"""Judges drafts: proposing, verifying, measuring. It imports neither `data` nor `distill`."""
