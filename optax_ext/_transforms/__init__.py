"""Sparse allreduces as optax transformations, and transformations to combine with them."""
