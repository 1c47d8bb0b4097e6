"""Tensor-parallel layers.

region.py             entrance and exit of a tensor-parallel region, with or without sequence parallelism
linear.py             ColumnParallelLinear and RowParallelLinear
low_precision.py      fp8 and fp4 matmuls, delayed scaling
overlapped_matmul.py  matmuls overlapped with the communication of sequence parallelism
embedding.py          VocabParallelEmbedding and PositionEmbeddingTable
norm.py               LayerNorm and RMSNorm with their gradient axes
cross_entropy.py      vocabulary-parallel cross entropy
"""
