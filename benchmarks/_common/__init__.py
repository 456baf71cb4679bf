"""What the programs share: options, reports, times, display, contestants, processes, networks."""
