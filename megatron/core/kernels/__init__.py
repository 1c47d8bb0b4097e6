"""Kernels: the one place that calls optional accelerators. Kernels are functions of tensors; parameters stay in our layers.

mask.py       MaskSpec: which key each query may see, before anyone makes a tensor of it
reference.py  every op in plain torch: the meaning of the others
fused.py      torch's own fused kernels (scaled dot product attention)
flash_attn.py attention by the packages flash-attn 2 and 3; flex.py by torch's FlexAttention
linear_loss.py  the loss of every token, whose logits are never all there
transformer_engine.py  attention by that library
triton_*.py   norms, gated activations, rotations, rows of experts and the loss's softmax in Triton
permute.py    rows of tokens to the order of experts, and back
blockwise_attention.py  attention over a block of keys, whose results merge (ring attention)
chunked_attention.py  attention with dropout on CPUs, a chunk of queries at a time
grouped.py    the linear layers of many experts as one
deep_ep.py    tokens to their experts by a library
fp8.py        fp8 matrices: scaling, rounding, and their product; fp8_native.py by a GPU's units
fp4.py        NVFP4 matrices: two levels of scales, stochastic rounding, Hadamard rotations
recipes.py    how the operands of a linear layer are rounded
table.py      Kernels record; select(): the best candidate per op, with reasons
"""
