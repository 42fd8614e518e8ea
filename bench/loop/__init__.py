"""The whole loop shown on one machine: traffic shifts, the draft is trained anew, replaced, and a bad one is sent back."""
