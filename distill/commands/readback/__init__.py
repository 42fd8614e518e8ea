"""`understudy readback`: compare a running engine with replay."""
