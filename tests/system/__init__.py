"""Trainings of several processes that are broken on purpose, or run for long."""
