"""Uploads to the hub: an export as a model, prompts and responses as a dataset."""
