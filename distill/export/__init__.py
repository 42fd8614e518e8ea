"""A draft as serving engines load it."""
