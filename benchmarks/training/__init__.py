"""Networks trained over simulated workers: their accuracy, and their selections."""
