"""The state of a sparse allreduce from outside: where it is, how it is saved and reshaped."""
