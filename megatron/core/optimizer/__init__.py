"""Optimizers.

groups.py      weight decay and learning-rate groups; which parameters are Muon's
clip.py        norm and zeros of the gradient, each element of the network counted once
scaler.py      constant and dynamic loss scale
optimizer.py   fp32 main weights, one step over what this rank owns, skipped steps
rule.py        what an update rule is to the optimizer
elementwise.py AdamW, SGD, Lion
adafactor.py   Adafactor over any layout
muon.py        Muon over any layout; orthogonal.py the mathematics, owners.py who works on what
low_precision.py  AdamW with low-precision state; formats.py its formats
offload.py     main weights and moments in CPU memory
schedule.py    learning rate and weight decay by sample
"""
