"""The Accelerate loop and what feeds it."""
