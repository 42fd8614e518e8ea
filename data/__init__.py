"""Makes the tokens: prompts from sources, responses from the target, a store on disk, batches for the trainer."""
