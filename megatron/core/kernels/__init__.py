"""Floor 2: the one seam to optional accelerators. Kernels are functions of tensors; parameters stay in our layers.

mask.py       MaskSpec: which key each query may see, before anyone makes a tensor of it
reference.py  every op in plain torch: the meaning of the others
fused.py      torch's own fused kernels (scaled dot product attention)
blocks.py     attention over some of the keys, whose results merge
grouped.py    the linear layers of many experts as one
deep_ep.py    tokens to their experts by a library
table.py      Kernels record; select(): the best candidate per op, with reasons
"""
