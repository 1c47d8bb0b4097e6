"""Floor 5: whole networks, one pipeline stage at a time.

heads.py  what comes out of a network: the output layer and its loss
gpt.py    decoder-only transformers
flops.py  parameters, FLOPs and memory from the config alone
"""
