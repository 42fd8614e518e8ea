"""The config of a run: keys, checks, loading and command lines."""
