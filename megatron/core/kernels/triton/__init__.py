"""Triton kernels: norms, pointwise operations, permutation of tokens, and the loss."""
