"""Who proposes, and how many."""
