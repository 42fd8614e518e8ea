"""The commands of `understudy` besides training."""
