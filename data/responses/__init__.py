"""What the target answers, and where it is kept."""
