"""The block loop and the tokens it commits."""
