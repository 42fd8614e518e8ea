"""`understudy compare`."""
