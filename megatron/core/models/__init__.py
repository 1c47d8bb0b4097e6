"""Whole networks, one pipeline stage at a time.

names.py         names of parameters that several files speak of
embedding.py     what goes into a network: ids, positions and types as vectors
output_heads.py  what comes out of it: the output layer and its loss, BERT's heads
gpt.py           decoder-only transformers
mtp.py           multi-token prediction behind them
bert.py          encoders of text with hidden words
t5.py            encoder and decoder in one line of stages
describe.py      names, shapes and counts of parameters, from the network on the meta device
on_meta.py       networks on the meta device
flops.py         FLOPs and memory from the config
"""
