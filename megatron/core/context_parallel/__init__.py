"""Context parallelism: sequences are sharded over the context-parallel ranks, and attention sees whole sequences.

zigzag.py               Zigzag: which positions of a sequence each rank holds
attention.py            wraps any attention kernel: all-to-all (Ulysses), all-gather, ring, and two levels
ring.py                 ring attention: keys and values circulate; partial results merge by their log-sum-exp
sequence_assignment.py  which ranks share which sequence, when sequences differ in length
"""
