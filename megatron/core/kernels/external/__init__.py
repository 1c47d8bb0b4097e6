"""Kernels of optional packages: flash-attn, Transformer Engine, DeepEP, torchao."""
