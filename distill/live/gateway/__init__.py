"""`understudy gateway`: a streaming proxy in front of engines that splits traffic between arms and writes the log."""
