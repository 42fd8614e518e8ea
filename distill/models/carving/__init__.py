"""Make a draft of the target's own weights: layers and MLP channels."""
