"""Floor 3: layers whose matrices are cut over the tensor ranks.

region.py     entrance and exit of a tensor-parallel region, with or without sequence parallelism
linear.py     ColumnLinear and RowLinear
embedding.py  VocabEmbedding and PositionEmbedding
norm.py       LayerNorm and RMSNorm with their gradient axes
loss.py       cross entropy over a cut vocabulary
"""
