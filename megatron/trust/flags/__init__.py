"""A run's command as a checked config: the rules, repairs of what breaks them, and parameter counts."""
