"""Sequences that are cut over the context ranks, and attention that sees them whole.

sequence.py   Zigzag: which places of a sequence each rank holds
attention.py  a kernel with the usual signature around any attention kernel: all-to-all, all-gather, ring, and two levels
ring.py       keys and values travel round; partial results merge by their log-sum-exp
planner.py    which ranks share which sequence, when sequences differ in length
"""
