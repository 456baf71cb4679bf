"""The tables of numbers in README and docs: `python -m tools.tables`."""
