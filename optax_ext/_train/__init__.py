"""The training loop: the step, what to watch, and when to give up."""
