"""What the programs share: options, reports, times, display, processes, namespaces."""
