"""Parts that several allreduces share."""
