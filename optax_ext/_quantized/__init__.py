"""Gradients exchanged whole, in a few bits for each entry."""
