"""Megatron: training transformers at scale, in code that can be read.

`megatron.core` is the library (configs, parallelism, layers, optimizer, checkpoints) and never sees a command line;
`megatron.training` is the programme around it. `docs/` and the README hold the map of the house.
"""
