"""The state of a sparse allreduce from outside: its placement, checkpoints and resharding."""
