"""`understudy drift`."""
