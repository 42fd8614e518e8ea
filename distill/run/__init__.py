"""A run's folder: its prompts, responses, checkpoints and where they came from."""
