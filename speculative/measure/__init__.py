"""Replay, intervals, costs, and the checks of the instrument."""
