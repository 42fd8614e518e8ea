"""A result for people: page, tables, figures, screen."""
