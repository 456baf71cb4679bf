"""The tables of numbers in the manual: `python -m tools.tables`."""
