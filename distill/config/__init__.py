"""What a run may say, and which values cannot go together."""
