"""Shared by the programs: options, reports, times, display, contestants, processes, networks."""
