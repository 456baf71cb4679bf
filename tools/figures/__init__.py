"""The figures of the manual: `python -m tools.figures`."""
