"""Files of models: which of their weights are used, adapters, GGUF."""
