"""The verbs of `megatron checkpoint`."""
