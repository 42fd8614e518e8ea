"""The closed loop on one machine: traffic shifts, the draft is retrained and replaced, and a bad draft is rolled back."""
