"""A new version of a draft into service beside the old one, and back if it is not better."""
