"""Drafters, which propose tokens, and policies for gamma."""
