"""Logits to probabilities to accepted tokens: pure and exact."""
