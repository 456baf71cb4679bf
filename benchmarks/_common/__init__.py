"""What the programs share: options, reports, times, tables, plots, processes, namespaces."""
