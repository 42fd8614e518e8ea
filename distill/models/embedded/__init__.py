"""The small Python target that is shipped with us, and the program that trains it."""
