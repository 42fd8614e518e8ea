"""`understudy sweep`."""
