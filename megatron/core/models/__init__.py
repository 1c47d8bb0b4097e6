"""Floor 5: whole networks, one pipeline stage at a time.

embedding.py  what goes into a network: ids, positions and types as vectors
heads.py      what comes out of it: the output layer and its loss, BERT's heads
gpt.py        decoder-only transformers
mtp.py        multi-token prediction behind them
bert.py       encoders of text with hidden words
t5.py         encoder and decoder in one line of stages
flops.py      parameters, FLOPs and memory from the config alone
expert_counts.py  the share that experts have in them
"""
