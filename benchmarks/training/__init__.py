"""Networks trained over simulated workers: what they reach, and what their selections look like."""
