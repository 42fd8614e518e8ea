"""The sections of a report; each file registers its own."""
