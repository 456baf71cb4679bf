"""Transformations around a sparse allreduce, beside it and behind it."""
