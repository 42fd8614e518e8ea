"""Judge checkpoints, gather evidence, and put the answer into words."""
