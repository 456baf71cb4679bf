"""One step of error feedback, in the order of its phases."""
