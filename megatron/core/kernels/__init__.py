"""Kernels: functions of tensors that compute the expensive operations. Parameters stay in our layers. Only this package calls optional libraries.

ops/            every op in plain torch, which defines it, and torch's own faster kernels
state_space/    scans and convolutions of Mamba-2 and the gated delta rule, in torch and in Triton
triton/         norms, gated activations, rotary embeddings, token permutation and the softmax of the loss in Triton
external/       flash-attn 2 and 3, Transformer Engine, DeepEP, torchao, packages of state space kernels
low_precision/  fp8 and NVFP4 matrices, scaling recipes, and the GPU's native fp8 matrix products
choice/         the best candidate for each op of a run, with reasons, and trials of the candidates
"""
