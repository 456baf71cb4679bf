"""A linter for the prose of pages, docstrings and comments."""
