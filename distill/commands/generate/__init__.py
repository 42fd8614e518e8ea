"""`understudy generate`."""
