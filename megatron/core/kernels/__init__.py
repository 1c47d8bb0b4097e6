"""Kernels: functions of tensors that compute the expensive operations. Parameters stay in our layers. Only this package calls optional libraries.

mask.py                 AttentionMaskSpec: which keys each query may attend to, before anyone makes a mask tensor
reference.py            every op in plain torch: the definition that all other kernels must match
fused.py                torch's own fused kernels (scaled dot product attention); flex.py: FlexAttention
varlen.py               torch's attention of sequences of different lengths; packed_document_starts.py: where the documents of packed rows begin
blockwise_attention.py  attention over a block of keys, whose results can be merged (ring attention)
chunked_attention.py    attention with dropout on CPUs, one chunk of queries at a time
linear_loss.py          cross entropy of every token without the full matrix of logits
permute.py              permute tokens to the order of experts and back; grouped.py: the linear layers of many experts as one op
triton/                 norms, gated activations, rotary embeddings, token permutation and the softmax of the loss in Triton
external/               flash-attn 2 and 3, Transformer Engine, DeepEP, torchao
low_precision/          fp8 and NVFP4 matrices, scaling recipes, and the GPU's native fp8 matrix products
table.py                the Kernels record, and select_kernels(): the best candidate for each op, with reasons
requirements.py         what a run requires of its kernels
kernel_check.py         a trial of each op against its definition; startup_check.py: a run's kernels, with defaults that passed theirs
"""
