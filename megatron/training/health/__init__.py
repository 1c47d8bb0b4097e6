"""Step validation, failure dumps, replica checks, hang detection, and exit conditions."""
