"""`understudy evaluate`."""
