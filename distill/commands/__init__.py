"""What `understudy` can be asked for besides training."""
