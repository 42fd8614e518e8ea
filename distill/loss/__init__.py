"""Objectives, their gradients in closed form, and the head in chunks."""
