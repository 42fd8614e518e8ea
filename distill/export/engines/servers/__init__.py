"""Servers that run in an engine's own environment, for engines without one. They import nothing of ours."""
