"""Metrics of a step, timers, the writers that print them, and the run log."""
