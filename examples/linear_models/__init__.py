"""Linear models on sparse rows, whose gradients workers send as they are."""
