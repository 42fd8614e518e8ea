"""Explanations of a draft's numbers: where it gains and loses, and how much better it could get."""
