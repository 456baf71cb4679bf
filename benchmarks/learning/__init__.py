"""The loss of a model after the same steps, words or seconds, for different ways to train."""
