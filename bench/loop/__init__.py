"""The whole loop shown on one machine: traffic shifts, the draft is retrained and replaced, and a bad one is rolled back."""
