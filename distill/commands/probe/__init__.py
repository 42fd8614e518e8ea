"""`understudy probe`."""
