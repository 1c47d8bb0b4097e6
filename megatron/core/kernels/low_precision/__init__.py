"""fp8 and fp4 matrices: scaling recipes, rounding, and matrix products."""
