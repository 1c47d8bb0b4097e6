"""What the launcher told this process: its rank, its store, elastic layouts and spare ranks."""
