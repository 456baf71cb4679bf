"""Gradients exchanged as products of two thin matrices."""
