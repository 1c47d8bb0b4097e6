"""Floor 3: layers whose matrices are cut over the tensor ranks.

region.py     entrance and exit of a tensor-parallel region, with or without sequence parallelism
linear.py     ColumnLinear and RowLinear
low_precision.py  their products of 8 and 4 bits, and delayed scales
rings.py      products of a cut sequence whose pieces travel while others are multiplied
embedding.py  VocabEmbedding and PositionEmbedding
norm.py       LayerNorm and RMSNorm with their gradient axes
loss.py       cross entropy over a cut vocabulary
"""
