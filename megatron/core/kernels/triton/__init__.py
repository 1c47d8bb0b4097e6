"""Triton kernels: norms, activations, rotary embeddings, permutation of tokens, and the loss."""

# Triton has both, but its own are no plain functions, and torch's compiler cannot trace them.


def cdiv(total: int, part: int) -> int:
    """Return total / part, rounded up."""
    return -(-total // part)


def round_up_to_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()
