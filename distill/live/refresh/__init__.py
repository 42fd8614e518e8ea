"""`understudy refresh`."""
