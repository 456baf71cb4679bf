"""What the selectors have in common."""
