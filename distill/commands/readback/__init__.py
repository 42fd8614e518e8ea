"""`understudy readback`."""
