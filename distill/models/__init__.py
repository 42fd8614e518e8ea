"""Target, draft and student: loaded, carved, transplanted, compared token by token."""
