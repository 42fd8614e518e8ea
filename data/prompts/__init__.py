"""Prompts: from sources to token ids."""
