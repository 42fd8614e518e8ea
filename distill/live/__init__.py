"""Programs of the closed loop: what serves, watches, refreshes and rolls out."""
