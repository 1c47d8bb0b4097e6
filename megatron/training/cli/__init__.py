"""The command line: flags, old spellings, help, and the checks before a run starts."""
