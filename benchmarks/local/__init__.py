"""Time and memory of one process; nothing is trained and nothing is sent."""
