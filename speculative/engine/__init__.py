"""Models with a key/value cache that has one length per row."""
