"""Replay, intervals, costs, and self-checks of the measurement."""
