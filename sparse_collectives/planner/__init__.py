"""What to expect on a network, and what to use there."""
