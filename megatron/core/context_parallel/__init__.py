"""Context parallelism: sequences are sharded over the context-parallel ranks, and attention sees whole sequences.

zigzag.py                    Zigzag: which positions of a sequence each rank holds
attention.py                 wraps any attention kernel: all-to-all (Ulysses), all-gather, ring, and two levels
ring.py                      ring attention: keys and values circulate; partial results merge by their log-sum-exp
sequence_assignment.py       which ranks share which sequence, when sequences differ in length
head_exchange.py             all-to-all between shards of positions and of heads, for layers that must see whole sequences
sequence_sharded_kernels.py  layers with a state over sharded positions: states are gathered
"""
