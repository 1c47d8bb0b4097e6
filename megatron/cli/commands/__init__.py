"""The verbs of `megatron <verb>`, one a file, whose first line is its sentence in `megatron --help`; see `verbs.py`."""
