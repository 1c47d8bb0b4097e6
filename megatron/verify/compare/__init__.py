"""Two checkpoints or two runs side by side, and a bad step repeated."""
