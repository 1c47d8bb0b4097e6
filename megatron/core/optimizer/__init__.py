"""Optimizers, gradient clipping, loss scaling and learning-rate schedules.

clip.py           norm and zeros of the gradient, each element of the network counted once
scaler.py         constant and dynamic loss scale
optimizer.py      the optimizer step over the segments that this rank owns
rule.py           UpdateRule: the interface of an optimizer algorithm; weight decay and learning-rate groups
elementwise.py    AdamW, SGD, Lion
adafactor.py      Adafactor under any layout
whole_matrix.py   base of rules that look at whole matrices, under any layout; which rank updates which
muon.py           Muon; orthogonal.py its Newton-Schulz iteration
soap.py           SOAP: Adam in the eigenbasis of Shampoo's factors
low_precision.py  AdamW with low-precision state; state_formats.py the formats
offload.py        main weights and moments in CPU memory
schedule.py       learning rate and weight decay as functions of the samples
"""
