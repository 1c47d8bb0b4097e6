"""Settings in files of other projects. mapping.py: every key is taken, harmless for a stated reason, or refused by its name."""
