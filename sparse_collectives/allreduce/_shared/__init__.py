"""What the allreduces have in common."""
