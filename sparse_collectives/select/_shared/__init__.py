"""Code that several selectors share."""
