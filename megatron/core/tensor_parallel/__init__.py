"""Tensor-parallel layers.

region.py                  entrance and exit of a tensor-parallel region, with or without sequence parallelism
linear.py                  ColumnParallelLinear and RowParallelLinear
compiled_linear.py         linear layers in graphs of torch's compiler
frozen_quantized.py        products with frozen weights that are stored quantized
low_precision.py           fp8 and fp4 matmuls, delayed scaling
compiled_low_precision.py  the same in graphs of torch's compiler
overlapped_matmul.py       matmuls overlapped with the communication of sequence parallelism
embedding.py               VocabParallelEmbedding and PositionEmbeddingTable
norm.py                    LayerNorm and RMSNorm with their gradient axes
cross_entropy.py           vocabulary-parallel cross entropy
"""
