"""Kernels: the one place that calls optional accelerators. Kernels are functions of tensors; parameters stay in our layers.

mask.py       MaskSpec: which key each query may see, before anyone makes a tensor of it
reference.py  every op in plain torch: the meaning of the others
fused.py      torch's own fused kernels (scaled dot product attention); flex.py: FlexAttention
blockwise_attention.py  attention over a block of keys, whose results merge (ring attention)
chunked_attention.py    attention with dropout on CPUs, a chunk of queries at a time
linear_loss.py  the loss of every token without the full matrix of logits
permute.py    rows of tokens to the order of experts, and back; grouped.py: the linear layers of many experts as one
triton/       norms, gated activations, rotations, rows of experts and the loss's softmax in Triton
external/     flash-attn 2 and 3, Transformer Engine, DeepEP, torchao
low_precision/  fp8 and NVFP4 matrices, their recipes, and a GPU's own fp8 products
table.py      Kernels record; select(): the best candidate per op, with reasons
"""
