"""`understudy traffic`: show the log of live traffic, export it for training, and forget requests."""
