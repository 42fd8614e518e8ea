"""`understudy traffic`: the log of live traffic looked at, exported to train from, and made to forget."""
