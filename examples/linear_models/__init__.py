"""Linear models on sparse rows, whose gradients workers send without a selection."""
