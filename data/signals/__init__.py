"""What the teacher said about each token."""
