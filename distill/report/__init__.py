"""What a person reads of a result: page, tables, figures, screen."""
