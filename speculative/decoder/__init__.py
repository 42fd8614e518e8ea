"""The block loop and what it commits."""
