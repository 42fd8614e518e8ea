"""What every engine is asked: whether it supports a pair, its command, its answers and its counters."""
