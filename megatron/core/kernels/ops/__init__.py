"""Every op in plain torch, which defines what all other kernels must match, and torch's own faster kernels.

mask.py                   AttentionMaskSpec: which keys each query may attend to, before anyone makes a mask tensor
reference.py              the definitions; fused.py: torch's own fused kernels; flex.py: FlexAttention
varlen.py                 torch's attention of sequences of different lengths
packed_document_starts.py where the documents of packed rows begin
blockwise_attention.py    attention over a block of keys, whose results can be merged (ring attention)
chunked_attention.py      attention with dropout on CPUs, one chunk of queries at a time
paged.py                  attention over the blocks of a decoding cache
linear_loss.py            cross entropy of every token without the full matrix of logits
permute.py                permute tokens to the order of experts and back; grouped.py: the linear layers of many experts as one op
adamw.py                  the update of AdamW for many tensors
requirements.py           what a run requires of its kernels; host_read_permission.py: whether sizes may be read from the device
"""
