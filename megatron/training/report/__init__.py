"""Metrics of a step, timers, and the file of the run log."""
