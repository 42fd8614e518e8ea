"""`understudy rollout`: put a new draft version into service, or take it back if it is not better."""
