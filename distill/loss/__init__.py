"""Objectives, their gradients, and the output head in chunks."""
