"""What only Megatron-LM has: its checkpoints, read and written (checkpoint/)."""
