"""Models on a key/value memory with one length per row."""
